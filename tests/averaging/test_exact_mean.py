"""x ← mean(x) over the workers: every tensor, in its own dtype, in its place."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from loops import attach, bits, close, error_of, everything
from offbeat.fabric import Communicator, Handle, Team, Wire, open_communicator
from offbeat.fabric.communicator import Wrapper
from offbeat.fabric.operation import Operation
from offbeat.averaging import ModelMean, Replica
from problems import OPTIMIZERS, Simulated, flat, loss_of, make_batch, train_step
from worlds import run


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
    """A parameter with two names stays one parameter and travels once."""
    reference = Simulated.start(3, "momentum", Tied(seed=0))
    for step in range(4):
        reference.step(step)
        reference.average()
    for end, tied, payload in run(train_tied, workers=3):
        close(end, reference.flat()[0])
        assert tied
        assert payload == 4 * 8 * (16 + 4 + 4 + 5) + 5 * 8 * 7


def half_models(rank: int, size: int) -> Tensor:
    model = nn.Linear(1, 3, bias=False, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = attach(model, optimizer, offbeat.LocalSGD(period=1))
    with torch.no_grad():
        model.weight.copy_(
            torch.tensor([[256.0, 1.0, 1.0], [1e38, 1e38, 1e38], [3, 4, 5]])[:, rank : rank + 1]
        )
    optimizer.step()  # no gradients: the step itself changes nothing
    sync.finish()
    return model.weight.detach()[:, 0]


def test_half_precision_parameters_are_averaged_in_float32() -> None:
    """Pitfall 10: 256 + 1 + 1 is 258, not 256, and the sum is divided before it is narrowed."""
    want = torch.tensor([86.0, 1e38, 4.0]).to(torch.bfloat16)
    results = run(half_models, workers=3)
    for got in results:
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, want)
        assert torch.equal(got, results[0])


def mixed_values(rank: int) -> dict[str, Tensor]:
    """Four dtypes, so four buckets; small integers, whose mean over 2 is exact."""
    numbers = torch.arange(6.0).reshape(2, 3) * (2 * rank + 1)
    return {
        "a": numbers,
        "b": numbers.double() + 1,
        "c": torch.complex(numbers, numbers + 2),
        "d": (numbers + 3).to(torch.bfloat16),
        "e": numbers + 4,
    }


def mixed_dtypes(rank: int, size: int) -> Any:
    results = []
    for strategy in (offbeat.LocalSGD(period=1), offbeat.AsyncAveraging(staleness=2)):
        model = nn.ParameterDict({k: torch.zeros_like(v) for k, v in mixed_values(0).items()})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = attach(model, optimizer, strategy)
        with torch.no_grad():
            for name, value in mixed_values(rank).items():
                model[name].copy_(value)
        optimizer.step()
        sync.finish()
        results.append({name: p.detach() for name, p in model.items()})
    return results


def test_every_bucket_of_a_mean_is_applied() -> None:
    """Pitfalls 1 and 10: with four dtypes each tensor gets its own mean, in its own dtype."""
    first, second = mixed_values(0), mixed_values(1)
    for results in run(mixed_dtypes, workers=2):
        for result in results:
            for name, got in result.items():
                want = (first[name] + second[name]) / 2
                assert got.dtype == want.dtype
                assert torch.equal(got, want), name


def norm_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()


def norm_steps(model: nn.Module, rank: int, step: int) -> None:
    """Rank r looks at r + 1 batches a step."""
    for micro in range(rank + 1):
        loss_of(model, make_batch(rank, 10 * step + micro)).backward()


BUFFERED = [
    (offbeat.LocalSGD(period=2), 2),
    (offbeat.SelSync(delta=0.0), 1),
    (offbeat.BSP(), 100),  # at the end only
    (offbeat.SelSync(delta=float("inf")), 100),
    (offbeat.AsyncAveraging(staleness=100), 100),
]


def batch_norm(rank: int, size: int) -> Any:
    ends = []
    for strategy, _ in BUFFERED:
        model = norm_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sync = attach(model, optimizer, strategy)
        for step in range(5):
            optimizer.zero_grad()
            norm_steps(model, rank, step)
            optimizer.step()
        with sync.consensus():
            inside = everything(model[1])[2:]
        sync.finish()
        ends.append((inside, everything(model[1])[2:], flat(model)))
    return ends


def test_batch_norm_buffers_are_averaged_and_counters_take_the_maximum() -> None:
    """Pitfalls 7, 8 and 11: statistics are averaged, counters stay integers, also at rate 0."""
    results = run(batch_norm, workers=2)
    for index, (_, period) in enumerate(BUFFERED):
        models = [norm_model() for _ in range(2)]

        def average(models: list[nn.Sequential] = models) -> None:
            for same in zip(*(m[1].buffers() for m in models), strict=True):
                integral = same[0].dtype == torch.int64
                value = max(same) if integral else sum(same) / 2
                value = value.clone()
                for buffer in same:
                    buffer.copy_(value)

        for step in range(5):
            for rank, model in enumerate(models):
                norm_steps(model, rank, step)
            if step % period == period - 1:
                average()
        average()
        mean, variance, count = models[0][1].buffers()
        for result in results:
            inside, end, parameters = result[index]
            for got in (inside, end):
                close(got[0], mean)
                close(got[1], variance)
                assert got[2].dtype == torch.int64
                assert int(got[2]) == int(count)
            assert torch.equal(parameters, flat(norm_model())), "nothing divides by the rate"


def unused_layers(rank: int, size: int) -> list[Tensor]:
    torch.manual_seed(rank)
    model = nn.ModuleList(nn.Linear(2, 1).double() for _ in range(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, offbeat.LocalSGD(period=1))
    for _ in range(2):
        optimizer.zero_grad()
        model[rank](torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        optimizer.step()
    sync.finish()
    return everything(model)


def test_unused_layers_that_differ_per_rank_stay_apart() -> None:
    """Pitfall 2: a layer without a gradient on a rank is averaged with itself, not with another."""
    torch.manual_seed(0)
    start = everything(nn.ModuleList(nn.Linear(2, 1).double() for _ in range(3)))
    results = run(unused_layers, workers=2)
    for end in results:
        for i, (got, begin) in enumerate(zip(end, start, strict=True)):
            # layer 0 moves on rank 0, layer 1 on rank 1, layer 2 nowhere: −0.1·1/2 a step
            close(got, begin - (0.1 if i < 4 else 0.0))


STRIDED = [offbeat.BSP(), offbeat.LocalSGD(period=1), offbeat.AsyncAveraging(staleness=2)]


def strided_values(rank: int, what: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * what + rank)
    return (
        torch.randn(4, 3, 2, 2, generator=generator, dtype=torch.float64),
        torch.randn(3, 5, generator=generator, dtype=torch.float64),
    )


def strided(rank: int, size: int) -> Any:
    results = []
    for strategy in STRIDED:
        model = nn.Module()
        conv, other = strided_values(rank, 0)
        model.conv = nn.Parameter(conv.to(memory_format=torch.channels_last))
        model.other = nn.Parameter(other.t().contiguous().t())
        parameters = list(model.parameters())
        strides = [p.stride() for p in parameters]
        assert not any(p.is_contiguous() for p in parameters)
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        sync = attach(model, optimizer, strategy)
        begin = everything(model)
        for p, g in zip(parameters, strided_values(rank, 1), strict=True):
            p.grad = torch.empty_like(p).copy_(g)
        optimizer.step()
        with sync.consensus():
            inside = everything(model)
        sync.finish()
        kept = [p.stride() for p in parameters] == strides
        kept = kept and [p.grad.stride() for p in parameters] == strides
        results.append((begin, inside, everything(model), kept))
    return results


def test_memory_format_and_strides_are_kept() -> None:
    """Pitfall 9: channels_last and transposed parameters keep strides and get the right values."""
    start, moves = strided_values(0, 0), [strided_values(rank, 1) for rank in range(2)]
    for results in run(strided, workers=2):
        for begin, inside, end, kept in results:
            assert kept
            for i in range(2):
                assert torch.equal(begin[i], start[i])
                want = start[i] - (moves[0][i] + moves[1][i]) / 2
                close(inside[i], want)
                close(end[i], want)


# -- the mean by itself ---------------------------------------------------------------------------


class Kinds(nn.Module):
    """Parameters of four dtypes, statistics, and integer and boolean buffers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.weight32 = nn.Parameter(numbers(40, 30).float())
        self.weight64 = nn.Parameter(numbers(1200))
        self.weight16 = nn.Parameter((100 * numbers(1200)).to(torch.bfloat16))
        self.waves = nn.Parameter(torch.complex(numbers(3), numbers(3)))
        self.register_buffer("statistic", numbers(5).float())
        self.register_buffer("count", torch.tensor([10 * rank, -rank, 2**40 + rank]))
        self.register_buffer("small", torch.tensor(7 - rank, dtype=torch.int8))
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 1]))


