"""Run several strategies one after the other under the same seeds; one JSON line a result."""

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import offbeat
from offbeat.lab.cluster import Cluster
from offbeat.lab.launch import run_job
from offbeat.lab.recipes import find_recipe
from offbeat.lab.train import Event, Job
from offbeat.lab.virtual import VirtualCluster

Place = Cluster | VirtualCluster | None  # None: loopback
Result = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One evaluation of the consensus.

    Attributes:
        step: Steps each worker has taken.
        seconds: Training seconds: computing and waiting, without evaluation.
        metric: The recipe's metric.
        metrics: All metrics by name, that one among them.
    """

    step: int
    seconds: float
    metric: float
    metrics: dict[str, float]


def run_and_record(job: Job, on_event: Callable[[Event], None], place: Place = None) -> Result:
    """Run ``job`` and return its result: configuration, machine, curve and totals.

    Keys: ``job``, ``strategy``, ``metric``, ``target``, ``link``, ``machine``, ``versions``,
    ``simulated``, ``points`` (step, seconds, metric, metrics), ``final``, ``final_metrics``,
    ``seconds``, ``time_to_target_seconds`` (the first point at the target, None if there is none),
    and means over the workers: ``lssr``, ``payload_bytes``, ``idle``, ``flag_rate``; ``stats`` has
    each worker's own, ``details`` what only this strategy tells (rank 0).
    """
    recipe = find_recipe(job.recipe)
    points: list[Point] = []
    stats: list[dict[str, Any]] = []

    def listen(event: Event) -> None:
        if event["event"] == "evaluation":
            keys = ("step", "seconds", "metric", "metrics")
            points.append(Point(**{key: event[key] for key in keys}))
        elif event["event"] == "end":
            stats.extend(event["stats"])
        on_event(event)

    simulated = isinstance(place, VirtualCluster)
    if isinstance(place, VirtualCluster):
        place.run(job, listen)
    else:
        run_job(job, listen, place)
    arrived = [point.seconds for point in points if recipe.reached(point.metric)]

    def mean(key: str) -> float:
        return float(sum(one[key] for one in stats) / len(stats))

    return {
        "job": asdict(job),
        "strategy": job.strategy,
        "metric": recipe.metric,
        "higher_is_better": recipe.higher_is_better,
        "target": recipe.target,
        "link": "loopback" if place is None else str(place),
        "machine": "virtual time" if simulated else describe_machine(),
        "versions": {
            "offbeat": offbeat.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "simulated": simulated,
        "points": [asdict(point) for point in points],
        "final": points[-1].metric,
        "final_metrics": points[-1].metrics,
        "seconds": points[-1].seconds,
        "time_to_target_seconds": arrived[0] if arrived else None,
        "lssr": mean("lssr"),
        "payload_bytes": mean("payload_bytes"),
        "idle": mean("idle"),
        "flag_rate": mean("flags") / max(1.0, mean("steps")),
        "stats": stats,
        "details": stats[0]["details"],
    }


def compare(
    job: Job,
    strategies: Sequence[str],
    *,
    seeds: int = 1,
    place: Place = None,
    output: Path,
    on_start: Callable[[Job], None],
    on_event: Callable[[Event], None],
) -> list[Result]:
    """Run ``job`` under each strategy and seed; write the results to ``output/results.jsonl``.

    Seeds are the outer loop, so that a machine that slows down slows all strategies down.

    Returns:
        The results, in the order of the runs.
    """
    output.mkdir(parents=True, exist_ok=True)
    results = []
    with (output / "results.jsonl").open("w", encoding="utf-8") as file:
        for seed in range(job.seed, job.seed + seeds):
            for strategy in strategies:
                one = replace(job, strategy=strategy, seed=seed)
                on_start(one)
                result = run_and_record(one, on_event, place)
                results.append(result)
                file.write(json.dumps(result) + "\n")
                file.flush()
    return results


def describe_machine() -> str:
    """Processor and number of cores, as in ``"Xeon Platinum 8481C, 2 cores"``."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores"
