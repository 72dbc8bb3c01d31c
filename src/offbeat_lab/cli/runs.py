"""Implementation of the command ``compare``. ``offbeat_lab.job`` explains the terms."""

import contextlib
import os
import re
import sys
import time
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import typer

from offbeat import Network
from offbeat.extend import (
    console,
    print_narrow_table,
    require_integer,
    show_seconds,
    to_bandwidth,
    to_seconds,
)
from offbeat_lab import compare as comparison
from offbeat_lab import report
from offbeat_lab.cli.checks import (
    check_method,
    require_distinct,
    require_writable,
)
from offbeat_lab.cli.progress import Bar
from offbeat_lab.cli.workers import (
    command_line,
    is_launched,
    real_workers,
    require_single_process,
    with_launched_workers,
)
from offbeat_lab.job import USUAL_LATENCY, Job, refuse
from offbeat_lab.launch.runners import Runner, VirtualCluster
from offbeat_lab.methods.registry import is_ideal, require_virtual
from offbeat_lab.results import Result, writing
from offbeat_lab.scenario import Scenario, value_at
from offbeat_lab.timing.padding import STRAGGLERS_NEED_STEP_TIME
from offbeat_lab.timing.step_time import measure_recipe
from offbeat_lab.train import planned_times
from offbeat_lab.tuning import LEAST_BUDGET, untuned, with_ideal

_MOST_SEEDS = 1000
_MOST_SPREAD = 3.0  # ratio of the longest steps to the shortest, above which a warning is printed