WEIGHTS = [0.5, 2.0, 0.0]


class Begun:
    """Workers who hold the same model, then each its own."""

    def __init__(self, rank: int, wire: Any, *, referenced: bool = True) -> None:
        self.recorded = Remembering(open_communicator(None, 20, what="a test"))
        team = Team(self.recorded)
        self.model = Kinds(0)
        self.replica = Replica(self.model, self.model.parameters())
        self.mean = ModelMean(team, self.replica, Wire(team, wire), referenced=referenced)
        assign_all(self.model, Kinds(rank))


class Remembering(Wrapper):
    """Knows which tensors were sent, without keeping them alive."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.sent: list[weakref.ref[Tensor]] = []

    def start(self, operation: Operation[Any]) -> Handle[Any]:
        self.sent.append(weakref.ref(operation.tensor))  # type: ignore[attr-defined]
        return super().start(operation)


def assign_all(model: nn.Module, other: nn.Module) -> None:
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(other.state_dict()[name])


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def expected(each: Sequence[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean in double precision; the largest integers; nothing of masks."""
    mean: dict[str, Tensor] = {}
    for name, first in each[0].items():
        parts = [one[name] for one in each]
        if first.is_floating_point() or first.is_complex():
            wide = torch.complex128 if first.is_complex() else torch.float64
            total = sum(w * part.to(wide) for w, part in zip(weights, parts, strict=True))
            mean[name] = total / sum(weights)  # type: ignore[assignment]
        elif first.dtype != torch.bool:
            mean[name] = torch.stack(parts).amax(0)
    return mean


