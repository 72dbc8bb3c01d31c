"""Time and bytes of a quantized sum (``Wire.sum``) against the exact one.

The sums run over shaped links, in the same processes, in turn, after a barrier; the time of the
slowest worker counts. The bytes of a sum are read from the counter of each node's interface.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from benchmarks.harness import Result, compare, interleave, slowest
from benchmarks.processes import run
from offbeat.averaging.buckets import BUCKET_BYTES
from offbeat.quantization.codecs import CODECS
from offbeat.quantization.wire import Precision, Wire
from offbeat.transport.team import Team
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator
from offbeat_lab.launch.cluster import Cluster

MILLIONS = 10
WORKERS = 4
LINKS = {"100Mbit/s": 4, "1Gbit/s": 12}  # bandwidth → repetitions


def _bytes_sent() -> int:
    """Return the bytes that this node has sent, by the counter of its interface."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.strip().partition(":")
        if name == Cluster.interface:
            return int(numbers.split()[8])
    raise RuntimeError(f"no interface {Cluster.interface}")


def measure(millions: int, repetitions: int) -> dict[str, Any]:
    """Measure seconds and bytes of a sum at each precision. Runs on every worker."""
    team = Team(TorchCommunicator(None, timeout_seconds=60))
    wires = [Wire(team, precision) for precision in get_args(Precision)]
    torch.manual_seed(dist.get_rank())
    buckets = list(torch.randn(int(millions * 1e6)).split(BUCKET_BYTES // 4))

    def make(wire: Wire) -> Callable[[], None]:
        def work() -> None:
            handles = [
                wire.sum(bucket, stream=f"{i}", what="benchmark")
                for i, bucket in enumerate(buckets)
            ]
            for bucket, handle in zip(buckets, handles, strict=True):
                handle.wait()
                bucket.div_(team.size)

        return work

    functions = {wire.precision: make(wire) for wire in wires}
    seconds = interleave(functions, repetitions, between=dist.barrier)
    sent = {}
    for name, work in functions.items():
        dist.barrier()
        before = _bytes_sent()
        work()
        dist.barrier()
        sent[name] = _bytes_sent() - before
    return {"seconds": seconds, "sent": sent}


def sums(bandwidth: str, repetitions: int) -> list[Result]:
    """Return time and bytes of the quantized sums against the exact one, on one kind of link."""
    config = {"millions": MILLIONS, "repetitions": repetitions}
    each = run(measure, workers=WORKERS, bandwidth=bandwidth, seconds=500, **config)
    seconds = slowest([one["seconds"] for one in each])
    full = {**config, "workers": WORKERS, "link": bandwidth}
    found = []
    for precision in CODECS:
        ratio, details = compare(seconds[precision], seconds["float32"])
        text = f"{precision} mean of {MILLIONS} M / exact, {WORKERS} workers, {bandwidth}: seconds"
        found.append(Result("compression", text, ratio, None, "", full, details))
        ratio = max(one["sent"][precision] / one["sent"]["float32"] for one in each)
        text = f"{precision} mean of {MILLIONS} M / exact, {WORKERS} workers, {bandwidth}: bytes"
        # The share of the bits, and a margin for scales, headers and acknowledgements.
        target = {"bfloat16": 0.53, "int8": 0.28, "int4": 0.15, "int2": 0.12}[precision]
        details = {"sent": [one["sent"] for one in each]}
        found.append(Result("compression", text, ratio, target, "", full, details))
    return found


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    found: list[Result] = []
    for bandwidth, repetitions in LINKS.items():
        found += sums(bandwidth, max(2, repetitions // 4) if quick else repetitions)
    return found
