"""x ← mean(x) over the workers, for each tensor in its dtype and in place."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offbeat
from loops import Recorded, attach, bits, close
from offbeat.averaging import Replica
from offbeat.averaging import flat as flat_tensors
from offbeat.averaging.model_mean import ModelMean, copy_rank_0
from offbeat.transport.connect import open_communicator
from offbeat.transport.team import Team
from problems import OPTIMIZERS, Simulated, flat, make_batch, train_step
from worlds import run, simulated


class Tied(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(4, 4).double()
        self.b = nn.Linear(4, 4).double()
        self.b.weight = self.a.weight
        self.c = nn.Linear(4, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).tanh()))


def train_tied(rank: int, size: int) -> Any:
    model = Tied(seed=rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    sync = attach(model, optimizer, offbeat.LocalSGD(period=1))
    for step in range(4):
        train_step(model, optimizer, make_batch(rank, step))
    sync.finish()
    return flat(model), model.b.weight is model.a.weight, sync.stats.payload_bytes


def test_tied_weights_are_averaged_once() -> None:
    """A parameter with two names stays one parameter and is sent once."""
    reference = Simulated.start(3, "momentum", Tied(seed=0))
    for step in range(4):
        reference.step(step)
        reference.average()
    for end, tied, payload in run(train_tied, workers=3):
        close(end, reference.flat()[0])
        assert tied
        assert payload == 4 * 8 * (16 + 4 + 4 + 5) + 5 * 8 * 8


# -- the mean by itself ---------------------------------------------------------------------------


class Kinds(nn.Module):
    """Parameters of four dtypes, two with strides, and buffers of all kinds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.weight32 = nn.Parameter(numbers(30, 40).float().t())
        convolution = numbers(10, 6, 5, 4).to(memory_format=torch.channels_last)
        self.weight64 = nn.Parameter(convolution)
        self.weight16 = nn.Parameter((100 * numbers(1200)).to(torch.bfloat16))
        self.waves = nn.Parameter(torch.complex(numbers(3), numbers(3)))
        self.register_buffer("statistic", numbers(5).float())
        self.register_buffer("count", torch.tensor([10 * rank, -rank, 2**40 + rank]))
        self.register_buffer("small", torch.tensor(7 - rank, dtype=torch.int8))
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))


WEIGHTS = [0.5, 2.0, 0.0]


class Begun:
    """A worker that holds its own model, of workers that have begun with the same one."""

    def __init__(self, rank: int, sent: list[Any] | None = None) -> None:
        self.recorded = Recorded()
        self.recorded.tensors = [] if sent is None else sent
        self.team = Team(self.recorded.make_communicator(20))
        self.model = Kinds(0)
        self.replica = Replica(self.model, self.model.parameters())
        self.mean = ModelMean(self.team, self.replica)
        differ(self.model, rank)


