"""The training loop stays as it is: what attach() does to it, over real workers."""

import contextlib
import copy
import io
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import offbeat
from offbeat.fabric import Accounting
from offbeat.strategies.base import Strategy
from problems import (
    OPTIMIZERS,
    Simulated,
    assign,
    bsp_reference,
    flat,
    gradients,
    loss_of,
    make_batch,
    make_model,
    train_step,
)
from workers import run

EVERY = [
    offbeat.BSP(),
    offbeat.LocalSGD(period=2),
    offbeat.SelSync(delta=0.05),
    offbeat.SelSync(delta=0.05, flags="deferred"),
    offbeat.SelSync(delta=0.05, aggregate="gradients"),
    offbeat.AsyncAveraging(staleness=4),
    offbeat.AsyncAveraging(staleness=4, schedule="eager"),
]


def close(a: Tensor, b: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def attach(model: nn.Module, optimizer: Any, strategy: Strategy, **options: Any) -> Any:
    return offbeat.attach(model, optimizer, strategy, **{"timeout_seconds": 20, **options})


def everything(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


# -- the start ------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Trainable, frozen and batch-norm tensors, all drawn from ``seed``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 3).double()
        self.frozen = nn.Linear(3, 3).double().requires_grad_(False)
        self.norm = nn.BatchNorm1d(3).double()
        self.register_buffer("mask", torch.rand(3) > 0.5)
        self.register_buffer("count", torch.tensor(100 + seed))
        self.register_buffer("empty", torch.empty(0))
        with torch.no_grad():
            self.norm.running_mean.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.frozen(self.first(x))).sum(1, keepdim=True)


def start(rank: int, size: int) -> Any:
    model = Mixed(seed=rank)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    sync = attach(model, optimizer, offbeat.LocalSGD(period=1))
    begin = everything(model)
    frozen = [p.detach().clone() for p in model.frozen.parameters()]
    train_step(model, optimizer, make_batch(rank, 0))
    sync.finish()
    same = [torch.equal(p, f) for p, f in zip(model.frozen.parameters(), frozen, strict=True)]
    return begin, same, sync.stats.payload_bytes


def test_everyone_starts_from_rank_0_and_frozen_parameters_stay() -> None:
    """Parameters, frozen ones and all buffers are copied from rank 0; frozen ones never move."""
    want = everything(Mixed(seed=0))
    for begin, same, payload in run(start, workers=3):
        for got, expected in zip(begin, want, strict=True):
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)
        assert same == [True, True]
        # one mean of first (15), norm (6), running mean and variance (6); 2 integers; 2 rolls
        assert payload == 8 * (15 + 6 + 6) + 8 * 2 + 2 * 8 * 7


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


# -- the loop -------------------------------------------------------------------------------------


def gan(seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"g": nn.Linear(4, 3).double(), "d": nn.Linear(3, 1).double()})


def gan_loss(model: nn.Module, which: str, batch: tuple[Tensor, Tensor]) -> Tensor:
    fake = model["g"](batch[0]).tanh()
    if which == "d":
        return F.mse_loss(model["d"](fake.detach()), batch[1])
    return model["d"](fake).square().mean()


def gan_optimizers(model: nn.Module) -> dict[str, Optimizer]:
    return {
        "g": torch.optim.SGD(model["g"].parameters(), lr=0.05, momentum=0.9),
        "d": torch.optim.AdamW(model["d"].parameters(), lr=0.01),
    }


def train_gan(rank: int, size: int, strategy: Strategy) -> Any:
    model = gan(seed=rank)
    optimizers = gan_optimizers(model)
    sync = attach(model, [optimizers["g"], optimizers["d"]], strategy)
    trace, counts = [], []
    for step in range(7):
        for which in ("d", "g"):  # the other way round than in attach()
            model.zero_grad()
            gan_loss(model, which, make_batch(rank, 10 * step + (which == "d"))).backward()
            optimizers[which].step()
            counts.append(sync.step)
        trace.append(flat(model))
    sync.finish()
    return trace, counts, sync.stats, flat(model)


