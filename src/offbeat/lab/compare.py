"""Run several methods one after the other under the same seeds; one JSON line a result."""

import json
import platform
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import offbeat
from offbeat.lab.events import Chosen, End, Evaluation, Event, Measured, Paced, Start, Turn
from offbeat.lab.job import Job, option_of_method
from offbeat.lab.places import Place
from offbeat.lab.recipes import find_recipe
from offbeat.lab.results import Result, public_job, read_results
from offbeat.telemetry import Stats

RESULTS = "results.jsonl"
_FOUND = ("evaluations", "alone_seconds")  # by the first run, for all
_OF_A_RUN = {"strategy", "seed", *_FOUND, *option_of_method()}
_FREE = {"log", "checkpoints", "save_every", "resume", "timeout_seconds", "measure_links"}
_OPTIONS = {"measure_alone": "turns"}
"""Fields of a job whose option has another name."""


def run_and_record(
    job: Job,
    on_event: Callable[[Event], None],
    place: Place,
    *,
    lr_scales: Sequence[float] = (),
    command: str = "",
) -> Result:
    """Run ``job`` at ``place`` and return its result; ``on_event`` sees every event, too.

    The job of the result says how often was evaluated, where that was left to the run.

    Args:
        job: What to run.
        on_event: Called with each event of rank 0.
        place: Where.
        lr_scales: What the result says of the factors that are tried with this method.
        command: What the result says was typed.
    """
    recipe = find_recipe(job.recipe)
    points: list[Evaluation] = []
    stats: list[Stats] = []
    links: list[Measured] = []
    turns: list[Turn] = []
    model_bytes: list[int] = []

    def listen(event: Event) -> None:
        nonlocal job
        match event:
            case Start():
                model_bytes.append(event.model_bytes)
            case Chosen():
                job = replace(job, evaluations=event.evaluations)
            case Paced():
                job = replace(job, alone_seconds=event.step_seconds)
            case Measured():
                links.append(event)
            case Turn():
                turns.append(event)
            case Evaluation():
                points.append(event)
            case End():
                stats.extend(event.stats)
                if event.step_seconds is not None:
                    points[:] = (
                        replace(one, seconds=one.step * event.step_seconds) for one in points
                    )
        on_event(event)

    place.run(job, listen)
    return Result(
        job=job,
        metric=recipe.metric,
        higher_is_better=recipe.higher_is_better,
        target=recipe.target,
        link=str(place),
        machine=place.machine,
        versions=versions(),
        simulated=place.simulated,
        points=tuple(points),
        stats=tuple(stats),
        model_bytes=model_bytes[-1] if model_bytes else None,
        links=tuple(links),
        turns=tuple(turns),
        lr_scales=tuple(lr_scales),
        command=command,
    )


def versions() -> dict[str, str]:
    """Of what runs."""
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
    lr_scales: Sequence[float] = (),
    place: Place,
    output: Path,
    on_start: Callable[[Job], None],
    on_event: Callable[[Event], None],
    on_kept: Callable[[Result], None] = lambda result: None,
    command: str = "",
    mixed: Collection[str] = (),
) -> list[Result]:
    """Run ``job`` under each strategy and seed; write each result to a file of JSON lines.

    A strategy may be followed by options for it alone; see ``Job.under``. Seeds are the outer loop,
    so that a machine that slows down slows all strategies down. The first run chooses how often all
    evaluate, so that their curves have the same steps, and by how much uneven workers sleep.

    What is in the file already, with the same configuration, is not run again: a comparison that
    was interrupted goes on, and one can be widened by further strategies, seeds and factors.

    Args:
        job: What is compared.
        strategies: The methods.
        seeds: How many, from that of the job on.
        lr_scales: Factors on the learning rate, each of which every method is tried with, but one
            that has a factor of its own. Empty: that of the job.
        place: Where the runs take place.
        output: Directory of ``results.jsonl``, or a file that is called ``….jsonl``.
        on_start: Called with the job of each run.
        on_event: Called with its events.
        on_kept: Called with each result that need not be run.
        command: What was typed, for the results.
        mixed: Fields of the job in which results of the file may differ from it, and from each
            other.

    Returns:
        All results of the file, in its order.

    Raises:
        ValueError: the file holds results of something else, or what is no result.
    """
    path = output if output.suffix == ".jsonl" else output / RESULTS
    path.parent.mkdir(parents=True, exist_ok=True)
    free = _FREE.union(mixed)
    results = _kept(path, job, place, free)
    if results:
        job = _as_found(job, results[0].job)
    for one, scales in _runs(job, strategies, seeds, lr_scales):
        one = _as_found(one, job)
        found = next((old for old in results if _same(old, one, free)), None)
        if found is not None:
            on_kept(found)
            continue
        on_start(one)
        result = run_and_record(one, on_event, place, lr_scales=scales, command=command)
        job = _as_found(job, result.job)
        results.append(result)
        _append(path, json.dumps(result.to_dict()) + "\n")
    return results


