"""Cost of quantization: each codec, and one worker's computing for one round of a part.

All times are on one thread, against a copy of the same float32 numbers in the same run. The part is
that of one of four workers, on a network that takes no time and returns each worker its own
numbers.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor
from typing_extensions import override

from benchmarks.harness import Result, compare, interleave
from offbeat.averaging.parts.update_part import UpdatePart
from offbeat.quantization.base import Codec, piece_elements
from offbeat.quantization.codecs import CODECS
from offbeat.quantization.kernels import BLOCK
from offbeat.quantization.wire import Precision, Wire
from offbeat.transport.handle import Completed, Handle
from offbeat.transport.operation import Exchange, Gather, Operation
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Team

MILLIONS = 8
WORKERS = 4


class Echo(SingleCommunicator):
    """A communicator of four workers that all have the numbers of the only one that exists."""

    size = WORKERS

    @override
    def start(self, operation: Operation[Any]) -> Handle[Any]:
        match operation:
            case Exchange(tensor=tensor):
                return Completed(tensor)
            case Gather(tensor=tensor):
                return Completed([tensor] * self.size)
        return super().start(operation)

    @override
    def twin(self) -> "Echo":
        return Echo(self.timeout_seconds)


class Flight:
    """Launches and lands one part repeatedly, and records the seconds of each stage."""

    def __init__(self, x: Tensor, precision: Precision) -> None:
        team = Team(Echo())
        self._part = UpdatePart(team, Wire(team, precision), lambda: [x], name="all")
        x.add_(torch.randn(x.numel()), alpha=1e-3)
        self.stages: dict[str, list[float]] = {"launch": [], "second stage": [], "landing": []}

    def fly(self) -> None:
        """Launch the part, run its second stage, and land it."""
        times = [time.perf_counter()]
        self._part.launch(Completed(float(WORKERS)), weight=1.0, step=0, what="benchmark")
        times.append(time.perf_counter())
        self._part.arrived()
        times.append(time.perf_counter())
        self._part.land(1)
        times.append(time.perf_counter())
        for i, seconds in enumerate(self.stages.values()):
            seconds.append(times[i + 1] - times[i])


def round_all(codec: Codec, x: Tensor, payload: Tensor) -> None:
    """Round piece after piece from a copy, as a launch does."""
    step = piece_elements(x.numel(), x.device)
    scratch = torch.empty(step)
    for start in range(0, x.numel(), step):
        values = scratch[: x.numel() - start]
        values.copy_(x[start : start + step])
        codec.encode(values, payload, start=start, keep_error=False)


def codecs(repetitions: int) -> list[Result]:
    """Return the time of each codec's operations and of a flight, over that of a copy."""
    elements = MILLIONS * 2**20
    x, errors, out = torch.randn(elements), torch.zeros(elements), torch.empty(elements)
    functions: dict[str, Callable[[], Any]] = {"copy": lambda: out.copy_(x)}
    flights = {}
    for precision, kind in CODECS.items():
        made = kind()
        payload = torch.empty(elements // BLOCK * made.block_bytes, dtype=torch.uint8)
        made.encode(errors, payload, plus=x)
        functions |= {
            f"{precision}: round": lambda c=made, p=payload: round_all(c, x, p),
            f"{precision}: encode": lambda c=made, p=payload: c.encode(errors, p, plus=x),
            f"{precision}: decode": lambda c=made, p=payload: c.decode(p, out),
            f"{precision}: add": lambda c=made, p=payload: c.add(p, out),
        }
    for precision in get_args(Precision):
        flights[precision] = Flight(torch.randn(elements), precision)
        functions[f"{precision}: a part's flight"] = flights[precision].fly
    seconds = interleave(functions, repetitions, between=lambda: errors.zero_())
    config = {"elements": elements, "repetitions": repetitions, "threads": 1, "workers": WORKERS}
    found = []
    for name in functions:
        if name == "copy":
            continue
        ratio, details = compare(seconds[name], seconds["copy"])
        if name.endswith("flight"):
            stages = flights[name.partition(":")[0]].stages.items()
            details |= {stage: statistics.median(times) for stage, times in stages}
        text = f"{name} / a copy of the float32 numbers, one thread: seconds"
        found.append(Result("codec", text, ratio, None, "", config, details))
    return found


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = codecs(5 if quick else 30)
    torch.set_num_threads(threads)
    return found
