"""A model of 124 million parameters on two processes with a core each, over text.

All train on the same batches: alone (no communication, each process a model of its own), streaming
averaging with default settings, local SGD in int2, and torch's DDP. DDP over the slow link stops
early: its models equal those over loopback.
"""

import resource
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from benchmarks.harness import DATA, Result
from benchmarks.models.gpt2 import GPT2, load
from benchmarks.processes import run
from offbeat_lab.launch.cores import share_cores
from offbeat_lab.recipes.models.transformers import next_token_loss

LENGTH = 129  # words in a window; a batch is one window
STEPS, FEW, SKIPPED, WARM_UP = 200, 40, 20, 20
LINK = "1Gbit/s"
METHODS = (
    ("alone", None, STEPS),
    ("streaming", None, STEPS),
    ("ddp", None, STEPS),
    ("streaming", LINK, STEPS),
    ("local SGD", LINK, STEPS),
    ("ddp", LINK, FEW),
)
"""Method, link (None: loopback) and number of steps of each training."""


def train(method: str, steps: int, shape: dict[str, int]) -> dict[str, Any]:
    """Train with one method. Runs on every worker."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    share_cores(workers, rank)
    torch.manual_seed(0)
    network = GPT2(**shape)
    windows, test = load(DATA / "text", LENGTH)
    order = torch.randperm(len(windows))[rank::workers]
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, WARM_UP)
    model: nn.Module = network
    started = time.perf_counter()
    sync = None
    if method == "streaming":
        sync = offbeat.attach(network, optimizer)
    elif method == "local SGD":
        sync = offbeat.attach(network, optimizer, offbeat.LocalSGD(period=4), wire="int2")
    if method == "ddp":
        model = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    attach_seconds = time.perf_counter() - started
    seconds, processor, losses = [], [], []
    for step in range(steps):
        wall, cpu = time.perf_counter(), time.process_time()
        losses.append(_step(model, optimizer, windows[order[step : step + 1]]))
        warm_up.step()
        seconds.append(time.perf_counter() - wall)
        processor.append(time.process_time() - cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    details: dict[str, Any] = {}
    if sync is not None:
        details = {**sync.stats.details, "idle": sync.stats.idle, "bytes": sync.stats.payload_bytes}
        sync.finish()
    return {
        "seconds": seconds[SKIPPED:],
        "processor_seconds": processor[SKIPPED:],
        "losses": losses,
        "test_loss": _evaluate(network, test),
        "peak_bytes": peak,
        "attach_seconds": attach_seconds,
        "parameters": sum(each.numel() for each in network.parameters()),
        **{f"stats_{key}": value for key, value in details.items() if not isinstance(value, dict)},
    }


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> float:
    optimizer.zero_grad()
    loss = next_token_loss(model, (batch,))
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def _evaluate(network: nn.Module, windows: Tensor, batches: int = 32) -> float:
    """Return the mean loss of a word in the first windows, in nats."""
    return statistics.fmean(
        float(next_token_loss(network, (windows[i : i + 1],))) for i in range(batches)
    )


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    shape = {"layers": 2, "width": 96, "words": 50257} if quick else {}
    runs = {}
    for method, link, steps in METHODS:
        steps = FEW if quick else steps
        call = {"method": method, "steps": steps, "shape": shape}
        runs[method, link] = run(train, workers=2, bandwidth=link, seconds=3000, **call)
    alone = [statistics.median(one["seconds"]) for one in runs["alone", None]]
    means = [statistics.fmean(one["seconds"]) for one in runs["alone", None]]
    found = []
    for (method, link), workers in runs.items():
        where = f"{method}, {link or 'loopback'}"
        config = {
            "workers": 2,
            "steps": len(workers[0]["losses"]),
            "parameters": workers[0]["parameters"],
            "batch": f"1 x {LENGTH - 1}",
        }
        pairs = list(zip(workers, alone, strict=True))
        late = [sum(one["losses"][-20:]) / 20 for one in workers]
        mean = max(statistics.fmean(w["seconds"]) / a for w, a in zip(workers, means, strict=True))
        figures: list[tuple[str, float, str]] = [
            ("mean step / alone", mean, ""),
            ("median step / alone", max(statistics.median(w["seconds"]) / a for w, a in pairs), ""),
            ("longest step / median alone", max(max(w["seconds"]) / a for w, a in pairs), ""),
            ("peak memory", max(w["peak_bytes"] for w in workers) / 1e9, "GB"),
            ("training loss, last 20 steps", statistics.fmean(late), "nats"),
            ("test loss of the last model", workers[0]["test_loss"], "nats"),
        ]
        if "stats_landings" in workers[0]:
            one = workers[0]
            passes = len(one["losses"]) * one["stats_parts"] / one["stats_landings"]
            figures.append(("steps until the whole model is averaged", passes, ""))
        for name, value, unit in figures:
            details = {"workers": [{**w, "losses": w["losses"][::10]} for w in workers]}
            found.append(Result("large", f"{where}: {name}", value, None, unit, config, details))
    return found
