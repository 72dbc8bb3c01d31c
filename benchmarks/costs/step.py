"""Cost of a step under streaming averaging, against a step alone and a step of DDP.

The workers communicate with gloo over loopback, and each is pinned to its share of the cores. The
model is a transformer over bytes with half a million parameters and AdamW. ``costs.large`` and
``costs.gpu`` have larger ones.
"""

import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from benchmarks.harness import Result
from benchmarks.processes import run
from offbeat_lab.launch.cores import share_cores
from offbeat_lab.recipes.models.transformers import ByteTransformer, next_token_loss

CONTEXT, BATCH = 128, 16
WORKERS = len(os.sched_getaffinity(0))
STEPS = 20  # in a block
WARM_UP = 2  # blocks in which the number of parts in a message settles


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer, equal on all workers."""
    torch.manual_seed(0)
    network = ByteTransformer(CONTEXT)
    return network, torch.optim.AdamW(network.parameters(), lr=3e-4, fused=True)


def train(network: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """Take one step."""
    optimizer.zero_grad()
    next_token_loss(network, (batch,)).backward()
    optimizer.step()


def cost(blocks: int) -> dict[str, Any]:
    """Measure a step of each kind, in turns. Runs on every worker."""
    share_cores(dist.get_world_size(), dist.get_rank())
    (network, optimizer), alone, (other, for_ddp) = build(), build(), build()
    sync = offbeat.attach(network, optimizer)
    kinds = {
        "streaming": (network, optimizer),
        "alone": alone,
        "ddp": (nn.parallel.DistributedDataParallel(other), for_ddp),
    }
    batch = torch.randint(256, (BATCH, CONTEXT + 1), dtype=torch.uint8)
    seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(WARM_UP + blocks):
        for kind, trained in kinds.items():
            with sync.consensus():  # a barrier; a plain one would not serve the landings
                pass
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                train(*trained, batch)
            both = time.perf_counter() - wall, time.process_time() - cpu
            seconds[kind].append((both[0] / STEPS, both[1] / STEPS))
    details, stats = dict(sync.stats.details), sync.stats
    sync.detach()
    medians = {
        f"{kind}_{clock}": statistics.median(each[WARM_UP:])
        for kind, pairs in seconds.items()
        for clock, each in zip(("wall", "cpu"), zip(*pairs, strict=True), strict=True)
    }
    return {
        **medians,
        "idle": stats.idle,
        "steps_a_model": stats.steps * details["parts"] / details["landings"],
        "payload_bytes": stats.payload_bytes,
        **{k: v for k, v in details.items() if isinstance(v, int | float | str)},
    }


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    each = run(cost, workers=WORKERS, seconds=600, blocks=2 if quick else 4)

    def over(kind: str, clock: str = "wall") -> float:
        medians = [statistics.median(one[f"{k}_{clock}"] for one in each) for k in (kind, "alone")]
        return medians[0] / medians[1]

    place = f"{WORKERS} cores"
    config = {"workers": WORKERS, "batch": BATCH, "context": CONTEXT, "place": place}
    figures = (
        ("step / alone", over("streaming"), ""),
        ("processor time of a step / alone", over("streaming", "cpu"), ""),
        ("step of DDP / step alone", over("ddp"), ""),
        ("idle", 100 * max(one["idle"] for one in each), "%"),
        ("steps until the whole model is averaged", each[0]["steps_a_model"], ""),
    )
    what = f"streaming, {WORKERS} workers on {place}"
    return [
        Result("step", f"{what}: {name}", value, None, unit, config, each[0])
        for name, value, unit in figures
    ]