ROUNDING = {torch.float32: 4e-7, torch.bfloat16: 2**-8, torch.float64: 1e-15}
STEPS = {"float32": 0.0, "bfloat16": 2**-8, "int8": 1 / 127}


def assert_is(got: dict[str, Tensor], mean: dict[str, Tensor], wire: str = "float32") -> None:
    """To one rounding of its dtype; over a lossy wire to that of the largest change."""
    for name, want in mean.items():
        value = got[name]
        if not value.is_floating_point() and not value.is_complex():
            assert torch.equal(value, want), name
            continue
        unit = ROUNDING[torch.float64 if value.is_complex() else value.dtype]
        bound = unit * (want.abs() + 1)
        if value.numel() >= 1200:  # smaller ones are sent as they are
            largest = max(
                (Kinds(r).state_dict()[name] - Kinds(0).state_dict()[name]).abs().max()
                for r in range(3)
            )
            # half a step for each worker that contributes, and half of one of their sum
            bound = bound + STEPS[wire] * 2 * float(largest)
        assert ((value - want).abs() <= bound).all(), (name, (value - want).abs().max())


def weighted(rank: int, size: int, wire: str) -> dict[str, Tensor]:
    begun = Begun(rank, wire)
    if WEIGHTS[rank] == 0:  # who has weight 0 cannot spoil anything
        with torch.no_grad():
            begun.model.weight32[3] = float("nan")
    begun.mean.average(WEIGHTS[rank], sum(WEIGHTS), what="a test")
    return copy_of(begun.model)


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_the_mean_is_weighted_and_every_dtype_comes_home(wire: str) -> None:
    """Σ w·x / Σ w in the dtype of each tensor, half types summed in float32; integers' maximum."""
    each = [Kinds(rank).state_dict() for rank in range(3)]
    mean = expected(each, WEIGHTS)
    results = run(weighted, wire, workers=3)
    for rank, result in enumerate(results):
        assert_is(result, mean, wire)
        assert torch.equal(result["mask"], each[rank]["mask"]), "masks stay everybody's own"
        for name in mean:
            assert torch.equal(bits(result[name]), bits(results[0][name])), name
    exact = torch.equal(results[0]["weight64"], mean["weight64"])
    assert exact or wire != "float32", "two terms, a sum and a division: the same in any order"
    assert not exact or wire == "float32", "the wire is lossy"


