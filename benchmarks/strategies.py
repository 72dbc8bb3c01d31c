"""All strategies in the simulator: accuracy at equal virtual time and at equal samples.

Eight workers on links of 100 Mbit/s, steps of 10 ms that vary by 20 %, on ``digits`` and on
``mnist:cnn`` (needs MNIST's files in the directory ``OFFBEAT_MNIST``). Every strategy
reads as many samples. The factor on the recipe's learning rate is chosen for each strategy from one
grid, by the final accuracy of a seed of its own that is not shown. Real training, virtual seconds.

Writes ``results/strategies.json`` and ``results/strategies.md``.
"""

import json
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import RESULTS, Result, machine
from offbeat.lab.compare import run_and_record
from offbeat.lab.job import Job
from offbeat.lab.places import VirtualCluster
from offbeat.simulate import Compute, Network

WORKERS = 8
STRATEGIES = (
    "bsp",
    "local:period=8",
    "fedavg:period=8,fraction=0.5",
    "fedavg:period=8,fraction=0.5,unselected=restart",
    "selsync:target_lssr=0.9",
    "selsync:target_lssr=0.9,aggregate=gradients",
    "async:staleness=16",
    "async:staleness=16,schedule=eager",
    "ssp:staleness=3",
    "downpour",
    "downpour:push_every=4,fetch_every=4",
    "easgd:period=8",
    "easgd:period=8,synchronous=true",
    "diloco:period=16",
    "diloco:period=16,outer_lr=0.5,outer_momentum=0.8",
    "diloco:period=16,outer_lr=0.5,outer_momentum=0.8,fragments=4,overlap=4",
)
LR_SCALES = (0.3, 1.0, 3.0)
TUNING_SEED, SEEDS = 1000, (0, 1, 2)
MNIST = Path(
    os.environ.get("OFFBEAT_MNIST", Path(__file__).parents[2] / "shared" / "data" / "mnist")
)
Row = dict[str, Any]


def place() -> VirtualCluster:
    """Where everything runs."""
    return VirtualCluster(Network("100Mbit/s", latency="100us"), Compute("10ms", jitter=0.2))


def run(job: Job) -> Row:
    """One run, without what nobody reads."""
    torch.set_num_threads(1)
    result = run_and_record(job, lambda event: None, place()).to_dict()
    kept = ("points", "final", "seconds", "time_to_target_seconds", "payload_bytes", "idle")
    assert result["simulated"]
    return {"job": plain(job), **{key: result[key] for key in kept}}


def plain(job: Job) -> Row:
    """The job as JSON values, of the data's directory the name alone."""
    return {**asdict(job), "data": None if job.data is None else Path(job.data).name}


def jobs_for(recipe: str, strategy: str, data: str | None, quick: bool) -> list[Job]:
    """The runs that choose the learning rate."""
    return [
        Job(
            recipe,
            strategy,
            WORKERS,
            epochs=0.5 if quick else None,
            seed=TUNING_SEED,
            data=data,
            evaluations=12,
            lr_scale=scale,
        )
        for scale in LR_SCALES
    ]


def at(points: Sequence[Row], seconds: float) -> float:
    """The metric of the last evaluation up to ``seconds``; 0.1, a guess, before the first."""
    return (
        max((p["seconds"], p["metric"]) for p in points if p["seconds"] <= seconds)[1]
        if any(p["seconds"] <= seconds for p in points)
        else 0.1
    )


def spread(values: Sequence[float], scale: float = 100.0, digits: int = 1) -> str:
    """Median and range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{scale * middle:.{digits}f} ({scale * low:.{digits}f}–{scale * high:.{digits}f})"


def table(recipe: str, rows: Sequence[Row]) -> list[str]:
    """Lines of Markdown for one recipe."""
    by_strategy: dict[str, list[Row]] = {}
    for row in rows:
        by_strategy.setdefault(row["job"]["strategy"], []).append(row)
    totals = {s: statistics.median(r["seconds"] for r in rs) for s, rs in by_strategy.items()}
    moment = 0.2 * totals["bsp"]
    lines = [
        f"## {recipe}",
        "",
        f"Equal time: at {moment:.1f} virtual seconds, a fifth of BSP's. Equal samples: the end. "
        "Accuracies in %, median (range) of the seeds.",
        "",
        "| strategy | lr × | at equal time | at equal samples | virtual time | idle | sent |",
        "|---|---|---|---|---|---|---|",
    ]
    for strategy, found in by_strategy.items():
        early = [at(r["points"], moment) for r in found]
        idle = statistics.median(r["idle"] for r in found)
        sent = statistics.median(r["payload_bytes"] for r in found)
        lines.append(
            f"| `{strategy}` | {found[0]['job']['lr_scale']:g} | {spread(early)} | "
            f"{spread([r['final'] for r in found])} | {totals[strategy]:.1f} s | "
            f"{100 * idle:.0f} % | {sent / 1e6:.1f} MB |"
        )
    return [*lines, ""]


def results(*, quick: bool = False) -> list[Result]:
    """Run everything; two runs at a time."""
    recipes = [("digits", None)]
    if MNIST.is_dir():
        recipes.append(("mnist:cnn", str(MNIST)))
    strategies = STRATEGIES[:3] if quick else STRATEGIES
    chosen: list[Job] = []
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        grid = [
            job
            for recipe, data in recipes
            for strategy in strategies
            for job in jobs_for(recipe, strategy, data, quick)
        ]
        tuned = list(pool.map(run, grid))
        for start in range(0, len(grid), len(LR_SCALES)):
            group = range(start, start + len(LR_SCALES))
            best = grid[max(group, key=lambda i: tuned[i]["final"])]
            seeds = SEEDS[:1] if quick else SEEDS
            chosen += [Job(**{**asdict(best), "seed": seed}) for seed in seeds]
        rows = list(pool.map(run, chosen))
    text = [
        "# All strategies, simulated",
        "",
        f"{WORKERS} simulated workers, {place()}, steps varying by 20 %. The factor on the "
        f"recipe's learning rate is the best of {', '.join(map(str, LR_SCALES))} on another seed. "
        "Written by `python -m benchmarks strategies`.",
        "",
    ]
    for recipe, _ in recipes:
        text += table(recipe, [row for row in rows if row["job"]["recipe"] == recipe])
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        saved = {"tuning": tuned, "rows": rows, "machine": machine(), "simulated": True}
        (RESULTS / "strategies.json").write_text(json.dumps(saved))
        (RESULTS / "strategies.md").write_text("\n".join(text))
    print("\n".join(text))
    return []
