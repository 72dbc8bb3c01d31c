"""Cost of a step on a GPU under streaming averaging, against a step alone and a step of DDP.

All workers share one GPU, so each waits for the kernels of the others, too. They communicate with
gloo over loopback. The model is a transformer of 114 million parameters over bytes, trained with
AdamW and bfloat16 autocast.
"""

import gc
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

import offbeat
from benchmarks.harness import Result
from benchmarks.processes import run
from offbeat_lab.recipes.models.transformers import ByteTransformer, next_token_loss

CONTEXT, BATCH = 512, 8
SIZE = {"width": 768, "layers": 16, "heads": 12}
STEPS = 20  # in a block
WARM_UP = 2  # blocks in which the number of parts in a message settles


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer, equal on all workers."""
    torch.manual_seed(0)
    network = ByteTransformer(CONTEXT, **SIZE).cuda()
    return network, torch.optim.AdamW(network.parameters(), lr=3e-4, fused=True)


def compute(network: nn.Module, batch: Tensor) -> None:
    """Compute the gradients of one batch."""
    with torch.autocast("cuda", torch.bfloat16):
        loss = next_token_loss(network, (batch,))
    loss.backward()


def cost(blocks: int, batch: int) -> dict[str, Any]:
    """Measure a step under streaming averaging and a step alone, in turns. Runs on every worker."""
    network, optimizer = build()
    other, alone = build()
    x = torch.randint(256, (batch, CONTEXT + 1), dtype=torch.uint8, device="cuda")
    gc.collect()
    before = torch.cuda.memory_allocated()
    sync = offbeat.attach(network, optimizer)
    model_bytes = sum(p.nbytes for p in network.parameters())
    copies = (torch.cuda.memory_allocated() - before) / model_bytes

    def block(network: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
        with sync.consensus():  # a barrier; a plain one would not serve the landings
            pass
        torch.cuda.synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            optimizer.zero_grad()
            compute(network, x)
            optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - wall) / STEPS, (time.process_time() - cpu) / STEPS

    ours, theirs = [], []
    for _ in range(WARM_UP + blocks):
        ours.append(block(network, optimizer))
        theirs.append(block(other, alone))
    stats = sync.stats
    details, idle, payload = dict(stats.details), stats.idle, stats.payload_bytes
    sync.detach()
    median = statistics.median
    return {
        "step": median(wall for wall, _ in ours[WARM_UP:]),
        "alone": median(wall for wall, _ in theirs[WARM_UP:]),
        "cpu": median(cpu for _, cpu in ours[WARM_UP:]),
        "cpu_alone": median(cpu for _, cpu in theirs[WARM_UP:]),
        "idle": idle,
        "copies": copies,
        "steps_a_model": stats.steps * details["parts"] / details["landings"],
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "payload_bytes": payload,
        **{k: v for k, v in details.items() if isinstance(v, int | float | str)},
    }


def ddp(steps: int, batch: int) -> float:
    """Return the seconds of a step under DistributedDataParallel over gloo."""
    network, optimizer = build()
    wrapped = nn.parallel.DistributedDataParallel(network)
    x = torch.randint(256, (batch, CONTEXT + 1), dtype=torch.uint8, device="cuda")
    seconds = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        compute(wrapped, x)
        optimizer.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmark gpu: there is no GPU")
    config = {"workers": 4, "batch": BATCH, "context": CONTEXT, "gpu": torch.cuda.get_device_name()}
    each = run(cost, workers=4, blocks=2 if quick else 4, batch=BATCH)
    step, alone = (statistics.median(one[name] for one in each) for name in ("step", "alone"))
    seconds = max(run(ddp, workers=4, steps=5, batch=BATCH))
    figures = (
        ("step / alone", step / alone, ""),
        ("step of DDP / step alone", seconds / alone, ""),
        ("idle", 100 * max(one["idle"] for one in each), "%"),
        ("steps until the whole model is averaged", each[0]["steps_a_model"], ""),
        ("copies of the model that attach allocates", each[0]["copies"], ""),
    )
    what = "114 million parameters, 4 workers on one GPU, loopback"
    return [
        Result("gpu", f"{what}: {name}", value, None, unit, config, each[0])
        for name, value, unit in figures
    ]
