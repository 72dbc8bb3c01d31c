"""The formulas of a plan against the simulator, which runs the code of the strategies.

Models of billions of parameters do not fit here. So a small model represents the large one: the
simulated network multiplies the bytes of its messages, and its buckets are smaller by the same
factor. A bucket then takes as long as a bucket of the large model, and there are as many. Only a
model of more than ``MOST_BUCKETS`` buckets gets larger ones, here and in the formulas, in which
time is linear in the number of buckets. Votes and agreements are not multiplied. Under streaming
averaging each part is a tensor, and a model of less than ``LARGE`` parameters represents itself.
"""

import functools
import sys
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from cells import nightly
from offbeat import Compute, Network, StreamingAveraging, parse_strategy, simulate
from offbeat.averaging import flat, gradients, pace, worker
from offbeat.quantization import codecs, kernels
from offbeat.units import to_count, to_seconds

MOST_BUCKETS, MOST_PARTS = 8, 24
LARGE = 1_000_000
# Allowed relative errors of a step, of the steps between means, and of the bytes sent in a step.
STEP, INTERVAL, PAYLOAD = 0.02, 0.05, 0.09
formulas = sys.modules["offbeat.plan"]  # ``offbeat.plan`` is the function


class Model(nn.Module):
    """Tensors of equal sizes, whose gradients are 1."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.p = nn.ParameterList(torch.zeros(elements) for _ in range(tensors))

    def forward(self) -> Tensor:
        return torch.stack([p.sum() for p in self.p]).sum()


@dataclass(frozen=True)
class Case:
    """A model on a cluster under one strategy."""

    parameters: str
    step: str
    workers: int
    bandwidth: str
    latency: str
    strategy: str

    @property
    def streams(self) -> bool:
        return self.strategy.startswith("streaming")

    @property
    def clocked(self) -> bool:
        """True if the landing of a message starts the next one."""
        return "eager" in self.strategy or (self.streams and "cyclic" not in self.strategy)

    @property
    def parts(self) -> int:
        """Parts of the model under streaming averaging."""
        parts: Any = StreamingAveraging().averages().parts
        number: int = parts(round(4 * to_count(self.parameters)))
        return min(number, MOST_PARTS)

    def __str__(self) -> str:
        return (
            f"{self.strategy}: {self.parameters}, {self.step}, {self.workers}, "
            f"{self.bandwidth}, {self.latency}"
        )


FIXED = ("bsp", "local:period=4", "selsync:target_lssr=0.9", "async")
INT4 = ("bsp --wire int4", "local:period=2 --wire int4")
ALL = (*FIXED, *INT4, "streaming")
OTHERS = (
    "async:schedule=eager,staleness=64",
    "async:schedule=eager,staleness=5",
    "diloco:period=8",
    "diloco:period=6,fragments=2,overlap=2",
    "diloco:period=8,overlap=5",
    "streaming:schedule=cyclic,staleness=8",
)


def cases(*setting: Any, strategies: tuple[str, ...] = ALL) -> list[Case]:
    return [Case(*setting, strategy) for strategy in strategies]


CASES = [
    *cases("150k", "20ms", 2, "10Mbit/s", "50ms", strategies=FIXED),
    Case("150k", "20ms", 2, "10Mbit/s", "50ms", "streaming --wire int4"),
    *cases("150k", "20ms", 4, "1Gbit/s", "1ms"),
    *cases("500k", "50ms", 4, "50Mbit/s", "100us", strategies=(*ALL, *OTHERS)),
    Case("500k", "50ms", 4, "50Mbit/s", "150ms", "async:schedule=eager,staleness=64 --wire int8"),
    Case("2M", "120ms", 4, "240Mbit/s", "100us", "async:schedule=eager,staleness=5"),
    *cases("500k", "50ms", 4, "5Mbit/s", "100us", strategies=("streaming:staleness=16",)),
    *(
        Case("500k", "50ms", 4, "200Mbit/s", "60ms", f"streaming:staleness={bound}")
        for bound in (2, 3, 4)
    ),
    *cases("500k", "50ms", 4, "2.2Mbit/s", "100us", strategies=("streaming",)),
    *cases("500k", "50ms", 8, "18Mbit/s", "5ms", strategies=("streaming",)),
    *cases("500k", "50ms", 16, "100Mbit/s", "5ms", strategies=("bsp", "local:period=8")),
    *cases("5M", "100ms", 8, "1Gbit/s", "500us", strategies=(*FIXED, *INT4)),
    *cases("25M", "120ms", 4, "5Gbit/s", "100us"),
    *cases("25M", "120ms", 16, "10Mbit/s", "20ms", strategies=("bsp", "local:period=8")),
    *cases("124M", "500ms", 8, "1Gbit/s", "100us", strategies=(*FIXED, INT4[1])),
    *cases("1B", "1s", 4, "10Gbit/s", "100us", strategies=(*FIXED, *INT4)),
    *cases("1B", "2s", 2, "1Gbit/s", "10ms", strategies=(*ALL, *OTHERS)),
    *cases("7B", "5s", 4, "25Gbit/s", "100us", strategies=(*FIXED, *INT4)),
    *cases("7B", "5s", 16, "100Gbit/s", "10us", strategies=("bsp", "local:period=4")),
    *cases("7B", "5s", 2, "10Mbit/s", "50ms", strategies=("bsp", "local:period=8", "async")),
    *cases("1B", "2s", 64, "100Gbit/s", "1ms", strategies=("local:period=2",)),
]
MANY = cases("25M", "120ms", 256, "10Gbit/s", "10us", strategies=("local:period=1", "bsp", "async"))


@dataclass(frozen=True)
class Smaller:
    """The small model of a case.

    Attributes:
        tensors: Number of tensors.
        elements: Elements of each tensor.
        factor: Bytes of the large model for each byte of the small one.
        bucket_bytes: Bytes of a bucket of the large model.
    """

    tensors: int
    elements: int
    factor: float
    bucket_bytes: float

    @classmethod
    def of(cls, case: Case) -> "Smaller":
        size = 4 * to_count(case.parameters)
        bucket = max(flat.BUCKET_BYTES, size / MOST_BUCKETS)
        each = min(size / 8, bucket)  # so that a bucket consists of whole tensors
        if case.streams:
            each = size / case.parts
        elif case.strategy.startswith("bsp"):
            # The first bucket of gradients is an eighth of the others.
            each = min(size / 8, flat.BUCKET_BYTES / 64) if size < bucket else bucket / 8
        # A chunk of a quantized sum, an N-th of a tensor, consists of whole blocks.
        quantized = "--wire" in case.strategy or case.streams
        elements = kernels.BLOCK * (case.workers if quantized else 1)
        if case.streams and size < 4 * LARGE:
            elements = round(each / 4)
        return cls(round(size / each), elements, each / (4 * elements), bucket)

    @property
    def parameters(self) -> float:
        return self.tensors * self.elements * self.factor

    def network(self, case: Case) -> Network:
        """The network, on which a message of the model takes as long as if it were larger."""
        factor = self.factor
        # A vote of 8 numbers, the contribution, a number for each tensor.
        agreement = 8 * (8 + 1 + self.tensors)
        # Bytes of the votes in the first or only stage of a message.
        rows = {"exchange": case.workers, "gather": case.workers == 2} if case.clocked else {}

        class LargerMessages(Network):
            def collective_cost(self, kind: Any, size_bytes: float, *rest: Any) -> Any:
                same = 96 * rows.get(kind, 0)
                if kind == "gather" and (size_bytes <= 96 or size_bytes == agreement):
                    same = size_bytes
                larger = same + factor * (size_bytes - same)
                return super().collective_cost(kind, larger, *rest)

        return LargerMessages(case.bandwidth, case.latency)


def durations(case: Case, text: str) -> tuple[int, int]:
    """Steps before the measurement and in it: whole cycles of the strategy."""
    if case.clocked:
        return 24, 48 if case.streams else 320
    if case.streams:
        return 20, 20
    cycle = getattr(parse_strategy(text), "period", 1)
    cycle = 8 if text.startswith("async") else 10 if text.startswith("selsync") else cycle
    return (1, 1) if text == "local:period=1" else (max(2, cycle), max(2, cycle))


def simulated(case: Case, text: str, smaller: Smaller) -> tuple[float, float, float]:
    """Seconds of a step of a training in the simulator, parts that land in it, and bytes sent."""
    name, _, wire = text.partition(" --wire ")
    settle, steps = durations(case, name)
    # The gradients determine which steps synchronize. A fixed interval has the same share.
    name = name.replace("target_lssr=0.9", "delta=inf,max_interval=10")
    strategy = parse_strategy(name)

    def train() -> tuple[float, float, float]:
        model = Model(smaller.tensors, smaller.elements)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        precision: Any = wire or strategy.default_wire
        sync = offbeat.attach(model, optimizer, strategy, wire=precision)
        ends = []
        for step in range(1, settle + steps + 1):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            if step in (settle, settle + steps):
                stats, landings = sync.stats, sync.stats.details.get("landings", 0)
                seconds = stats.wait_seconds + stats.compute_seconds
                ends.append((seconds, landings, stats.payload_bytes))
        sync.detach()
        seconds, landed, sent = (end - begin for begin, end in zip(*ends, strict=True))
        return seconds / steps, landed / steps, sent / steps

    network, compute = smaller.network(case), Compute(case.step)
    found = simulate(train, workers=case.workers, network=network, compute=compute)
    seconds, landed, sent = map(fmean, zip(*found.results, strict=True))
    return seconds, landed, sent


@pytest.mark.parametrize("case", [*CASES, *nightly(MANY)], ids=str)
def test_a_step_takes_as_long_as_in_the_simulator(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller = Smaller.of(case)
    small_bucket = smaller.bucket_bytes / smaller.factor
    first = smaller.bucket_bytes / 8
    monkeypatch.setattr(gradients, "FIRST_BUCKET_BYTES", first / smaller.factor)
    small_groups = functools.partial(gradients.gradient_buckets, bucket_bytes=small_bucket)
    monkeypatch.setattr(worker, "gradient_buckets", small_groups)
    monkeypatch.setattr(formulas, "BUCKET_BYTES", smaller.bucket_bytes)
    monkeypatch.setattr(formulas, "FIRST_BUCKET_BYTES", first)
    text = case.strategy
    parts = case.parts if case.streams else 1
    if case.streams:
        name, _, rest = text.partition(" ")
        text = f"{name}{',' if ':' in name else ':'}parts={parts} {rest}".strip()
    seconds, landed, sent = simulated(case, text, smaller)
    (row,) = offbeat.plan(
        parameters=smaller.parameters,
        step_time=case.step,
        workers=case.workers,
        bandwidth=case.bandwidth,
        latency=case.latency,
        strategies=[text],
    ).rows
    assert row.step_seconds == pytest.approx(seconds, rel=STEP)
    assert row.payload_bytes == pytest.approx(smaller.factor * sent, rel=PAYLOAD)
    computing = to_seconds(case.step) / row.step_seconds
    assert (row.idle, row.throughput) == pytest.approx((1 - computing, case.workers * computing))
    if case.clocked:
        assert row.interval_steps == pytest.approx(parts / landed, rel=INTERVAL)


def test_the_constants_are_those_of_the_training() -> None:
    assert formulas.BUCKET_BYTES == flat.BUCKET_BYTES
    assert formulas.FIRST_BUCKET_BYTES == gradients.FIRST_BUCKET_BYTES
    assert formulas.BLOCK == kernels.BLOCK
    assert formulas._SIZER_SLACK == pace._SLACK
    assert {k: c.block_bytes for k, c in codecs.CODECS.items()} == formulas.BLOCK_BYTES