def contribute_only(rank: int, size: int, wire: str) -> Any:
    begun = Begun(rank, wire)
    before = copy_of(begun.model)
    begun.mean.average(1.0, 3.0, take=rank != 1, what="a test")
    first = copy_of(begun.model)
    begun.mean.average(1.0, 3.0, what="a test")
    return before, first, copy_of(begun.model), begun.mean.state_dict()


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_who_does_not_take_the_mean_keeps_every_bit_and_follows_the_references(wire: str) -> None:
    """take=False: the others' mean has this worker in it, and the next one is right again."""
    results = run(contribute_only, wire, workers=3)
    mean = expected([before for before, *_ in results], [1.0] * 3)
    for rank, (before, first, _, _) in enumerate(results):
        for name, value in before.items():
            assert rank != 1 or torch.equal(bits(first[name]), bits(value)), name
        if rank != 1:
            assert_is(first, mean, wire)
    again = expected([first for _, first, *_ in results], [1.0] * 3)
    for _, _, last, references in results:
        assert_is(last, again, wire)
        for name in again:
            assert torch.equal(bits(last[name]), bits(results[0][2][name])), name
        assert len(references) == (0 if wire == "float32" else 4)
        for ours, theirs in zip(references, results[0][3], strict=True):
            assert torch.equal(ours, theirs)


def unreferenced(rank: int, size: int) -> Any:
    begun = Begun(rank, "int8", referenced=False)
    before = copy_of(begun.model)
    error = error_of(lambda: begun.mean.average(1.0, size, what="mean of the model"))
    same = all(torch.equal(value, before[name]) for name, value in copy_of(begun.model).items())
    begun.mean.average(1.0, size, exact=True, what="a test")
    return error, same, copy_of(begun.model)


def test_a_lossy_mean_needs_references() -> None:
    """Without them it is a ValueError that says what to declare; an exact one needs none."""
    mean = expected([Kinds(rank).state_dict() for rank in range(2)], [1.0] * 2)
    for (kinds, text), same, end in run(unreferenced, workers=2):
        assert kinds[0] == "ValueError"
        assert text.startswith("mean of the model over wire='int8': this strategy declares")
        assert 'declare averages = "models"' in text
        assert same
        assert_is(end, mean)


def look(rank: int, size: int, wire: str) -> Any:
    begun = Begun(rank, wire)
    begun.mean.look(WEIGHTS[rank], sum(WEIGHTS), what="a test")
    kept = [flat for flat in (ref() for ref in begun.recorded.sent) if flat is not None]
    return copy_of(begun.model), len(begun.recorded.sent), [flat.shape for flat in kept]


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_a_look_is_exact_and_leaves_no_staging_memory(wire: str) -> None:
    """Whatever the wire; not one of the tensors that were sent is still there."""
    mean = expected([Kinds(rank).state_dict() for rank in range(3)], WEIGHTS)
    for state, sent, kept in run(look, wire, workers=3):
        assert_is(state, mean)
        assert sent == 4 + 1, "a bucket for each dtype, statistics among them, and the integers"
        assert kept == []


def buffers_only(rank: int, size: int) -> dict[str, Tensor]:
    begun = Begun(rank, "int8")
    begun.mean.average_buffers(1.0, size, what="a test")
    return copy_of(begun.model)


def test_a_mean_of_buffers_leaves_the_parameters() -> None:
    """Statistics take their mean, exactly, and counters their maximum; nothing else moves."""
    each = [Kinds(rank).state_dict() for rank in range(2)]
    mean = expected(each, [1.0] * 2)
    for rank, result in enumerate(run(buffers_only, workers=2)):
        buffers = {name: mean[name] for name in ("statistic", "count", "small")}
        assert_is(result, buffers)
        for name in result.keys() - buffers.keys():
            assert torch.equal(result[name], each[rank][name]), name