def compare(**values: Any) -> None:
    """Train with one method, or with several under the same seeds; print and write the results.

    ``values`` are the options of the command line.
    """
    names = [one.name for one in fields(_Comparison) if one.name != "job"]
    options = {name: values.pop(name) for name in names}
    for name in ("data", "log"):  # jobs are stored as JSON, which has no paths
        values[name] = None if values[name] is None else str(values[name])
    job = Job(**values)
    # Console scripts and `python -P` do not add the current directory, from which recipes and
    # strategies of the user may be imported. A file there does not replace an installed module.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    job = with_launched_workers(job)
    scenario, simulated, step_time = (options[n] for n in ("scenario", "simulated", "step_time"))
    job = replace(
        job,
        scenario=None if scenario is None else str(Scenario.read(scenario, job.workers)),
        step_seconds=None if step_time is None or simulated else to_seconds(step_time),
    )
    asked = _Comparison(job=job, **options)
    if simulated:
        require_single_process("--simulate")
    follows = os.environ.get("RANK", "0") != "0" and is_launched()  # rank 0 finds mistakes
    if not follows:
        asked.check()
    runner: contextlib.AbstractContextManager[Runner]
    if simulated:
        runner = contextlib.nullcontext(asked.virtual_cluster())
    else:
        runner = real_workers(job, asked.bandwidth)
    with runner as entered:
        if follows:
            return
        if is_launched():
            console.print(f"joined the {job.workers} processes that the launcher has started")
        if asked.folder is not None:
            require_writable("--output", asked.folder)
        asked.run(entered)


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """The runs that the command line asks for: the job, and options that are not part of it.

    Attributes:
        job: Settings that all runs share.
    """

    job: Job
    strategy: list[str] | None
    tune: int | None
    seeds: int
    simulated: bool
    bandwidth: str | None
    latency: str | None
    step_time: str | None
    scenario: Path | None
    output: Path | None

    @property
    def strategies(self) -> list[str]:
        """The methods, as given."""
        return self.strategy or [Job.strategy]

    @property
    def single(self) -> bool:
        """True if there is a single run."""
        return len(self.strategies) == self.seeds == 1 and self.tune is None

    @cached_property
    def folder(self) -> Path | None:
        """Directory of results and report. None: nothing is written."""
        if self.output is not None or self.single:
            return self.output
        name = re.sub(r"[^\w-]+", "-", self.job.recipe.rpartition("/")[2].replace(".py", ""))
        return Path("runs", f"{name.strip('-')}-{time.strftime('%Y%m%d-%H%M%S')}")

    def check(self) -> None:
        """Raise for mistakes, before anything runs."""
        job = self.job
        require_integer("seeds", self.seeds, least=1)
        if self.seeds > _MOST_SEEDS:
            raise ValueError(f"seeds must be at most {_MOST_SEEDS}, got {self.seeds}")
        first = self.strategies  # methods as they are before tuning
        if self.tune is not None:
            require_integer("tune", self.tune, least=LEAST_BUDGET)
            if job.lr_scale != 1:
                raise ValueError(
                    f"--lr-scale {job.lr_scale:g}: --tune chooses the learning rate; leave it out, "
                    "or fix it for one strategy, as in -s 'bsp --lr-scale 2'"
                )
            first = [untuned(text) for text in with_ideal(first)]
        require_distinct(job, first)
        output, log = self.output or Path(), Path(job.log or os.devnull)
        is_file = output.is_file() or output.suffix == ".jsonl"
        several = "--records is for a single run: give one strategy, without --seeds and --tune"
        reasons = {
            f"--output {output}: name a directory, not a file": is_file,
            f"--records {log}: it is a directory; name a file": log.is_dir(),
            several: job.log is not None and not self.single,
        }
        refuse("{}", reasons)
        task = None
        for text in first:
            if self.simulated:
                require_virtual(job.under(text).strategy)
            task = check_method(job, text, task, several=len(first) > 1)
            if not self.simulated:
                self._check_real(job.under(text))

    def run(self, runner: Runner) -> None:
        """Run all methods and seeds; print and write the results."""
        job, seeds, tune, folder = self.job, self.seeds, self.tune, self.folder
        runs = comparison.count_runs(job, self.strategies, seeds, tune)
        with Bar(runs, at_most=tune is not None) as bar:
            results = comparison.compare(
                job,
                self.strategies,
                seeds=seeds,
                runner=runner,
                output=folder,
                on_start=bar.start,
                on_event=bar.event,
                on_reused=bar.skip,
                command=command_line(),
                tune=tune,
            )
        _print_results(
            results, rest="a wider terminal shows them" if folder is None else "table.md has them"
        )
        if folder is None:
            return
        written = report.write_report(results, folder)
        if self.single and isinstance(runner, VirtualCluster) and runner.last is not None:
            written |= {"timeline": folder / "timeline.png", "totals": folder / "simulation.json"}
            with writing(written["timeline"]):
                runner.last.plot(written["timeline"])
            with writing(written["totals"]):
                written["totals"].write_text(runner.last.to_json(), encoding="utf-8")
        for what, path in written.items():
            console.print(f"{what:8} {path}", highlight=False, soft_wrap=True)

    def _check_real(self, job: Job) -> None:
        """Raise ValueError if real processes do not support the self."""
        simulators = {
            "--latency": self.latency is not None,
            "--workers-per-node": job.workers_per_node > 1,
        }
        refuse("{} is for simulated workers; add --simulate, or leave it out", simulators)
        scenario = Scenario.from_json(job.scenario)
        if scenario.elastic:
            reasons = {
                "start offbeat without a launcher, or add --simulate": is_launched(),
                "ideal needs --step-time, as in 50ms": (
                    is_ideal(job.strategy) and job.step_seconds is None
                ),
            }
            refuse("--scenario with deaths or joins: {}", reasons)
        stragglers = job.jitter or job.slow or scenario.slowdowns(job.workers)
        if self.step_time is None and stragglers:
            raise ValueError(STRAGGLERS_NEED_STEP_TIME)
        if self.bandwidth is None and scenario.bandwidths(job.workers):
            raise ValueError(
                f"--scenario {self.scenario} changes bandwidths: give --bandwidth, the one at the "
                "start, or add --simulate"
            )

    def virtual_cluster(self) -> VirtualCluster:
        """Return the simulated workers. Measures the time of a step if it is not given."""
        job = self.job
        usual = to_bandwidth("1Gbit/s" if self.bandwidth is None else self.bandwidth)
        changes = Scenario.from_json(job.scenario).bandwidths(job.workers)
        if changes and job.workers_per_node > 1:
            raise ValueError(
                f"--scenario {self.scenario} changes bandwidths, but the workers of a node share "
                "its link: leave out --workers-per-node"
            )
        network = Network(
            (lambda rank, now: value_at(changes, rank, now, usual)) if changes else usual,
            latency=USUAL_LATENCY if self.latency is None else self.latency,
            workers_per_node=job.workers_per_node,
        )
        # Created before the slow measurement of the step time: the constructor finds mistakes.
        compute = planned_times(job, "1s" if self.step_time is None else self.step_time)
        if self.step_time is None:
            compute = planned_times(job, _measured_step(job))
        return VirtualCluster(network, compute)


def _measured_step(job: Job) -> float:
    """Return and print the step time of a recipe. Warn on standard error if its steps differ."""
    low, seconds, high = measure_recipe(job.recipe, data=job.setup().data)
    console.print(
        f"a step of {job.recipe} takes {show_seconds(seconds)} here, as measured now; --step-time "
        "sets another time",
        highlight=False,
        soft_wrap=True,
    )
    if high > _MOST_SPREAD * low:
        typer.echo(
            f"warning: measured steps took {show_seconds(low)} to {show_seconds(high)} (10 % and "
            "90 % quantiles), perhaps because other programs were running: set --step-time, or "
            "measure again on an idle machine",
            err=True,
        )
    return seconds


def _print_results(results: list[Result], *, rest: str) -> None:
    # With the ranges of the seeds, the tables would be too wide.
    others, results = report.other_tables(results, ranges=False), report.without_trials(results)
    console.print()
    if (chosen := others.pop("Tuning", None)) is not None:
        print_narrow_table(chosen, labels=2, rest=rest)
    print_narrow_table(report.table(results, ranges=False), rest=rest)
    for note in report.notes(results):
        console.print(f"{note}\n", style="dim", highlight=False)
    for other in others.values() if len(results) > 1 else ():
        print_narrow_table(other, rest=rest)
