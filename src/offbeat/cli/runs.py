"""Implementations of the commands ``train``, ``simulate`` and ``compare``.

``offbeat_lab.job`` explains the terms.
"""

import contextlib
import re
import time
from dataclasses import replace
from pathlib import Path

from offbeat.arguments import require_integer
from offbeat.cli.checks import (
    check_method,
    require_distinct,
    require_file,
    require_folder,
    require_no_simulator_options,
    require_picture,
    require_writable,
)
from offbeat.cli.launcher import (
    command_line,
    is_launched,
    real_workers,
    require_single_process,
    with_launched_workers,
)
from offbeat.cli.options import (
    USUAL_LATENCY,
    CompareOptions,
    SimulateOptions,
    TrainOptions,
    VirtualClusterOptions,
)
from offbeat.cli.progress import Bar
from offbeat.cli.view import (
    WIDER,
    console,
    print_narrow_table,
    print_path,
    print_step_time,
)
from offbeat.simulate import Network
from offbeat.units import to_seconds
from offbeat_lab import compare as comparison
from offbeat_lab import report
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import Runner, VirtualCluster
from offbeat_lab.methods.registry import is_ideal, require_virtual
from offbeat_lab.results import Result, writing
from offbeat_lab.scenario import Scenario
from offbeat_lab.timing.padding import STRAGGLERS_NEED_STEP_TIME
from offbeat_lab.timing.step_time import measure_recipe
from offbeat_lab.train import planned_times
from offbeat_lab.tuning import LEAST_BUDGET, untuned, with_ideal

_MOST_SEEDS = 1000


def train(job: Job, options: TrainOptions) -> None:
    """Train a recipe with one method on real workers."""
    job = replace(with_launched_workers(job), live=True)

    checkpoints = None if job.checkpoints is None else Path(job.checkpoints)

    def check() -> None:
        require_folder("--checkpoints", checkpoints)
        job.check()
        require_file("--records", None if job.log is None else Path(job.log))
        if checkpoints is not None:
            require_writable("--checkpoints", checkpoints)

    with real_workers(job, options.bandwidth, check) as runner:
        if runner is not None:
            _run_one(job, runner)


def simulate(job: Job, options: SimulateOptions, simulated: VirtualClusterOptions) -> None:
    """Train a recipe with one method on simulated workers."""
    timeline, as_json = options.timeline, options.as_json
    require_single_process("offbeat simulate")
    require_virtual(job.strategy)
    require_picture("--timeline", timeline)
    require_file("--json", as_json)
    if timeline is not None and timeline == as_json:
        raise ValueError(f"--timeline and --json are the same file: {timeline}")
    job = replace(
        job,
        jitter=simulated.jitter,
        workers_per_node=simulated.workers_per_node,
        scenario=_read_scenario(simulated.scenario, job.workers),
    )
    job.check()
    runner = _virtual_cluster(job, options.bandwidth, simulated)
    for option, path in (("--timeline", timeline), ("--json", as_json)):
        if path is not None:
            require_writable(option, path.parent)
    _run_one(job, runner)
    assert runner.last is not None
    if timeline is not None:
        with writing(timeline):
            runner.last.plot(timeline)
        print_path("timeline", timeline)
    if as_json is not None:
        with writing(as_json):
            as_json.write_text(runner.last.to_json(), encoding="utf-8")
        print_path("json    ", as_json)