@pytest.mark.parametrize("strategy", [offbeat.BSP(), offbeat.LocalSGD(period=3)], ids=str)
def test_optimizers_that_step_in_turn_are_one_iteration(strategy: Strategy) -> None:
    """Pitfall 5: GAN order; each part is averaged equally often, at the end of the iteration."""
    models = [gan(seed=0) for _ in range(3)]
    optimizers = [gan_optimizers(model) for model in models]
    expected = []
    for step in range(7):
        for which in ("d", "g"):
            for rank, model in enumerate(models):
                model.zero_grad()
                batch = make_batch(rank, 10 * step + (which == "d"))
                gan_loss(model, which, batch).backward()
            if isinstance(strategy, offbeat.BSP):
                for same in zip(*(m[which].parameters() for m in models), strict=True):
                    mean = sum(p.grad for p in same) / 3
                    for p in same:
                        p.grad = mean.clone()
            for each in optimizers:
                each[which].step()
        if not isinstance(strategy, offbeat.BSP) and step % 3 == 2:
            mean = sum(flat(m) for m in models) / 3
            for m in models:
                assign(m, mean.clone())
        expected.append([flat(m) for m in models])
    end = sum(expected[-1]) / 3
    for rank, (trace, counts, stats, final) in enumerate(run(train_gan, strategy, workers=3)):
        for got, want in zip(trace, expected, strict=True):
            close(got, want[rank])
        close(final, end)
        assert counts == [step + half for step in range(7) for half in (0, 1)]
        assert stats.steps == 7
        assert stats.syncs == (7 if isinstance(strategy, offbeat.BSP) else 2)


def addresses(rank: int, size: int) -> dict[str, bool]:
    kept = {}
    for strategy in EVERY:
        model = nn.Sequential(make_model(seed=rank), nn.BatchNorm1d(1).double())
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        tensors = [*model.parameters(), *model.buffers()]
        before = [t.data_ptr() for t in tensors]
        ok = True

        def check(
            model: nn.Module = model,
            tensors: list[Tensor] = tensors,
            before: list[int] = before,
        ) -> bool:
            now = [*model.parameters(), *model.buffers()]
            same = all(a is b for a, b in zip(now, tensors, strict=True))
            return same and [t.data_ptr() for t in now] == before

        sync = attach(model, optimizer, strategy)
        for step in range(6):
            train_step(model, optimizer, make_batch(rank, step))
            ok = ok and check()
        with sync.consensus():
            ok = ok and check()
        sync.finish()
        storages = {t.untyped_storage().nbytes() == t.nbytes for t in model.parameters()}
        kept[str(strategy)] = ok and check() and storages == {True}
    return kept


def test_parameters_stay_where_they_are() -> None:
    """Pitfall 9: no tensor is rebound or becomes a view of a larger one, under any strategy."""
    for kept in run(addresses, workers=2):
        assert kept == {str(strategy): True for strategy in EVERY}


def one_cycle(
    strategy: Strategy | None, rank: int, scheduler_first: bool
) -> tuple[list[float], list[str], Tensor]:
    model = make_model(seed=0)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    events: list[str] = []
    rates, sync, scheduler = [], None, None
    if scheduler_first:
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    optimizer.register_step_pre_hook(lambda *_: events.append("pre"))
    if strategy is not None:
        sync = attach(model, optimizer, strategy)
    optimizer.register_step_post_hook(lambda *_: events.append("post"))
    if scheduler is None:
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    for step in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        train_step(model, optimizer, make_batch(rank, step))
        scheduler.step()
    if sync is not None:
        sync.finish()
    return rates, events, flat(model)


def schedules(rank: int, size: int) -> Any:
    results = [
        one_cycle(strategy, rank, first) for strategy in EVERY[:3] for first in (True, False)
    ]
    return results, one_cycle(None, rank, True)


