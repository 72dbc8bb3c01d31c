"""Memory that a strategy adds, in copies of the model, from the peak size of a worker process.

Each case runs in new processes: some steps without Offbeat, then steps under the strategy, each
with its own peak (the kernel's VmHWM, which is reset in between). The difference is divided by the
bytes of the model; it includes the buffers of the network library. Large tensors get pages of their
own (MALLOC_MMAP_THRESHOLD_), so that gaps in the heap, which differ from run to run, do not count.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist

import offbeat
from benchmarks.costs.average import make_model
from benchmarks.harness import Result
from benchmarks.processes import run
from offbeat.quantization.kernels import kernels

MILLIONS = 50
CASES: list[tuple[str, bool, float]] = [  # strategy, with consensus(), target in copies
    ("bsp", False, 1.1),
    ("local:period=2", False, 1.1),
    ("selsync:delta=0", False, 1.1),
    ("diloco:period=2", False, 3.1),
    ("diloco:period=2,outer_momentum=0.0", False, 2.1),
    ("async:staleness=4", False, 3.1),
    ("async:staleness=4,schedule=eager", False, 4.1),
    ("async:staleness=4", True, 3.1),
]


def _peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def _reset() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(strategy: str, consensus: bool) -> dict[str, float]:
    """Measure the peaks in bytes without and with the strategy. Runs on every worker."""
    model = make_model(MILLIONS)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    x = torch.randn(4, 1024)

    def steps() -> int:
        _reset()
        for _ in range(9):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return _peak()

    kernels()  # numba takes 0.1 GB, whatever the size of the model
    warm = torch.zeros(1_000_000)  # allocates the network library's own buffers
    dist.all_reduce(warm)
    steps()
    without = steps()
    sync = offbeat.attach(model, optimizer, offbeat.parse_strategy(strategy))
    attached = steps()
    if consensus:
        with sync.consensus():
            pass
        attached = max(attached, _peak())
    sync.finish()
    size = sum(p.nbytes for p in model.parameters())
    return {"without": without, "attached": attached, "model": size}


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    found = []
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**18)
    for strategy, consensus, target in CASES[:3] if quick else CASES:
        each = run(measure, workers=2, strategy=strategy, consensus=consensus)
        value = max((one["attached"] - one["without"]) / one["model"] for one in each)
        what = f"{strategy}{' with consensus()' if consensus else ''}, {MILLIONS} M parameters"
        config = {"strategy": strategy, "workers": 2, "consensus": consensus}
        found.append(Result("memory", what, value, target, "copies", config, each[0]))
    return found