def compare(job: Job, options: CompareOptions, simulated: VirtualClusterOptions) -> None:
    """Run several methods under the same seeds; write table, plot and report."""
    strategies, seeds = options.strategy, options.seeds
    require_integer("seeds", seeds, least=1)
    if seeds > _MOST_SEEDS:
        raise ValueError(f"seeds must be at most {_MOST_SEEDS}, got {seeds}")
    step_time = simulated.step_time
    job = with_launched_workers(job)
    job = replace(
        job,
        jitter=simulated.jitter,
        slow=options.slow,
        scenario=_read_scenario(simulated.scenario, job.workers),
        step_seconds=None if step_time is None or options.simulated else to_seconds(step_time),
        workers_per_node=simulated.workers_per_node,
    )
    if options.simulated:
        require_single_process("--simulate")
    first = strategies  # methods as they are before tuning
    if options.tune is not None:
        require_integer("tune", options.tune, least=LEAST_BUDGET)
        if job.lr_scale != 1:
            raise ValueError(
                f"--lr-scale {job.lr_scale:g}: --tune chooses the learning rate; leave it out, "
                "or fix it for one strategy, as in -s 'bsp --lr-scale 2'"
            )
        first = [untuned(text) for text in with_ideal(strategies)]

    folder = options.output
    if folder is None:
        folder = Path("runs", f"{_file_name(job.recipe)}-{time.strftime('%Y%m%d-%H%M%S')}")

    def check() -> None:
        require_distinct(job, first)
        require_folder("--output", options.output)
        task = None
        for text in first:
            if options.simulated:
                require_virtual(job.under(text).strategy)
            task = check_method(job, text, task)
            if not options.simulated:
                _check_real(job.under(text), options.bandwidth, simulated)

    with contextlib.ExitStack() as stack:
        runner: Runner | None
        if options.simulated:
            check()
            bandwidth = "1Gbit/s" if options.bandwidth is None else options.bandwidth
            runner = _virtual_cluster(job, bandwidth, simulated)
        else:
            runner = stack.enter_context(real_workers(job, options.bandwidth, check))
        if runner is None:
            return
        require_writable("--output", folder)
        runs = comparison.count_runs(job, strategies, seeds, options.tune)
        with Bar(runs, at_most=options.tune is not None) as bar:
            results = comparison.compare(
                job,
                strategies,
                seeds=seeds,
                runner=runner,
                output=folder,
                on_start=bar.start,
                on_event=bar.event,
                on_reused=bar.skip,
                command=command_line(),
                tune=options.tune,
            )
        _print_results(results, rest="table.md has them")
        written = report.write_report(results, folder)
        for what, path in written.items():
            print_path(f"{what:7}", path)
        if "plot" not in written:
            console.print("plot    none: it needs matplotlib, pip install 'offbeat[plot]'")


def _check_real(job: Job, bandwidth: str | None, options: VirtualClusterOptions) -> None:
    """Raise ValueError if real processes do not support the options."""
    require_no_simulator_options(options)
    scenario = Scenario.from_json(job.scenario)
    refused = {
        "start offbeat without a launcher, or add --simulate": is_launched(),
        "ideal needs --step-time, as in 50ms": is_ideal(job.strategy) and job.step_seconds is None,
    }
    for reason, given in refused.items():
        if scenario.elastic and given:
            raise ValueError(f"--scenario with deaths or joins: {reason}")
    stragglers = job.jitter or job.slow or scenario.slowdowns(job.workers)
    if options.step_time is None and stragglers:
        raise ValueError(STRAGGLERS_NEED_STEP_TIME)
    if bandwidth is None and scenario.bandwidths(job.workers):
        raise ValueError(
            f"--scenario {options.scenario} changes bandwidths: give --bandwidth, the one at the "
            "start, or add --simulate"
        )


def _file_name(recipe: str) -> str:
    """Return a name for the directory of the results of ``recipe``."""
    return re.sub(r"[^\w-]+", "-", recipe.rpartition("/")[2].replace(".py", "")).strip("-")


def _read_scenario(path: Path | None, workers: int) -> str | None:
    """Return the scenario in the file ``path`` as the text that a job stores."""
    return None if path is None else str(Scenario.read(path, workers))


def _virtual_cluster(job: Job, bandwidth: str, options: VirtualClusterOptions) -> VirtualCluster:
    scenario = Scenario.from_json(job.scenario)
    network = Network(
        bandwidth,
        latency=USUAL_LATENCY if options.latency is None else options.latency,
        workers_per_node=options.workers_per_node,
        inside=options.inside,
        inside_latency=options.inside_latency,
        per_worker_changes=scenario.bandwidths(job.workers),
    )
    # Created before the slow measurement of the step time: the constructor finds mistakes.
    compute = planned_times(job, "1s" if options.step_time is None else options.step_time)
    if options.step_time is None:
        _, step = measure_recipe(job.recipe, data=job.setup().data)
        print_step_time(job.recipe, step)
        compute = replace(compute, step=step.seconds)
    return VirtualCluster(network, compute)


def _run_one(job: Job, runner: Runner) -> None:
    with Bar() as bar:
        bar.start(job)
        result = comparison.run_and_record(job, bar.event, runner)
    _print_results([result])


def _print_results(results: list[Result], *, rest: str = WIDER) -> None:
    chosen, results = report.tuning(results), report.without_trials(results)
    console.print()
    if chosen is not None:
        print_narrow_table(chosen, labels=2, rest=rest)
    # The ranges would be too wide.
    print_narrow_table(report.table(results, ranges=False), rest=rest)
    for note in report.notes(results):
        console.print(f"{note}\n", style="dim", highlight=False)
    for table in (report.times_to_targets(results, ranges=False), report.differences(results)):
        if table is not None and len(results) > 1:
            print_narrow_table(table, rest=rest)