def test_schedulers_and_the_users_hooks_go_on_working() -> None:
    """Pitfall 4: OneCycleLR gives the rates of plain training, hooks fire once a step."""
    for results, (rates, events, end) in run(schedules, workers=2):
        assert len(set(rates)) == 8
        assert events == ["pre", "post"] * 8
        for got in results:
            assert got[0] == rates
            assert got[1] == events
            assert not torch.equal(got[2], end), "workers have different data"


def accumulate(rank: int, size: int) -> Any:
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    sync = attach(model, optimizer, offbeat.LocalSGD(period=2))
    for step in range(5):
        optimizer.zero_grad()
        x, y = make_batch(rank, step)
        for half in range(2):
            (loss_of(model, (x[half::2], y[half::2])) / 2).backward()
        optimizer.step()
    sync.finish()
    return flat(model), sync.step, sync.stats.syncs


def test_accumulation_counts_one_step() -> None:
    """Pitfall 6: the period counts optimizer steps, not micro-batches."""
    reference = Simulated.start(2, "momentum")
    for step in range(5):
        reference.step(step)
        if step % 2:
            reference.average()
    reference.average()
    for end, steps, syncs in run(accumulate, workers=2):
        close(end, reference.flat()[0])
        assert (steps, syncs) == (5, 2)


def closures(rank: int, size: int, keyword: bool) -> Any:
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    sync = attach(model, optimizer, offbeat.BSP())
    losses = []
    for step in range(4):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, make_batch(rank, step))
            loss.backward()
            return loss

        losses.append(optimizer.step(closure=closure) if keyword else optimizer.step(closure))
    sync.finish()
    return flat(model), [loss.item() for loss in losses], sync.step


@pytest.mark.parametrize("keyword", [False, True])
def test_closures_are_synchronized(keyword: bool) -> None:
    """Pitfall 4: gradients made by a closure are averaged too, and step() returns its loss."""
    trace = bsp_reference(2, "adamw", 4)
    for rank, (end, losses, steps) in enumerate(run(closures, keyword, workers=2)):
        close(end, trace[-1])
        assert steps == 4
        model = make_model(seed=0)
        for step, loss in enumerate(losses):
            assert abs(loss - loss_of(model, make_batch(rank, step)).item()) < 1e-12
            assign(model, trace[step].clone())


# -- what is averaged -----------------------------------------------------------------------------


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


# -- consensus, finish, detach --------------------------------------------------------------------

APART = [
    offbeat.LocalSGD(period=100),
    offbeat.SelSync(delta=float("inf")),
    offbeat.SelSync(delta=float("inf"), flags="deferred"),
    offbeat.AsyncAveraging(staleness=100),
]
COUNTS = [2, 5, 3]


def look(rank: int, size: int) -> Any:
    results = []
    for strategy in APART:
        model = nn.Sequential(make_model(seed=rank), nn.BatchNorm1d(1).double())
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        sync = attach(model, optimizer, strategy)
        plain = copy.deepcopy(model)
        other = OPTIMIZERS["adamw"](plain.parameters())
        for step in range(COUNTS[rank]):
            train_step(model, optimizer, make_batch(rank, step))
        own = everything(model)
        before = copy.deepcopy(sync.stats)
        with sync.consensus():
            inside = everything(model)
        exact = all(map(torch.equal, everything(model), own))
        with contextlib.suppress(KeyError), sync.consensus():
            with torch.no_grad():
                model[0][0].weight.zero_()  # whatever happens inside is undone
            raise KeyError
        exact = exact and all(map(torch.equal, everything(model), own))
        counted = sync.stats == before
        for step in range(COUNTS[rank], COUNTS[rank] + 2):
            train_step(model, optimizer, make_batch(rank, step))
        after = everything(model)
        sync.finish()
        for step in range(COUNTS[rank] + 2):
            train_step(plain, other, make_batch(rank, step))
        unseen = all(map(torch.equal, after, everything(plain)))
        results.append((own, inside, (exact, counted, unseen), after, everything(model)))
    return results


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    return sum(tensors) / len(tensors) if tensors[0].is_floating_point() else max(tensors)


