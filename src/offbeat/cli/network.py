"""The commands about networks: ``offbeat plan`` and ``offbeat probe``."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from offbeat.arguments import POSITIVE, require_number
from offbeat.cli.options import USUAL_LATENCY, USUAL_WORKERS
from offbeat.cli.view import console, show
from offbeat.display.table import Table
from offbeat.errors import OffbeatError
from offbeat.lab import probe as probing
from offbeat.lab.baselines import is_baseline
from offbeat.lab.measure import measure_recipe
from offbeat.lab.probe import tables
from offbeat.plan import plan as make_plan
from offbeat.plan.planning import check_arguments
from offbeat.quantization.wire import Precision

_MOST_WORKERS = 10_000


def plan(
    bandwidth: str | None,
    parameters: str | None,
    step_time: str | None,
    workers: int | None,
    latency: str | None,
    jitter: float,
    workers_per_node: int,
    inside: str | None,
    inside_latency: str | None,
    lssr: float,
    wire: Precision | None,
    strategies: list[str] | None,
    model: str | None,
    data: Path | None,
    probe: bool,
    as_json: bool,
) -> None:
    """Predict the time of a step under each strategy, and say which to try first."""
    for text in filter(is_baseline, strategies or []):
        raise ValueError(f"plan forecasts strategies; {text} is a baseline, to be run by compare")
    told: dict[str, Any] = {"jitter": jitter, "lssr": lssr}
    told |= {"workers": USUAL_WORKERS if workers is None else workers}
    told |= {"latency": USUAL_LATENCY if latency is None else latency}
    told |= {"wire": wire, "strategies": strategies or None}
    told |= {"workers_per_node": workers_per_node}
    told |= {"inside": inside, "inside_latency": inside_latency}
    if bandwidth is None and not probe:
        raise ValueError("plan needs --bandwidth, like 5Gbit/s, or --probe under torchrun")
    if model is None and (parameters is None or step_time is None):
        raise ValueError(
            "plan needs --parameters and --step-time, like 25M and 120ms, or --model RECIPE"
        )
    if data is not None and model is None:
        raise ValueError("--data is that of a recipe: name it with --model, or leave it out")
    if model is not None and None not in (parameters, step_time):
        raise ValueError(
            "--model measures what --parameters and --step-time do not say: leave one of them out"
        )
    if told["workers"] > _MOST_WORKERS:
        raise ValueError(f"workers must be at most {_MOST_WORKERS:,}, got {workers}")
    twice = {text for text in strategies or [] if (strategies or []).count(text) > 1}
    if twice:
        raise ValueError(f"{min(twice)!r} is given twice")
    given = {"parameters": parameters, "step_time": step_time, "bandwidth": bandwidth}
    told |= {name: 1.0 if value is None else value for name, value in given.items()}
    if probe:
        _require_unknown(
            workers=workers,
            bandwidth=bandwidth,
            latency=latency,
            inside=inside,
            inside_latency=inside_latency,
        )
        told["workers"] = _launched(workers_per_node) or USUAL_WORKERS
    check_arguments(**told)  # mistakes show before anything is measured
    if probe:
        found = _measure_network()
        told |= {"workers": len(found.ranks), **links(found.pairs, workers_per_node)}
        if int(os.environ["RANK"]) != 0:
            return
    if model is not None:
        measured, seconds = measure_recipe(model, data=data)
        told["parameters"] = measured if parameters is None else parameters
        told["step_time"] = seconds if step_time is None else step_time
    answer = make_plan(**told)
    if as_json:
        console.print_json(json.dumps(answer.to_dict()))
        return
    table = answer.table()
    figures = tuple(row[:-1] for row in table.rows)  # a note is too long for a column
    show(Table(table.headings[:-1], figures, table.caption))
    for row in table.rows:
        console.print(f"{row[0]}: {row[-1]}", style="dim", highlight=False)
    advice = f"Try {answer.recommendation.strategy} first: {answer.reason}."
    console.print(f"\n{advice}", highlight=False)


def _require_unknown(**options: str | int | None) -> None:
    for name, value in options.items():
        if value is not None:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is what --probe finds out: leave one of them away")


def _launched(workers_per_node: int) -> int | None:
    """How many workers torchrun has started; None if it did not start this process."""
    size = int(os.environ.get("WORLD_SIZE", 0)) or None
    here = int(os.environ.get("LOCAL_WORLD_SIZE", workers_per_node))
    if here % workers_per_node:
        raise ValueError(
            f"--probe with --workers-per-node {workers_per_node} needs whole nodes on a machine, "
            f"which has {here} workers here"
        )
    if size is not None and workers_per_node > 1 and size <= workers_per_node:
        raise ValueError(
            f"--probe with --workers-per-node {workers_per_node} needs workers of two nodes at "
            f"least, got {size}"
        )
    return size


def links(pairs: Sequence[probing.Pair], workers_per_node: int = 1) -> dict[str, float]:
    """What a plan assumes of the links: the slowest pair's bandwidth, and the median latency.

    Where nodes have several workers, ranks of a node follow each other, and the pairs between nodes
    and those inside are links of their own.
    """
    within = [p for p in pairs if p.source // workers_per_node == p.destination // workers_per_node]
    between = [p for p in pairs if p not in within]
    found = {"bandwidth": _slowest(between), "latency": _usual(between)}
    if within:
        found |= {"inside": _slowest(within), "inside_latency": _usual(within)}
    return found


def _slowest(pairs: Sequence[probing.Pair]) -> float:
    return 8 * min(pair.bytes_per_second for pair in pairs)


def _usual(pairs: Sequence[probing.Pair]) -> float:
    return sorted(pair.latency_seconds for pair in pairs)[len(pairs) // 2]


def probe(seconds: float, pairs: bool, as_json: bool) -> None:
    """Measure the network between the workers that torchrun started, and warn of what is odd."""
    require_number("seconds", seconds, POSITIVE)
    found = _measure_network(seconds)
    if int(os.environ["RANK"]) != 0:
        return
    if as_json:
        console.print_json(json.dumps(found.to_dict()))
        return
    show(tables.by_rank(found))
    if pairs:
        show(tables.by_pair(found))
    console.print(tables.summary(found), highlight=False, soft_wrap=True)
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)


def _measure_network(seconds: float = 20.0) -> probing.Probe:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise OffbeatError(
            "probing needs the processes that torchrun or srun starts: "
            "torchrun --nproc-per-node 2 -m offbeat.cli probe"
        )
    dist.init_process_group("gloo")
    try:
        return probing.probe(seconds=seconds)
    finally:
        dist.destroy_process_group()
