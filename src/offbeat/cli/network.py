"""Implementations of the commands ``plan`` and ``probe``.

``plan`` predicts the time of a training step from the network and the model. ``probe`` measures the
network between the workers of a launcher such as torchrun. ``plan --probe`` does both.
"""

import inspect
import json
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from offbeat.arguments import POSITIVE, require_number
from offbeat.cli.launcher import connect, is_launched
from offbeat.cli.options import USUAL_LATENCY, USUAL_WORKERS, PlanOptions
from offbeat.cli.view import console, print_narrow_table, print_step_time, print_table
from offbeat.display.table import Table
from offbeat.errors import OffbeatError
from offbeat.plan import Plan
from offbeat.plan import plan as make_plan
from offbeat.plan.planning import check_arguments
from offbeat.plan.result import SPEED_UP_MEANS
from offbeat_lab import probe as probing
from offbeat_lab.job import Job
from offbeat_lab.methods.registry import is_baseline
from offbeat_lab.probe import tables
from offbeat_lab.recipes import find_recipe
from offbeat_lab.timing.step_time import measure_recipe

_MOST_WORKERS = 10_000
_PROBED = ("workers", "bandwidth", "latency", "inside", "inside_latency")


def plan(options: PlanOptions) -> None:
    """Predict the time of a step under each strategy, and recommend one."""
    _check(options)
    names = inspect.signature(check_arguments).parameters
    question: dict[str, Any] = {name: getattr(options, name) for name in names}
    defaults: dict[str, object] = {"workers": USUAL_WORKERS, "latency": USUAL_LATENCY}
    # Placeholders for values that are measured later.
    defaults |= dict.fromkeys(("parameters", "step_time", "bandwidth"), 1.0)
    question |= {name: value for name, value in defaults.items() if question[name] is None}
    question["strategies"] = options.strategies or None
    if options.probe:
        question["workers"] = _launched_workers(options.workers_per_node) or USUAL_WORKERS
    check_arguments(**question)  # finds mistakes before anything is measured
    if options.probe:
        result = _measure_network()
        question |= links(result.pairs, options.workers_per_node)
        question["workers"] = len(result.ranks)
        if int(os.environ["RANK"]) != 0:
            return
    if options.model is not None:
        model, step = measure_recipe(options.model, data=options.data)
        if options.parameters is None:
            question["parameters"] = model
        if options.step_time is None:
            question["step_time"] = step.seconds
            print_step_time(options.model, step, only_warn=options.as_json)
    answer = make_plan(**question)
    if options.as_json:
        console.print_json(json.dumps(answer.to_dict()))
    else:
        _print_plan(answer)


def _check(options: PlanOptions) -> None:
    """Raise ValueError if options are missing, invalid or contradict each other."""
    strategies = options.strategies or []
    for text in filter(is_baseline, strategies):
        raise ValueError(f"plan forecasts strategies; {text} is a baseline, to be run by compare")
    if options.bandwidth is None and not options.probe:
        raise ValueError("plan needs --bandwidth, like 5Gbit/s, or --probe under torchrun")
    given = options.parameters is not None, options.step_time is not None
    if options.model is None and not all(given):
        raise ValueError(
            "plan needs --parameters and --step-time, like 25M and 120ms, or --model RECIPE"
        )
    if options.data is not None and options.model is None:
        raise ValueError("--data is that of a recipe: name it with --model, or leave it out")
    if options.model is not None:
        find_recipe(options.model).check_data(options.data)
    if options.model is not None and all(given):
        raise ValueError(
            "--model measures whichever of --parameters and --step-time is missing: leave one of "
            "them out"
        )
    if options.workers is not None and options.workers > _MOST_WORKERS:
        raise ValueError(f"workers must be at most {_MOST_WORKERS:,}, got {options.workers}")
    repeated = {text for text in strategies if strategies.count(text) > 1}
    if repeated:
        raise ValueError(f"{min(repeated)!r} is given twice")
    for name in _PROBED if options.probe else ():
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"--probe measures what {option} says: leave one of them out")


def _launched_workers(workers_per_node: int) -> int | None:
    """Return the launcher's number of workers; None without a launcher."""
    size = int(os.environ.get("WORLD_SIZE", 0)) or None
    local = int(os.environ.get("LOCAL_WORLD_SIZE", workers_per_node))
    if local % workers_per_node:
        raise ValueError(
            f"--probe with --workers-per-node {workers_per_node} needs whole nodes on a machine, "
            f"which has {local} workers here"
        )
    if size is not None and workers_per_node > 1 and size <= workers_per_node:
        raise ValueError(
            f"--probe with --workers-per-node {workers_per_node} needs workers of at least two "
            f"nodes, got {size}"
        )
    return size


def links(pairs: Sequence[probing.Pair], workers_per_node: int = 1) -> dict[str, float]:
    """Return the arguments of ``offbeat.plan.plan`` that describe the measured links.

    ``bandwidth`` is that of the slowest pair of workers, in bits per second. ``latency`` is the
    median over the pairs, in seconds. With several workers per node, consecutive ranks form a node.
    ``bandwidth`` and ``latency`` then describe pairs in different nodes. ``inside`` and
    ``inside_latency`` describe pairs inside a node.
    """
    within = [p for p in pairs if p.source // workers_per_node == p.destination // workers_per_node]
    between = [p for p in pairs if p not in within]
    values = {"bandwidth": _slowest(between), "latency": _median_latency(between)}
    if within:
        values |= {"inside": _slowest(within), "inside_latency": _median_latency(within)}
    return values


def _slowest(pairs: Sequence[probing.Pair]) -> float:
    return 8 * min(pair.bytes_per_second for pair in pairs)


def _median_latency(pairs: Sequence[probing.Pair]) -> float:
    return sorted(pair.latency_seconds for pair in pairs)[len(pairs) // 2]


def _print_plan(answer: Plan) -> None:
    table = answer.table()
    figures = tuple(row[:-1] for row in table.rows)  # the notes are too long for a column
    print_narrow_table(Table(table.headings[:-1], figures, table.caption))
    for row in table.rows:
        console.print(f"{row[0]}: {row[-1]}", style="dim", highlight=False)
    console.print(f"\n{SPEED_UP_MEANS}", style="dim", highlight=False)
    advice = f"Try {answer.recommendation.strategy} first: {answer.reason}."
    console.print(f"\n{advice}", highlight=False)


def probe(seconds: float, as_json: bool) -> None:
    """Measure the network between the launcher's workers. Rank 0 prints it, with warnings."""
    require_number("seconds", seconds, POSITIVE)
    result = _measure_network(seconds)
    if int(os.environ["RANK"]) != 0:
        return
    if as_json:
        console.print_json(json.dumps(result.to_dict()))
        return
    print_table(tables.by_rank(result))
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)


def _measure_network(seconds: float = 20.0) -> probing.Probe:
    if not is_launched():
        raise OffbeatError(
            "probing needs the processes that torchrun starts: "
            "torchrun --nproc-per-node 2 -m offbeat.cli probe"
        )
    connect("gloo", Job.timeout_seconds)
    try:
        return probing.probe(seconds=seconds)
    finally:
        dist.destroy_process_group()