def test_consensus_shows_the_mean_and_leaves_no_trace() -> None:
    """Inside: the mean at uneven step counts. Outside: own bits and numbers, training goes on."""
    results = run(look, workers=3)
    for index in range(len(APART)):
        each = [result[index] for result in results]
        own = list(zip(*(one[0] for one in each), strict=True))
        last = list(zip(*(one[3] for one in each), strict=True))
        for _, inside, (exact, counted, unseen), _, end in each:
            for got, parts in zip(inside, own, strict=True):
                close(got, mean_of(parts))
            assert exact
            assert counted, "looking is not training"
            assert unseen, "training goes on as if nobody had looked"
            for got, parts in zip(end, last, strict=True):
                close(got, mean_of(parts))


def uneven(rank: int, size: int) -> Any:
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    sync = attach(model, optimizer, offbeat.LocalSGD(period=2))
    for step in range([2, 6][rank]):
        train_step(model, optimizer, make_batch(rank, step))
    sync.finish()
    end = flat(model)
    stats = copy.deepcopy(sync.stats)
    if rank == 0:
        sync.finish()  # a second time, on one worker alone
    train_step(model, optimizer, make_batch(rank, 9))
    return end, flat(model), sync.step, sync.stats == stats


def test_a_worker_that_ends_early_has_weight_0_and_gets_the_result() -> None:
    """Uneven step counts end without a hang in one model; finish() again does nothing."""
    reference = Simulated.start(2, "momentum")
    for step in range(2):
        reference.step(step)
    reference.average()
    for step in range(2, 6):
        train_step(reference.models[1], reference.optimizers[1], make_batch(1, step))
    results = run(uneven, workers=2)
    for rank, (end, plain, steps, unchanged) in enumerate(results):
        close(end, flat(reference.models[1]))
        assert torch.equal(end, results[0][0])
        assert steps == [2, 6][rank]
        assert unchanged
        assert not torch.equal(plain, end), "the optimizer goes on as an ordinary one"


def leave(rank: int, size: int) -> Any:
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with attach(model, optimizer, offbeat.LocalSGD(period=100)) as sync:
        for step in range(3):
            train_step(model, optimizer, make_batch(rank, step))
    return flat(model), sync.step


def test_a_clean_exit_finishes() -> None:
    """The with block ends in the mean of all workers."""
    reference = Simulated.start(2, "momentum")
    for step in range(3):
        reference.step(step)
    reference.average()
    for end, steps in run(leave, workers=2):
        close(end, reference.flat()[0])
        assert steps == 3


def meet(folder: str, rank: int, size: int) -> None:
    """Wait until all ranks are here; not through Offbeat and not through the group."""
    store = dist.FileStore(f"{folder}/meeting", -1)
    store.set(str(rank), "here")
    store.wait([str(other) for other in range(size)], timedelta(seconds=40))


