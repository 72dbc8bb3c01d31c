"""What averaging costs on a GPU: GPT-2-small in bfloat16, trained by workers that share the GPU.

``make gpu`` runs it on a machine with a GPU. It measures each codec first. Then each method takes
the same steps: alone (each process trains its own model), streaming averaging with default
settings and with the global model in host memory, and torch's DDP. ``--quick`` trains a small
model, on the CPU if there is no GPU.
"""

import statistics
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import offbeat
from benchmarks.costs.codec import codecs
from benchmarks.harness import Result
from benchmarks.models.gpt2 import GPT2
from benchmarks.processes import run
from offbeat_lab.recipes.models.transformers import next_token_loss

METHODS = ("alone", "streaming", "streaming:stored=host", "ddp")
WORKERS = (2, 4)
STEPS, SKIPPED, PROFILED = 80, 30, 10
BATCH, LENGTH = 8, 513  # 512 words and the one after them
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
"""Names of the calls that start a kernel, and of those that wait for the GPU, in a profile."""


def train(
    method: str, device: str, shape: dict[str, int], batch: tuple[int, int]
) -> dict[str, Any]:
    """Train with one method. Runs on every worker."""
    torch.manual_seed(dist.get_rank())
    network = GPT2(**shape).to(device, torch.bfloat16)
    text = torch.randint(network.words.num_embeddings, batch, device=device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-4, fused=True)
    model: nn.Module = network
    sync = None
    if method.startswith("streaming"):
        sync = offbeat.attach(network, optimizer, offbeat.parse_strategy(method))
    if method == "ddp":
        model = nn.parallel.DistributedDataParallel(network, gradient_as_bucket_view=True)
    seconds = []
    with ExitStack() as stack:
        profiler = None
        for step in range(STEPS + PROFILED):
            if step == STEPS and device == "cuda":
                profiler = stack.enter_context(profile(activities=[ProfilerActivity.CUDA]))
            start = time.perf_counter()
            optimizer.zero_grad()
            next_token_loss(model, (text,)).backward()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    calls = {}
    if profiler is not None:
        counts = {event.key: event.count for event in profiler.key_averages()}
        for name, keys in {"launches": LAUNCHES, "waits": WAITS}.items():
            calls[name] = sum(counts.get(key, 0) for key in keys) / PROFILED
    details = {} if sync is None else {**sync.stats.details, "idle": sync.stats.idle}
    if sync is not None:
        sync.finish()
    return {
        "seconds": seconds[SKIPPED:STEPS],
        "calls": calls,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "parameters": sum(each.numel() for each in network.parameters()),
        "details": {key: value for key, value in details.items() if not isinstance(value, dict)},
    }


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark.

    Raises:
        SystemExit: There is no GPU, and ``quick`` is False.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not quick:
        raise SystemExit("python -m benchmarks gpu: there is no GPU; --quick runs it on the CPU")
    shape = {"layers": 1, "width": 96, "words": 500} if quick else {}
    batch = (1, 33) if quick else (BATCH, LENGTH)
    found = codecs(5 if quick else 30, device, "gpu")
    for workers in WORKERS[:1] if quick else WORKERS:
        call = {"device": device, "shape": shape, "batch": batch}
        runs = {name: run(train, workers=workers, method=name, **call) for name in METHODS}
        found += [each for name in METHODS for each in _figures(name, runs, batch)]
    return found


def _figures(
    method: str, runs: dict[str, list[dict[str, Any]]], batch: tuple[int, int]
) -> list[Result]:
    ours, alone = runs[method], runs["alone"]
    config = {
        "workers": len(ours),
        "batch": f"{batch[0]} x {batch[1] - 1}",
        "parameters": ours[0]["parameters"],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    pairs = [(w["seconds"], a["seconds"]) for w, a in zip(ours, alone, strict=True)]
    figures = [
        ("mean step / alone", max(statistics.fmean(w) / statistics.fmean(a) for w, a in pairs), ""),
        ("longest step / median alone", max(max(w) / statistics.median(a) for w, a in pairs), ""),
        ("peak memory", max(one["peak_bytes"] for one in ours) / 1e9, "GB"),
    ]
    figures += [
        (f"{name} a step", max(one["calls"][name] for one in ours), name)
        for name in ours[0]["calls"]
    ]
    details = ours[0]["details"]
    if details.get("landings"):
        passes = (STEPS + PROFILED) * details["parts"] / details["landings"]
        figures.append(("steps a pass of the model", passes, "steps"))
    return [
        Result(
            "gpu",
            f"{method}, {len(ours)} workers: {name}",
            value,
            None,
            unit,
            config,
            {"workers": ours},
        )
        for name, value, unit in figures
    ]
