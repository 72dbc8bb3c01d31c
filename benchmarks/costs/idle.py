"""Idle time and step time of ``AsyncAveraging`` over shaped links.

The links are shaped so that a merge takes f = 0.5, 0.9 or 2 times the β = τ/2 steps of a cycle. A
segment of some cycles under the strategy alternates with a segment of steps without Offbeat, in the
same processes.

The idle share should be 0 while a merge takes less than a cycle. Otherwise a worker waits
merge − β·step in every cycle but the first, with the merge as it was measured.
"""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from benchmarks.costs.average import make_model
from benchmarks.harness import Result
from benchmarks.processes import run

BETA = 8
MILLIONS = 4


def make_step(batch: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a model, its optimizer, and a function that takes one step."""
    torch.manual_seed(0)
    model = make_model(MILLIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    x = torch.randn(batch, 1024)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def plain(batch: int, steps: int) -> dict[str, float]:
    """Measure the seconds of a step without Offbeat, while all workers train."""
    *_, step = make_step(batch)
    for _ in range(3):
        step()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return {"step_seconds": (time.perf_counter() - start) / steps}


def measure(batch: int, cycles: int, segments: int) -> dict[str, Any]:
    """Measure idle share, step time against plain steps, and the time of a merge."""
    model, optimizer, step = make_step(batch)
    step()
    idle, merge, ratios, steps = [], [], [], []
    for _ in range(segments):
        strategy = offbeat.AsyncAveraging(staleness=2 * BETA)
        sync = offbeat.attach(model, optimizer, strategy)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(cycles * BETA):
            step()
        ours = (time.perf_counter() - start) / (cycles * BETA)
        idle.append(sync.stats.idle)
        merge.append(sync.stats.details["landing_seconds"])
        sync.finish()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(3 * BETA):
            step()
        alone = (time.perf_counter() - start) / (3 * BETA)
        ratios.append(ours / alone)
        steps.append(alone)
    return {
        "idle": statistics.median(idle),
        "merge_seconds": statistics.median(merge),
        "ratio": statistics.median(ratios),
        "step_seconds": statistics.median(steps),
    }


def poll(steps: int) -> dict[str, float]:
    """Measure the CPU microseconds of a step, with a merge in flight and without."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(10_000_000)), nn.Parameter(torch.zeros(1))])
    model[1].grad = torch.zeros(
        1
    )  # the large parameter has no gradient; it only makes the merge long
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def cpu() -> float:
        start = time.thread_time()
        for _ in range(steps):
            optimizer.step()
        return (time.thread_time() - start) / steps * 1e6

    without = cpu()
    sync = offbeat.attach(model, optimizer, offbeat.AsyncAveraging(staleness=4 * steps))
    for _ in range(2 * steps):  # one cycle; its last step launches the merge
        optimizer.step()
    attached = cpu()
    landings = sync.stats.details["landings"]
    sync.finish()
    assert landings == 0, "the merge must be in flight all the time"
    return {"attached": attached, "without": without}


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    batch, workers, found = 1024, 2, []
    model_bits = 32 * sum(p.numel() for p in make_model(MILLIONS).parameters())
    config = {"workers": workers, "millions": MILLIONS, "batch": batch, "staleness": 2 * BETA}
    config |= {"cycles": 5 if quick else 10, "segments": 1 if quick else 3}
    for factor, most_idle in ((0.5, 1.0), (0.9, 2.0), (2.0, None)):
        each = run(plain, workers=workers, batch=batch, steps=2 * BETA)
        seconds = max(one["step_seconds"] for one in each)
        ring = 2 * (workers - 1) / workers * model_bits  # bits on each link in each direction
        megabits = ring / (factor * BETA * seconds) / 1e6
        for cycles, segments in ((3, 1), (config["cycles"], config["segments"])):
            bandwidth = f"{round(megabits)}Mbit/s"
            each = run(
                measure,
                workers=workers,
                bandwidth=bandwidth,
                seconds=500,
                batch=batch,
                cycles=cycles,
                segments=segments,
            )
            worst = max(each, key=lambda one: one["idle"])
            merge_cycles = worst["merge_seconds"] / (BETA * worst["step_seconds"])
            megabits *= merge_cycles / factor  # the first run only finds the bandwidth
        cycle = BETA * worst["step_seconds"]
        details = {**worst, "link": bandwidth, "merge_cycles": merge_cycles}
        what = f"merge of {factor} cycles (measured {details['merge_cycles']:.2f}), {bandwidth}"
        full = {**config, "factor": factor}
        if most_idle is None:
            waits = (config["cycles"] - 1) * max(0.0, worst["merge_seconds"] - cycle)
            predicted = 100 * waits / (waits + config["cycles"] * cycle)
            details["predicted"] = predicted
            text, value, target = f"{what}: idle − formula's", 100 * worst["idle"] - predicted, 5.0
            found.append(Result("idle", text, abs(value), target, "points", full, details))
        else:
            text, value = f"{what}: idle", 100 * worst["idle"]
            found.append(Result("idle", text, value, most_idle, "%", full, details))
            slowest = max(one["ratio"] for one in each)
            text = f"{what}: step / alone"
            found.append(Result("idle", text, slowest, 1.05, "", full, details))
    each = run(poll, workers=workers, bandwidth="20Mbit/s", steps=500)
    worst = max(each, key=lambda one: one["attached"] - one["without"])
    value = worst["attached"] - worst["without"]
    text = "CPU a step while a merge of 10 M parameters is in flight"
    found.append(Result("idle", text, value, 100, "µs", {"workers": workers}, worst))
    return found