def raise_on_one(rank: int, size: int, strategy: Strategy, folder: str) -> Any:
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    operations: list[str] = []
    for name in ("sum", "maximum", "broadcast", "gather", "send", "receive"):
        original = getattr(Accounting, name)

        def counted(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            operations.append(kwargs["what"])
            return _original(*args, **kwargs)

        setattr(Accounting, name, counted)
    error, moment, own = "", 0.0, flat(model)
    try:
        with attach(model, optimizer, strategy, timeout_seconds=2):
            for step in range(40):
                train_step(model, optimizer, make_batch(rank, step))
                if rank == 1 and step == 2:
                    own = flat(model)
                    operations.clear()
                    moment = time.perf_counter()
                    raise ZeroDivisionError("of the user's own")
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    seconds = time.perf_counter() - moment
    meet(folder, rank, size)
    return error, seconds, operations, torch.equal(flat(model), own)


@pytest.mark.parametrize("strategy", [EVERY[0], EVERY[5]], ids=str)
def test_an_exception_on_one_rank_detaches_without_a_collective(
    strategy: Strategy, tmp_path: Path
) -> None:
    """Pitfall 13: its own exception leaves at once; the other gets an error with the rank."""
    results = run(raise_on_one, strategy, str(tmp_path), workers=2)
    error, seconds, operations, untouched = results[1]
    assert error == "ZeroDivisionError: of the user's own"
    assert operations == []
    assert seconds < 1
    assert untouched, "the model stays as it was when the exception was raised"
    assert results[0][0].startswith("Communication"), results[0][0]
    assert "rank 1" in results[0][0]


def detach_and_again(rank: int, size: int) -> Any:
    results = {}
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for strategy in EVERY:
        model = make_model(seed=rank)
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        first = attach(model, optimizer, strategy, scaler=scaler)
        train_step(model, optimizer, make_batch(rank, 0))
        first.detach()
        first.detach()
        plain = copy.deepcopy(model)
        other = OPTIMIZERS["momentum"](plain.parameters())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in range(1, 1 + 3 * (rank + 1)):  # uneven: whoever still averaged would hang
            train_step(model, optimizer, make_batch(rank, step))
            train_step(plain, other, make_batch(rank, step))
        alone = torch.equal(flat(model), flat(plain)) and first.step == 1
        second = attach(model, optimizer, offbeat.LocalSGD(period=1), scaler=scaler)
        train_step(model, optimizer, make_batch(rank, 9))
        second.finish()
        unwatched = not {"step", "unscale_"} & vars(scaler).keys()
        results[str(strategy)] = (alone, unwatched, second.step, flat(model))
    return results


def test_detach_removes_all_hooks_and_attach_works_again() -> None:
    """After detach() training is plain, bit for bit, and the next synchronizer starts afresh."""
    results = run(detach_and_again, workers=2)
    assert results[0].keys() == {str(strategy) for strategy in EVERY}
    for name, (alone, unwatched, steps, end) in results[0].items():
        for other in results:
            assert other[name][:3] == (True, True, 1)
        assert (alone, unwatched, steps) == (True, True, 1)
        assert torch.equal(end, results[1][name][3])


# -- clipping and mixed precision -----------------------------------------------------------------


def clip(rank: int, size: int) -> Any:
    results = []
    for strategy in EVERY:
        for dtype in (torch.float32, torch.float64):
            model = make_model(seed=rank, dtype=dtype)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sync = attach(model, optimizer, strategy)
            for max_norm in (1e-3, 1e3, 1e-3):
                optimizer.zero_grad()
                loss_of(model, make_batch(rank, 0, dtype=dtype)).backward()
                batches = [make_batch(r, 0, dtype=dtype) for r in range(size)]
                averaging = strategy == EVERY[0]
                seen = batches if averaging else batches[rank : rank + 1]
                each = [gradients(model, batch) for batch in seen]
                if "gradients" in str(strategy):
                    each = [[p.grad.clone() for p in model.parameters()]]
                twin = copy.deepcopy(model)
                for p, *parts in zip(twin.parameters(), *each, strict=True):
                    p.grad = sum(parts) / len(parts)
                want = nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
                got = sync.clip_grad_norm_(max_norm)
                now = [p.grad.clone() for p in model.parameters()]
                optimizer.step()
                if "gradients" not in str(strategy):  # there the others' gradients come in too
                    results.append((want, got, [p.grad for p in twin.parameters()], now))
            sync.finish()
    return results


def test_clip_grad_norm_is_torchs() -> None:
    """The same norm, dtype and clipped gradients as torch's, of the mean gradient under BSP."""
    for results in run(clip, workers=2):
        assert len(results) == 6 * 2 * 3
        for want, got, clipped, now in results:
            assert got.shape == ()
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want)
            for a, b in zip(now, clipped, strict=True):
                torch.testing.assert_close(a, b)


SCALED = [
    offbeat.BSP(),
    offbeat.LocalSGD(period=2),
    offbeat.SelSync(delta=0.0),
    offbeat.SelSync(delta=0.0, aggregate="gradients"),
]
OVERFLOWS = {(1, 2), (1, 3), (0, 5)}  # (rank, step); BSP skips these on all ranks


