"""Cost of the simulator: its wall time against the computing of all workers alone.

Every worker trains the same model for the same number of steps. "Alone" is the same training
function, called for each worker in turn, without the simulator and without synchronization.
"""

import resource
import time
from typing import Any

import torch
import torch.distributed as dist

import offbeat
from benchmarks.harness import Result

WIDTH = 1024


def train(steps: int, batch: int, strategy: offbeat.Strategy | None) -> None:
    """Train one worker, synchronized if there is a strategy."""
    rank = dist.get_rank() if strategy is not None else 0
    torch.manual_seed(rank)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sync = None if strategy is None else offbeat.attach(model, optimizer, strategy)
    x = torch.randn(batch, WIDTH)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if sync is not None:
        sync.finish()


def measure(workers: int, steps: int, batch: int, strategy: offbeat.Strategy) -> dict[str, Any]:
    """Return the seconds of both, and of a step alone."""
    train(3, batch, None)
    start = time.perf_counter()
    for _ in range(workers):
        train(steps, batch, None)
    alone = time.perf_counter() - start
    start = time.perf_counter()
    offbeat.simulate(lambda: train(steps, batch, strategy), workers=workers)
    simulated = time.perf_counter() - start
    return {
        "alone_seconds": alone,
        "simulated_seconds": simulated,
        "step_seconds": alone / workers / steps,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    torch.set_num_threads(1)
    found = []
    for workers, steps, batch in ((4, 40, 512), (16, 24, 512), (64, 8, 512)):
        for strategy in (offbeat.LocalSGD(period=8), offbeat.AsyncAveraging(staleness=16)):
            config = {"workers": workers, "steps": steps // (2 if quick else 1), "batch": batch}
            runs = [
                measure(strategy=strategy, **config)
                for _ in range(1 if quick or workers == 64 else 2)
            ]
            best = min(runs, key=lambda one: one["simulated_seconds"] / one["alone_seconds"])
            ratio = best["simulated_seconds"] / best["alone_seconds"]
            step = f"{1e3 * best['step_seconds']:.0f} ms steps"
            what = f"simulator / compute alone, {workers} workers, {strategy}, {step}"
            config |= {"strategy": str(strategy)}
            target = 1.1 if workers < 64 else None
            found.append(Result("overhead", what, ratio, target, "", config, best))
            if workers == 64 and strategy.name == "local":
                value = best["peak_bytes"] / 1e9
                what = "memory of the process, 64 workers of 8.4 MB models"
                found.append(Result("overhead", what, value, None, "GB", config, best))
    return found
