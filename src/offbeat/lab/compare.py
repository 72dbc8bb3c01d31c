"""Run several strategies one after the other under the same seeds; one JSON line a result."""

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

import offbeat
from offbeat.lab.events import Chosen, End, Evaluation, Event
from offbeat.lab.job import Job
from offbeat.lab.places import Place
from offbeat.lab.recipes import find_recipe
from offbeat.lab.results import Result
from offbeat.telemetry import Stats


def run_and_record(job: Job, on_event: Callable[[Event], None], place: Place) -> Result:
    """Run ``job`` at ``place`` and return its result; ``on_event`` sees every event, too.

    The job of the result says how often was evaluated, where that was left to the run.
    """
    recipe = find_recipe(job.recipe)
    points: list[Evaluation] = []
    stats: list[Stats] = []

    def listen(event: Event) -> None:
        nonlocal job
        match event:
            case Chosen():
                job = replace(job, evaluations=event.evaluations)
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
        versions={
            "offbeat": offbeat.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        simulated=place.simulated,
        points=tuple(points),
        stats=tuple(stats),
    )


def compare(
    job: Job,
    strategies: Sequence[str],
    *,
    seeds: int = 1,
    place: Place,
    output: Path,
    on_start: Callable[[Job], None],
    on_event: Callable[[Event], None],
) -> list[Result]:
    """Run ``job`` under each strategy and seed; write the results to ``output/results.jsonl``.

    A strategy may be followed by options for it alone; see ``Job.under``. Seeds are the outer loop,
    so that a machine that slows down slows all strategies down. The first run chooses how often all
    evaluate, so that their curves have the same steps.

    Returns:
        The results, in the order of the runs.
    """
    output.mkdir(parents=True, exist_ok=True)
    results = []
    path = output / "results.jsonl"
    path.write_text("", encoding="utf-8")
    for seed in range(job.seed, job.seed + seeds):
        for strategy in strategies:
            one = replace(job.under(strategy), seed=seed)
            on_start(one)
            result = run_and_record(one, on_event, place)
            job = replace(job, evaluations=result.job.evaluations)
            results.append(result)
            _append(path, json.dumps(result.to_dict()) + "\n")
    return results


def _append(path: Path, line: str) -> None:
    """To a file, which the error of a full disk names."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