def scaled(rank: int, size: int, unscale: bool) -> Any:
    results = []
    for strategy in SCALED:
        model = make_model(seed=rank, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        sync = attach(model, optimizer, strategy, scaler=scaler)
        trace, counts = [], []
        for step in range(8):
            optimizer.zero_grad()
            batch = make_batch(rank, step, dtype=torch.float32)
            scaler.scale(loss_of(model, batch)).backward()
            if (rank, step) in OVERFLOWS:
                model[0].weight.grad[0, 0] = float("inf")
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            trace.append(flat(model))
            counts.append(sync.step)
        scale = scaler.get_scale()
        sync.finish()
        results.append((trace, counts, sync.stats.syncs, scale))
    return results


@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_on_one_rank_keeps_iterations_aligned(unscale: bool) -> None:
    """Pitfall 3: a skipped step counts as an iteration, so ranks average the same ones."""
    results = run(scaled, unscale, workers=2)
    for index, strategy in enumerate(SCALED):
        models = [make_model(seed=0, dtype=torch.float32) for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
        by_gradient = "gradients" in str(strategy)
        for step in range(8):
            bad = [(rank, step) in OVERFLOWS for rank in range(2)]
            each = []
            for rank, model in enumerate(models):
                each.append(gradients(model, make_batch(rank, step, dtype=torch.float32)))
            good = [g for g, overflow in zip(each, bad, strict=True) if not overflow]
            for rank, model in enumerate(models):
                used = good if by_gradient else each if index == 0 else [each[rank]]
                if bad[rank] or (index == 0 and any(bad)):
                    continue
                for p, *parts in zip(model.parameters(), *used, strict=True):
                    p.grad = sum(parts) / len(parts)
                optimizers[rank].step()
            if not by_gradient and (index == 2 or (index == 1 and step % 2)):
                mean = sum(flat(m) for m in models) / 2
                for m in models:
                    assign(m, mean.clone())
            for rank, model in enumerate(models):
                close(results[rank][index][0][step], flat(model), atol=2e-6)
        for rank in range(2):
            _, counts, syncs, scale = results[rank][index]
            assert counts == list(range(1, 9))
            assert syncs == (4 if index == 1 else 8)
            skipped = 3 if index == 0 else sum(r == rank for r, _ in OVERFLOWS)
            assert scale == 256.0 / 2**skipped


def warm_up(rank: int, size: int) -> Any:
    results = []
    for strategy in [*EVERY, offbeat.AsyncAveraging(staleness=2, outer_lr=0.7, outer_momentum=0.9)]:
        model = make_model(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sync = attach(model, optimizer, strategy)
        for step in range(8):
            if step == 4:
                held = flat(model)
                optimizer.param_groups[0]["lr"] = 0.05
            train_step(model, optimizer, make_batch(rank, step))
        sync.finish()
        results.append((held, flat(model)))
    return results


def test_a_learning_rate_of_0_works() -> None:
    """Pitfall 11: warm-up from 0 keeps rank 0's model, exactly, and training then starts."""
    start = flat(make_model(seed=0))
    results = run(warm_up, workers=2)
    for result in results:
        for (held, end), (_, same) in zip(result, results[0], strict=True):
            assert torch.equal(held, start)
            assert end.isfinite().all()
            assert (end - start).abs().max() > 1e-3
            assert torch.equal(end, same)


# -- checkpoints, one worker ----------------------------------------------------------------------

RESUMED = [
    offbeat.BSP(),
    offbeat.LocalSGD(period=3, warmup_steps=2),
    offbeat.SelSync(delta=0.02),
    offbeat.SelSync(delta=0.02, window=4, smoothing=0.3),
    offbeat.SelSync(target_lssr=0.5),
    offbeat.SelSync(delta=0.02, flags="deferred", max_interval=3),
    offbeat.SelSync(delta=0.02, aggregate="gradients"),
    offbeat.AsyncAveraging(staleness=4),
    offbeat.AsyncAveraging(staleness=8),
    offbeat.AsyncAveraging(staleness=4, outer_lr=0.7, outer_momentum=0.9),
]


def train_from(
    strategy: Strategy, rank: int, saved: bytes | None, save_at: int | None
) -> tuple[list[Tensor], dict[str, Any], bytes]:
    model = nn.Sequential(make_model(seed=rank), nn.BatchNorm1d(1).double())
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    sync = attach(model, optimizer, strategy)
    if saved is not None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sync.load_state_dict(state["sync"])
    trace = []
    while sync.step < 14:
        if sync.step == save_at:
            file = io.BytesIO()
            states = (model.state_dict(), optimizer.state_dict(), sync.state_dict())
            torch.save(dict(zip(("model", "optimizer", "sync"), states, strict=True)), file)
            saved = file.getvalue()
        train_step(model, optimizer, make_batch(rank, sync.step))
        trace.append(torch.cat([t.reshape(-1).double() for t in everything(model)]))
    stats = sync.stats
    sync.finish()
    trace.append(torch.cat([t.reshape(-1).double() for t in everything(model)]))
    numbers = {"steps": stats.steps, "syncs": stats.syncs, "flags": stats.flags}
    return trace, {**numbers, "bytes": stats.payload_bytes}, saved or b""


def resume(rank: int, size: int) -> Any:
    seen = []
    for strategy in RESUMED:
        for at in (5, 6):
            whole, numbers, _ = train_from(strategy, rank, None, None)
            watched, same, saved = train_from(strategy, rank, None, at)
            resumed, again, _ = train_from(strategy, rank, saved, None)
            seen.append((str(strategy), at, whole, watched, resumed, numbers, same, again))
    return seen


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    """Pitfalls 20 and 24: saving changes nothing, and a new process continues the same run."""
    for seen in run(resume, workers=2):
        for name, at, whole, watched, resumed, numbers, same, again in seen:
            for i, (a, b) in enumerate(zip(watched, whole, strict=True)):
                assert torch.equal(a, b), (name, at, "saving changed step", i)
            for i, (a, b) in enumerate(zip(resumed, whole[at:], strict=True)):
                assert torch.equal(a, b), (name, at, "resuming changed step", at + i)
            assert numbers == same, (name, at)
            assert numbers == again, (name, at)


def test_state_of_another_strategy_is_refused() -> None:
    """A checkpoint continues under the strategy that made it."""
    texts = run(load_wrong, workers=1)
    assert texts == ["the state was saved under LocalSGD(period=2), this is LocalSGD(period=3)"]


def load_wrong(rank: int, size: int) -> str:
    model = make_model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with attach(model, optimizer, offbeat.LocalSGD(period=2)) as sync:
        state = sync.state_dict()
    with attach(model, optimizer, offbeat.LocalSGD(period=3)) as sync:
        try:
            sync.load_state_dict(state)
        except ValueError as error:
            return str(error)
    return ""


def alone(rank: int, size: int) -> Any:
    results = {}
    for strategy in [*EVERY, offbeat.SelSync(target_lssr=0.5), offbeat.AsyncAveraging(staleness=2)]:
        for kind in ("momentum", "adamw", "fused"):
            model, plain = make_model(seed=5), make_model(seed=5)
            optimizer = OPTIMIZERS[kind](model.parameters())
            other = OPTIMIZERS[kind](plain.parameters())
            sync = attach(model, optimizer, strategy)
            same = True
            for step in range(9):
                train_step(model, optimizer, make_batch(0, step))
                train_step(plain, other, make_batch(0, step))
                same = same and torch.equal(flat(model), flat(plain))
                with sync.consensus():
                    same = same and torch.equal(flat(model), flat(plain))
            sync.finish()
            same = same and torch.equal(flat(model), flat(plain))
            results[f"{strategy} {kind}"] = same
    return results


def test_a_single_worker_trains_as_without_offbeat() -> None:
    """Group size 1: every strategy equals plain training, bit for bit."""
    (results,) = run(alone, workers=1)
    assert len(results) == 9 * 3
    assert all(results.values()), results
