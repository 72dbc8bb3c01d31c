"""AsyncAveraging over shaped links: how long workers wait, and what a step costs.

The links are shaped so that one merge takes f = 0.5, 0.9 and 2 times the β = τ/2 steps of a cycle.
Each segment trains for some cycles under the strategy; a segment of the same steps without Offbeat
follows, on the same worker processes (a single worker's training, on the same loaded machine).

Idle should be 0 while a merge takes less than a cycle. Beyond, a worker waits merge − β·step in
every cycle but the first, with the merge as it was measured.
"""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from benchmarks.average import make_model
from benchmarks.harness import Result
from benchmarks.processes import run

BETA = 8
MILLIONS = 4


def make_step(batch: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model, its optimizer and a function that takes one step."""
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
    """Runs on every worker: seconds of a step without Offbeat, all workers at work."""
    *_, step = make_step(batch)
    for _ in range(3):
        step()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return {"step_seconds": (time.perf_counter() - start) / steps}


def measure(batch: int, cycles: int, segments: int) -> dict[str, Any]:
    """Runs on every worker: idle, step time against plain steps, seconds of a merge."""
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
    """Runs on every worker: CPU microseconds a step while a merge is in flight, and without."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(10_000_000)), nn.Parameter(torch.zeros(1))])
    model[1].grad = torch.zeros(1)  # the large parameter takes part in the merge alone
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def cpu() -> float:
        start = time.thread_time()
        for _ in range(steps):
            optimizer.step()
        return (time.thread_time() - start) / steps * 1e6

    without = cpu()
    sync = offbeat.attach(model, optimizer, offbeat.AsyncAveraging(staleness=4 * steps))
    for _ in range(2 * steps):  # one cycle: the merge leaves with its last step
        optimizer.step()
    attached = cpu()
    landings = sync.stats.details["landings"]
    sync.finish()
    assert landings == 0, "the mean must be in flight all the time"
    return {"attached": attached, "without": without}


def results(*, quick: bool = False) -> list[Result]:
    """All figures of this benchmark."""
    batch, workers, found = 1024, 2, []
    model_bits = 32 * sum(p.numel() for p in make_model(MILLIONS).parameters())
    config = {"workers": workers, "millions": MILLIONS, "batch": batch, "staleness": 2 * BETA}
    config |= {"cycles": 5 if quick else 10, "segments": 1 if quick else 3}
    for factor, most_idle in ((0.5, 1.0), (0.9, 2.0), (2.0, None)):
        each = run(plain, workers=workers, batch=batch, steps=2 * BETA)
        seconds = max(one["step_seconds"] for one in each)
        ring = 2 * (workers - 1) / workers * model_bits  # bits each link carries, each way
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
            megabits *= merge_cycles / factor  # the first run was to find the rate
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