def count_runs(job: Job, strategies: Sequence[str], seeds: int, lr_scales: Sequence[float]) -> int:
    """How many runs a comparison has, those that need not be run included."""
    return sum(1 for _ in _runs(job, strategies, seeds, lr_scales))


def _runs(
    job: Job, strategies: Sequence[str], seeds: int, lr_scales: Sequence[float]
) -> Iterator[tuple[Job, Sequence[float]]]:
    """The job of each run, and the factors that its method is tried with."""
    for seed in range(job.seed, job.seed + seeds):
        for strategy in strategies:
            jobs = [
                replace(replace(job, lr_scale=scale).under(strategy), seed=seed)
                for scale in lr_scales or (job.lr_scale,)
            ]
            if all(one == jobs[0] for one in jobs):  # a factor of its own, or a single one
                yield jobs[0], ()
            else:
                yield from ((one, lr_scales) for one in jobs)


def _kept(path: Path, job: Job, place: Place, free: Collection[str]) -> list[Result]:
    """The results in the file, which must be of this comparison."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):  # cut off while a line was written
        path.write_bytes(data[:whole])
    results = read_results(path)
    here: dict[str, Any] = _about(public_job(job), free) | {
        "link": str(place),
        "machine": place.machine,
        "simulated": place.simulated,
        "versions": versions(),
    }
    if job.evaluations is not None:
        here["evaluations"] = job.evaluations
    for number, old in enumerate(results, start=1):
        there = _about(public_job(old.job), free) | {
            "link": old.link,
            "machine": old.machine,
            "simulated": old.simulated,
            "versions": dict(old.versions),
            "evaluations": old.job.evaluations,
        }
        other = next((name for name in here if here[name] != there[name]), None)
        if other is not None:
            name = _OPTIONS.get(other, other)
            raise ValueError(
                f"{path}, line {number}, is of another comparison, with {name}={there[other]!r} "
                f"and not {here[other]!r}: name another --output, or move that file away"
            )
    return results


def _about(values: dict[str, Any], free: Collection[str]) -> dict[str, Any]:
    """What all runs of a comparison share, of the values of a job."""
    return {name: one for name, one in values.items() if name not in _OF_A_RUN.union(free)}


def _as_found(job: Job, other: Job) -> Job:
    """``job`` with what another has found, where it is still open."""
    is_open = [name for name in _FOUND if getattr(job, name) is None]
    return replace(job, **{name: getattr(other, name) for name in is_open})


def _same(old: Result, job: Job, free: Collection[str]) -> bool:
    """Whether ``old`` is what a run of ``job`` would give."""
    one, other = public_job(old.job), public_job(job)
    for name in _FOUND:
        if other[name] is None:
            del one[name]
    return all(other[name] == value for name, value in one.items() if name not in free)


def _append(path: Path, line: str) -> None:
    """To a file, which the error of a full disk names."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
