"""Gain and cost of single settings, in virtual time.

``digits``, eight workers on 100 Mbit/s, steps of 10 ms that vary by 20 %, 10 epochs. Each setting
is compared with the same strategy without it: deferred flags (at two network latencies),
``max_interval`` (on IID data, and with two labels on each worker), outer momentum of
``AsyncAveraging``, averaged optimizer state (SGD with momentum, and AdamW), and
``LinearScalingWarmup``.

The learning rate of each row is tuned on seeds that are not shown; for ``LinearScalingWarmup`` it
is tuned on *one* worker, because that schedule scales it. Writes ``results/settings.json`` and
``results/settings.md``.
"""

import statistics
from dataclasses import asdict, dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, LRScheduler

import offbeat
from benchmarks.harness import Result, save_page
from benchmarks.run_cache import SEEDS, WORKERS, Row, RunCache, place, spread
from benchmarks.studies.tuning import Tuned, tune_cells, tuned_rows
from offbeat.lab.recipes import Setup, digits
from offbeat.lab.recipes.schedules import warmup_cosine
from offbeat.lab.samplers import Batches, make_sampler
from offbeat.simulate import Network

EPOCHS, TUNING_SEEDS = 10.0, (1000, 1001)
LONGER = {"LinearScalingWarmup": 3}
"""Group → factor on the epochs; a warm-up needs a longer run."""
RATES = {"sgd": 0.05, "adamw": 0.002}
"""Learning rates that the tuned factors multiply."""
WARMUP_SHARE = 0.2
"""Share of the steps that LinearScalingWarmup takes."""


@dataclass(frozen=True)
class Case:
    """One row of the page.

    Attributes:
        group: Setting that the row belongs to.
        strategy: Strategy as text.
        optimizer: ``sgd`` (momentum 0.9) or ``adamw``.
        latency: Latency of the network.
        partition: Partition of the data; None if all workers read all data.
        schedule: ``cosine`` with a short warm-up. The others start from a rate for one worker:
            ``one`` keeps it, ``scaled`` uses LinearScalingWarmup, ``at once`` multiplies it from
            the first step; a cosine follows.
        workers: Number of workers.
    """

    group: str
    strategy: str
    optimizer: Literal["sgd", "adamw"] = "sgd"
    latency: str = "100us"
    partition: str | None = None
    schedule: Literal["cosine", "one", "scaled", "at once"] = "cosine"
    workers: int = WORKERS


@dataclass(frozen=True)
class Cell:
    """One run."""

    case: Case
    scale: float
    seed: int
    epochs: float


def _cases() -> tuple[Case, ...]:
    flags = "deferred flags"
    cases = [
        Case(flags, f"selsync:target_lssr=0.9{more}", latency=latency)
        for latency in ("100us", "1ms")
        for more in ("", ",flags=deferred")
    ]
    cases += [
        Case("max_interval", f"selsync:delta=0.3{more}", partition=partition)
        for partition, intervals in ((None, (16,)), ("label:2", (16, 4)))
        for more in ("", *(f",max_interval={steps}" for steps in intervals))
    ]
    cases += [
        Case("outer momentum", f"async:staleness=16{schedule}{outer}")
        for schedule in ("", ",schedule=eager")
        for outer in ("", ",outer_lr=0.5,outer_momentum=0.8")
    ]
    cases += [
        Case("optimizer state", f"local:period=8{more}", optimizer=optimizer)
        for optimizer in ("sgd", "adamw")
        for more in ("", ",optimizer_state=average")
    ]
    cases += [
        Case("LinearScalingWarmup", strategy, schedule=schedule)
        for strategy in ("bsp", "async:staleness=16")
        for schedule in ("one", "scaled", "at once")
    ]
    return tuple(cases)


CASES = _cases()
ONE_WORKER = Case("LinearScalingWarmup", "bsp", schedule="one", workers=1)


def run(cell: Cell) -> Row:
    """Train; return the final metric, and seconds and bytes of a step."""
    torch.set_num_threads(1)
    case, where = cell.case, place()
    result = offbeat.simulate(
        lambda: _train(cell),
        workers=case.workers,
        network=Network(where.network.bandwidth, latency=case.latency),
        compute=where.compute,
        seed=cell.seed,
    )
    return dict(result.results[0])


