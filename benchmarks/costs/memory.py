"""Memory that streaming averaging adds, in bytes per parameter, from the size of a worker process.

Workers train a stack of linear layers with AdamW over loopback. ``steps`` is the peak of steps
minus the peak of steps without Offbeat, both with gradients. The other figures are relative to the
resident memory between two steps without Offbeat, which is that of the model and the optimizer.
Large tensors get pages of their own (MALLOC_MMAP_THRESHOLD_), so that gaps in the heap, which
differ from run to run, do not count. File pages that ``load`` maps are counted in its peak, but not
in what stays.
"""

import gc
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from benchmarks.harness import Result
from benchmarks.processes import run
from offbeat.quantization.kernels import kernels

WIDTH = 1024
CASES = (  # strategy, workers, layers, dtype
    ("streaming", 2, 24, "float32"),
    ("streaming", 2, 24, "bfloat16"),
    ("streaming", 2, 100, "float32"),
    ("streaming", 2, 100, "bfloat16"),
    ("streaming:outer_gain=2", 2, 24, "float32"),
    ("streaming:parts=1", 2, 24, "float32"),
    ("streaming:parts=1", 4, 24, "float32"),
)
PHASES = ("attach", "attached", "steps", "consensus", "save", "load", "loaded")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def _reset() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def measure(layers: int, dtype: str, strategy: str, folder: str) -> dict[str, float]:
    """Return bytes per parameter in each phase. Runs on every worker."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    model.to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(4, WIDTH, dtype=getattr(torch, dtype))
    size = layers * WIDTH**2

    def steps(number: int = 6) -> int:
        _reset()
        for _ in range(number):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return _status("VmHWM")

    kernels()  # numba takes 0.1 GB, whatever the size of the model
    dist.all_reduce(torch.zeros(1_000_000))  # allocates the network library's own buffers
    steps()
    alone, resident, found = steps(), _status("RssAnon"), {}
    files = _status("VmRSS") - resident

    def note(phase: str, value: int, than: int) -> None:
        found[phase] = (value - than) / size

    _reset()
    sync = offbeat.attach(model, optimizer, offbeat.parse_strategy(strategy))
    note("attach", _status("VmHWM"), resident + files)
    note("attached", _status("RssAnon"), resident)
    steps()
    note("steps", steps(12), alone)
    details = sync.stats.details
    found["share of the model in a message"] = details["message_parts"] / details["parts"]
    _reset()
    with sync.consensus():
        pass
    note("consensus", _status("VmHWM"), resident + files)
    steps()
    _reset()
    offbeat.save(folder, sync)
    note("save", _status("VmHWM"), resident + files)
    written = sum(f.stat().st_size for f in Path(folder).rglob("*"))
    note("bytes in the file", written // sync.size, 0)
    _reset()
    offbeat.load(folder, sync)
    note("load", _status("VmHWM"), resident + files)
    gc.collect()
    note("loaded", _status("RssAnon"), resident)
    note("files mapped after load", _status("VmRSS") - _status("RssAnon"), files)
    steps()
    gc.collect()
    note("after more steps", _status("RssAnon"), resident)
    sync.finish()
    return found


def results(*, quick: bool = False, cases: tuple[Any, ...] = CASES) -> list[Result]:
    """Return all figures of this benchmark."""
    found = []
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**18)
    for strategy, workers, layers, dtype in cases[:1] if quick else cases:
        config = {"strategy": strategy, "layers": layers, "dtype": dtype}
        with tempfile.TemporaryDirectory() as folder:
            each = run(measure, workers=workers, seconds=500, folder=folder, **config)
        config["workers"] = workers
        millions = round(layers * WIDTH**2 / 1e6)
        for phase in PHASES:
            value = max(one[phase] for one in each)
            what = f"{strategy}, {workers} workers, {millions} M parameters in {dtype}: {phase}"
            found.append(Result("memory", what, value, None, "B", config, each[0]))
    return found
