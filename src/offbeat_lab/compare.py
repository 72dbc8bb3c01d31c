"""Comparisons of training methods: runs with the same seeds, recorded in ``results.jsonl``.

A *method* is a strategy of this package or a *reference* to compare with, such as torch's DDP. It
can have options of its own, such as ``--wire int8``.
"""

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import offbeat
from offbeat import Stats
from offbeat_lab.events import End, Evaluation, Event, Start
from offbeat_lab.job import METHOD_OPTIONS, Job
from offbeat_lab.launch.runners import Runner
from offbeat_lab.recipes import find_recipe
from offbeat_lab.results import Result, Trial, public_job, read_results, writing
from offbeat_lab.tuning import tune as tune_methods
from offbeat_lab.tuning import with_ideal

RESULTS = "results.jsonl"

_PER_RUN = {"strategy", "seed", *METHOD_OPTIONS}
"""Fields in which the runs of one comparison differ."""
_IGNORED = {"log", "timeout_seconds"}
"""Fields that may differ between a new run and the results already in the file."""
_OPTIONS = {"step_seconds": "step-time"}
"""Field → command-line name, for fields whose option has another name."""


def run_and_record(
    job: Job,
    on_event: Callable[[Event], None],
    runner: Runner,
    *,
    command: str = "",
) -> Result:
    """Run ``job`` and return its ``Result``. Does not write the result to a file.

    ``on_event`` receives each event of rank 0. ``command`` is only stored in the result.
    """
    recipe = find_recipe(job.recipe)
    points: list[Evaluation] = []
    stats: list[Stats] = []
    model_bytes: int | None = None

    def listen(event: Event) -> None:
        nonlocal model_bytes
        match event:
            case Start():
                model_bytes = event.model_bytes
            case Evaluation():
                points.append(event)
            case End():
                stats.extend(event.stats)
                if (seconds := event.step_seconds) is not None:
                    points[:] = (replace(p, seconds=p.step * seconds) for p in points)
        on_event(event)

    runner.run(job, listen)
    return Result(
        job=job,
        metric=recipe.metric,
        higher_is_better=recipe.higher_is_better,
        target=recipe.target,
        link=str(runner),
        machine=runner.machine,
        versions=versions(),
        simulated=runner.simulated,
        points=tuple(points),
        stats=tuple(stats),
        model_bytes=model_bytes,
        command=command,
    )


def versions() -> dict[str, str]:
    """Return the versions of Offbeat, torch and Python by name."""
    return {
        "offbeat": offbeat.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def compare(
    job: Job,
    strategies: Sequence[str],
    *,
    seeds: int = 1,
    runner: Runner,
    output: Path | None,
    on_start: Callable[[Job], None],
    on_event: Callable[[Event], None],
    on_reused: Callable[[Result], None] = lambda result: None,
    command: str = "",
    tune: int | None = None,
) -> list[Result]:
    """Run ``job`` with each method and seed, and append each result to a file of JSON lines.

    The outer loop is over the seeds. If the machine becomes slower meanwhile, this affects all
    methods alike.

    A run whose result is already in the file is skipped. To continue an interrupted comparison, or
    to add methods or seeds, call this function again with the same file.

    Args:
        job: Settings that all runs share.
        strategies: Methods, such as ``"local:period=8 --wire int8"``; see ``Job.under``.
        seeds: Number of seeds. The first one is the seed of ``job``.
        runner: Starts the workers.
        output: Directory of ``results.jsonl``, or path of a file whose name ends in ``.jsonl``.
            None: no file is read or written.
        on_start: Function that receives the job of each run before it starts.
        on_event: Function that receives each event of rank 0.
        on_reused: Function that receives the existing result of each skipped run, before the first
            run starts. With ``tune``, the runs depend on the results, and it is called in turn.
        command: Command line to store in the results.
        tune: Number of trials to tune each method with; see ``lab.tuning``. The comparison then has
            each method with its chosen settings, and adds the ideal; see there. None:
            the methods are not tuned.

    Returns:
        All results, trials and those in the file included, in the order of the file.

    Raises:
        ValueError: the file holds results of another comparison, or an invalid line.
    """
    path = None if output is None else output if output.suffix == ".jsonl" else output / RESULTS
    results: list[Result] = []
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        results = _read_existing(path, job, runner, tune)

    def existing(run: Job, trial: Trial | None = None) -> Result | None:
        for result in results:
            if result.trial == trial and _is_of(result, run):
                on_reused(result)
                return result
        return None

    def result_of(run: Job, trial: Trial | None = None) -> Result:
        if (result := existing(run, trial)) is not None:
            return result
        on_start(run)
        result = run_and_record(run, on_event, runner, command=command)
        result = replace(result, trial=trial)
        results.append(result)
        if path is not None:
            _append(path, json.dumps(result.to_dict()) + "\n")
        return result

    if tune is None:
        for run in [run for run in _runs(job, strategies, seeds) if existing(run) is None]:
            result_of(run)
    else:
        jobs = tune_methods(job, strategies, tune, result_of)
        for seed in range(job.seed, job.seed + seeds):
            for run in jobs:
                result_of(replace(run, seed=seed))
    return results


def count_runs(job: Job, strategies: Sequence[str], seeds: int, tune: int | None = None) -> int:
    """Return the number of runs of a comparison, including those that would be skipped.

    The arguments are those of ``compare``. With ``tune``, the number is an upper bound: after its
    trials, each method runs with its chosen settings; see ``tuning.tune``.
    """
    if tune is not None:
        return len(with_ideal(strategies)) * (tune + 2 * seeds)
    return len(_runs(job, strategies, seeds))


def _runs(job: Job, strategies: Sequence[str], seeds: int) -> list[Job]:
    return [
        replace(job.under(strategy), seed=seed)
        for seed in range(job.seed, job.seed + seeds)
        for strategy in strategies
    ]


def _read_existing(path: Path, job: Job, runner: Runner, tune: int | None) -> list[Result]:
    """Return the results in the file. Raise if one belongs to another comparison.

    Removes an incomplete last line from the file.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    complete = data.rfind(b"\n") + 1
    if complete < len(data):  # an interrupted write left an incomplete last line
        os.truncate(path, complete)  # in place, so that a crash cannot lose the other lines
    results = read_results(path, trials=True)

    def shared(one: Job, of: Runner | Result, link: str, used: dict[str, str]) -> dict[str, Any]:
        fields = public_job(one) | {"link": link, "machine": of.machine}
        fields |= {"simulated": of.simulated, "versions": used}
        return {name: fields[name] for name in fields if name not in _PER_RUN | _IGNORED}

    current = shared(job, runner, str(runner), versions()) | {"tune": tune}
    for number, result in enumerate(results, start=1):
        existing = shared(result.job, result, result.link, dict(result.versions))
        existing["tune"] = tune if tune is None or not result.trial else result.trial.budget
        name = next((name for name in current if current[name] != existing[name]), None)
        if name is not None:
            raise ValueError(
                f"{path}, line {number}, is of another comparison, with "
                f"{_OPTIONS.get(name, name)}={existing[name]!r} and not {current[name]!r}: name "
                "another --output, or move that file away"
            )
    return results


def _is_of(result: Result, job: Job) -> bool:
    """Return True if ``result`` comes from a run of ``job``."""
    existing, wanted = public_job(result.job), public_job(job)
    return all(wanted[name] == value for name, value in existing.items() if name not in _IGNORED)


def _append(path: Path, line: str) -> None:
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(line)