def _train(cell: Cell) -> Row:
    case = cell.case
    rank = dist.get_rank()
    task = digits.build(Setup(case.workers, cell.epochs, cell.seed))
    optimizer, scheduler = _optimizer(task.model, case, cell.scale, task.steps)
    torch.manual_seed(1000 * cell.seed + rank)
    sampler = make_sampler(
        task, case.workers, rank, seed=cell.seed, kind="seldp", partition=case.partition
    )
    sync = offbeat.attach(task.model, optimizer, offbeat.parse_strategy(case.strategy))
    for batch in Batches(task, sampler):
        task.loss(task.model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    stats = sync.stats
    trained = {
        "step_seconds": (stats.compute_seconds + stats.wait_seconds) / stats.steps,
        "step_bytes": stats.payload_bytes / stats.steps,
        "lssr": stats.lssr,
        "idle": stats.idle,
    }
    sync.finish()
    final = task.evaluate(task.model)["test accuracy"] if rank == 0 else None
    return {**trained, "final": final}


def _optimizer(
    model: torch.nn.Module, case: Case, scale: float, steps: int
) -> tuple[torch.optim.Optimizer, LRScheduler | ChainedScheduler]:
    rate = RATES[case.optimizer] * scale
    if case.schedule == "at once":
        rate *= case.workers
    optimizer: torch.optim.Optimizer
    if case.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    if case.schedule == "cosine":
        return optimizer, warmup_cosine(optimizer, steps)
    ending = CosineAnnealingLR(optimizer, steps, eta_min=0.01 * rate)
    if case.schedule != "scaled":
        return optimizer, ending
    rising = offbeat.LinearScalingWarmup(
        optimizer, workers=case.workers, warmup_steps=round(WARMUP_SHARE * steps)
    )
    return optimizer, ChainedScheduler([rising, ending], optimizer=optimizer)


def page(rows: dict[Case, list[Row]], tuned: dict[Case, Tuned]) -> str:
    """Return the page."""
    lines = [
        "# Settings, simulated",
        "",
        f"`digits`, {WORKERS} simulated workers, {place()}, steps varying by 20 %, {EPOCHS:g} "
        f"epochs ({LONGER['LinearScalingWarmup'] * EPOCHS:g} with LinearScalingWarmup). "
        "Steps and bytes are medians, accuracies medians (range), of "
        f"{len(next(iter(rows.values())))} seeds. Bytes are those that a worker hands over. "
        "Written by `python -m benchmarks settings`.",
        "",
        "| setting | strategy | with | lr × | inside the grid | a step | sent a step | LSSR | "
        "accuracy, % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, found in rows.items():
        best = tuned[case]
        step, sent, lssr = (
            statistics.median(row[key] for row in found)
            for key in ("step_seconds", "step_bytes", "lssr")
        )
        lines.append(
            f"| {case.group} | `{case.strategy}` | {_with(case)} | {best.scale:g} | "
            f"{'yes' if best.inside else '**no**'} | {1000 * step:.1f} ms | {sent / 1e3:.0f} kB | "
            f"{lssr:.2f} | {spread([row['final'] for row in found])} |"
        )
    return "\n".join([*lines, ""])


def _with(case: Case) -> str:
    parts = [
        f"latency {case.latency}" if case.group == "deferred flags" else "",
        f"`--partition {case.partition}`" if case.partition else "",
        case.optimizer if "state" in case.group else "",
        {
            "cosine": "",
            "one": "the rate for one worker",
            "scaled": "warm-up to 8 times it",
            "at once": "8 times it at once",
        }[case.schedule],
    ]
    return ", ".join(part for part in parts if part)


def results(*, quick: bool = False) -> list[Result]:
    """Run the study, two runs at a time, and write its files; it has no single figures."""
    cache = RunCache.named("settings", run, quick=quick)
    cases = CASES[:2] + CASES[-2:] if quick else CASES
    epochs, seeds = (2.0, SEEDS[:1]) if quick else (EPOCHS, SEEDS)

    def cell(case: Case, scale: float, seed: int) -> Cell:
        return Cell(case, scale, seed, epochs * LONGER.get(case.group, 1))

    own = [case for case in cases if case.schedule == "cosine"]
    tuning = TUNING_SEEDS[:1] if quick else TUNING_SEEDS
    tuned = tune_cells(cache, [*own, ONE_WORKER], cell, tuning)
    tuned = {case: tuned.get(case, tuned[ONE_WORKER]) for case in cases}
    rows = tuned_rows(cache, tuned, cell, seeds)
    text = page(rows, tuned)
    print(text)
    if not quick:
        saved = [
            {**asdict(case), "tuned": asdict(tuned[case]), "rows": found}
            for case, found in rows.items()
        ]
        save_page("settings", {"cases": saved}, text)
    return []