def differ(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        for name, value in Kinds(rank).state_dict().items():
            model.state_dict()[name].copy_(value)


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_number(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def expected(weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean in double precision; the largest integers; nothing of masks."""
    each = [Kinds(rank).state_dict() for rank in range(len(weights))]
    mean: dict[str, Tensor] = {}
    for name, first in each[0].items():
        parts = [one[name] for one in each]
        if is_number(first):
            wide = torch.complex128 if first.is_complex() else torch.float64
            total = sum(w * part.to(wide) for w, part in zip(weights, parts, strict=True))
            mean[name] = total / sum(weights)  # type: ignore[assignment]
        elif first.dtype != torch.bool:
            mean[name] = torch.stack(parts).amax(0)
    return mean


ROUNDING = {torch.float32: 4e-7, torch.bfloat16: 2**-8, torch.float64: 1e-15}
STEPS = {"float32": 0.0, "int8": 1 / 127}


def assert_is(got: dict[str, Tensor], mean: dict[str, Tensor], wire: str = "float32") -> None:
    """To one rounding of its dtype; over a lossy wire to that of the largest change.

    A block of a quantized message may contain several tensors.
    """
    states = [Kinds(rank).state_dict() for rank in range(3)]
    changes = [
        (state[n] - states[0][n]).abs().max()
        for state in states
        for n in mean
        if is_number(state[n])
    ]
    largest = float(max(changes))
    averaged = {name for name, _ in Kinds(0).named_parameters()}
    for name, want in mean.items():
        value = got[name]
        if not is_number(value):
            assert torch.equal(value, want), name
            continue
        unit = ROUNDING[torch.float64 if value.is_complex() else value.dtype]
        bound = unit * (want.abs() + 1)
        if name in averaged:
            # half a step for each worker that contributes, and half of one of their sum
            bound = bound + STEPS[wire] * 2 * largest
        assert ((value - want).abs() <= bound).all(), (name, (value - want).abs().max())


def weighted(rank: int, size: int) -> dict[str, Tensor]:
    worker = Begun(rank)
    if WEIGHTS[rank] == 0:  # a worker with weight 0 cannot spoil anything
        with torch.no_grad():
            worker.model.weight32[3] = float("nan")
    worker.mean.average(WEIGHTS[rank], sum(WEIGHTS), what="a test")
    return copy_of(worker.model)


def test_the_mean_is_weighted_and_in_the_dtype_of_each_tensor() -> None:
    """Σ w·x / Σ w, half types summed in float32. Integers become the maximum; masks stay."""
    mean = expected(WEIGHTS)
    results = run(weighted, workers=3)
    for rank, result in enumerate(results):
        assert_is(result, mean)
        assert torch.equal(result["mask"], Kinds(rank).state_dict()["mask"])
        for name in mean:
            assert torch.equal(bits(result[name]), bits(results[0][name])), name


def trained(rank: int, size: int, text: str, wire: Any) -> dict[str, Tensor]:
    """The mean of models that differ, by steps of length 0."""
    model = Kinds(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync = attach(model, optimizer, text, wire=wire)
    differ(model, rank)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(2):
        optimizer.step()
    found = copy_of(model)
    sync.finish()
    return found


@pytest.mark.parametrize("wire", ["float32", "int8"])
@pytest.mark.parametrize(
    "text", ["local:period=2", "streaming:parts=3,schedule=cyclic,staleness=2,outer_gain=1"]
)
def test_a_mean_of_training_is_near_it_over_every_wire(text: str, wire: str) -> None:
    """Buffers are exact, and integers stay. All workers hold the same bits of an exact mean."""
    mean = {name: value for name, value in expected([1, 1, 1]).items() if is_number(value)}
    results = run(trained, text, wire, workers=3)
    for rank, result in enumerate(results):
        assert_is(result, mean, wire)
        for name, own in Kinds(rank).state_dict().items():
            assert result[name].stride() == own.stride()
            if name not in mean:
                assert torch.equal(result[name], own), name
            elif text.startswith("local") and wire == "float32":
                assert torch.equal(bits(result[name]), bits(results[0][name])), name
    exact = torch.allclose(results[0]["weight64"], mean["weight64"], rtol=0, atol=1e-12)
    assert exact == (wire == "float32")


def reciprocals(rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means of a model and of gradients, and what this worker contributes to both."""
    own = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    model = nn.Module()
    model.x = nn.Parameter(own.clone())
    team = Team(open_communicator(None, 20, what="a test"))
    ModelMean(team, Replica(model, [model.x])).average(1.0, size, what="a test")
    mean = model.x.detach().clone()
    with attach(model, torch.optim.SGD([model.x], lr=0.0), offbeat.BSP()):
        (model.x * own).sum().backward()
    return mean, model.x.grad, own


@pytest.mark.parametrize("workers", [3, 5, 7])
def test_a_sum_is_multiplied_by_the_rounded_reciprocal(workers: int) -> None:
    """CUDA divides by a number in this way."""
    results = simulated(reciprocals, workers=workers)
    sums = sum(own for _, _, own in results)
    expected = sums.numpy() * (np.float32(1) / np.float32(workers))
    for mean, gradient, _ in results:
        assert mean.tolist() == gradient.tolist() == expected.tolist()


class Held(list[Any]):
    """Weak references. ``most`` is the largest number of objects that existed at an ``append``."""

    most = 0

    def append(self, reference: Any) -> None:
        super().append(reference)
        self.most = max(self.most, sum(each() is not None for each in self))


def ranged(rank: int, size: int) -> Any:
    """A mean, one that is shown, and a copy of rank 0's model, in ranges."""
    average, show = Begun(rank), Begun(rank, Held())
    average.mean.average(WEIGHTS[rank], sum(WEIGHTS), what="a test")
    show.mean.show(WEIGHTS[rank], sum(WEIGHTS), what="a test")
    means = [copy_of(each.model) for each in (average, show)]
    sizes, sent = average.recorded.sums("a test"), show.recorded.tensors
    kept = [each for each in sent if each() is not None]
    differ(average.model, rank)
    copy_rank_0(average.team, average.replica.everything())
    return means, sizes, (sent.most, len(kept)), copy_of(average.model)


def test_ranges_begin_inside_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as few messages as the limit allows. ``show`` holds at most two, and none after."""
    monkeypatch.setattr(flat_tensors, "BUCKET_BYTES", 1000)
    mean, rank_0 = expected(WEIGHTS), Kinds(0).state_dict()
    # Bytes of complex numbers, bfloat16 in float32, float32 with the statistic, and float64.
    all_bytes = [16 * 3, 4 * 1200, 4 * 1205, 8 * 1200]
    for means, sizes, held, copied in simulated(ranged, workers=3):
        assert sizes == [n for each in all_bytes for n in [1000] * (each // 1000) + [each % 1000]]
        assert held == (2, 0)
        for state in means:
            assert_is(state, mean)
        for name, value in copied.items():
            assert torch.equal(bits(value), bits(rank_0[name])), name
