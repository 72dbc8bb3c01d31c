"""SelSync, Table I and Figure 1a: 16 workers at 5 Gbit/s, simulated.

The LSSR comes from SelSync's own trigger with the paper's δ = 0.3 and smoothing N/100. Gradients
are constant, except that in evenly spread steps one worker, each time another one, has twice the
gradient (Δ = 0.48). The field ``lssr`` has the simulated value.

Sizes are parameters × 4 bytes. VGG11, ResNet-101 and AlexNet are torchvision's with the ImageNet
classifier, as SelSync's published code builds them, for CIFAR too (531 MB for VGG11, the size that
is usually quoted; with 100 classes it is 517 MB). The Transformer has d = 200, hidden 200, 2 layers
and WikiText-103's vocabulary of 267,735, with an output layer of its own, as in that code: 107.8 M
parameters. Tied it has 54.3 M, and its means take half as long; that code's lower-case
vocabulary is smaller, too.
"""

from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

from benchmarks.papers.cluster import CLUSTER, LATENCY, off_formula
from benchmarks.papers.table_one import (
    MODELS,
    Model,
    Row,
    lssr_of,
    step_of,
    step_of_pair,
    step_of_throughput,
)
from offbeat import BSP, SSP, SelSync

WORKERS = (2, 4, 8, 16)
SYSTEMS = {"ring": BSP(), "servers": SSP(staleness=0), "one server": SSP(staleness=0, servers=(0,))}
"""BSP by a ring all-reduce, by servers on all workers, and by a server on one of them."""


def measure(step_seconds: tuple[float, ...], most_steps: int) -> dict[str, Any]:
    """Return the data of all models."""
    return {one.name: _model(one, step_seconds, most_steps) for one in MODELS}


def _model(model: Model, step_seconds: tuple[float, ...], most_steps: int) -> dict[str, Any]:
    first = model.selsync[0]
    mean, flags = CLUSTER.mean_seconds(4 * model.parameters), CLUSTER.tally_seconds
    step = step_of(first.per_step, mean, first.lssr or 0.0, flags)
    shown = step_of_throughput(model.throughput, CLUSTER.workers, mean)
    found: dict[str, Any] = {
        "parameters": model.parameters,
        "megabytes": 4 * model.parameters / 1e6,
        "mean_seconds": mean,
        "flags_seconds": flags,
        "step_seconds_of_table_1": step,
        "step_seconds_of_figure_1a": shown,
        "table_1": [_facts(row, step, mean, flags) for row in model.selsync],
        "throughput_of_figure_1a": model.throughput,
        "rows": [_simulated(model, one, most_steps) for one in step_seconds],
        "at_table_1": step and _simulated(model, step, most_steps),
        "throughput": {
            name: _throughput(model, at)
            for name, at in (("Table I", step), ("Figure 1a", shown))
            if at is not None
        },
    }
    if model.fedavg is not None:
        seldom, often = model.fedavg
        alone, period = step_of_pair(seldom.per_step, often.per_step, mean)
        found["fedavg"] = {
            "rows": [_facts(row, step, mean, flags) for row in model.fedavg],
            "step_seconds": alone,
            "period": None if period == float("inf") else period,
        }
    return found


def _facts(row: Row, step: float | None, mean: float, flags: float) -> dict[str, Any]:
    """Return a row of Table I, and the LSSR that it needs at this step time."""
    needed = None if step is None else lssr_of(row.per_step, step, mean, flags)
    return {
        **asdict(row),
        "per_step": row.per_step,
        "limit": row.limit,
        "impossible": row.impossible,
        "lssr_at_that_step": needed,
    }


def _simulated(model: Model, step: float, most_steps: int) -> dict[str, Any]:
    """Simulate BSP and SelSync with steps of this time, at the paper's LSSR of δ = 0.3."""
    row = model.selsync[0]
    share = Fraction(1 - (row.lssr or 0.0)).limit_denominator(most_steps)  # of steps that average
    syncs, steps = share.numerator, share.denominator
    spikes = {-(-i * steps // syncs): i % CLUSTER.workers for i in range(syncs)}
    strategy = SelSync(delta=0.3)
    common = {"parameters": model.parameters, "step_seconds": step}
    bsp = CLUSTER.run(BSP(), **common, steps=2)
    ours = CLUSTER.run(strategy, **common, steps=steps, spikes=spikes)
    assert round(ours["lssr"] * steps) == steps - syncs, (ours, share)
    expected = [
        CLUSTER.step_seconds(one, model.parameters, step, ours["lssr"]) for one in (BSP(), strategy)
    ]
    gained = bsp["step_seconds"] / ours["step_seconds"]
    return {
        "step_seconds": step,
        "bsp": bsp,
        "selsync": ours,
        "per_step": gained,
        "overall": gained / row.iterations,
        "off_plan": off_formula((bsp, ours), expected),
    }


def _throughput(model: Model, step: float) -> dict[str, Any]:
    """Return BSP's throughput relative to one worker, for each number of workers and system."""
    common = {"parameters": model.parameters, "step_seconds": step, "steps": 4, "settling": 1}
    found: dict[str, Any] = {"step_seconds": step}
    for name, strategy in SYSTEMS.items():
        runs = [CLUSTER.run(strategy, **common, workers=count) for count in WORKERS]
        found[name] = [
            count * step / run["step_seconds"] for count, run in zip(WORKERS, runs, strict=True)
        ]
    rings = [replace(CLUSTER, workers=count) for count in WORKERS]
    found["ring by formula"] = [
        ring.workers * step / ring.step_seconds(BSP(), model.parameters, step) for ring in rings
    ]
    return found


def setting() -> dict[str, Any]:
    return {**asdict(CLUSTER), "latency_seconds": LATENCY}
