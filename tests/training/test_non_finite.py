"""A worker whose numbers are not finite: it is named, and stops the run or is left out if wanted.

The worker at fault reads one batch with a NaN in it, so its whole gradient is NaN.
"""

import itertools
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import offbeat
import workers
from cells import nightly
from loops import attach, close, error_of
from offbeat.significance import squared_norm
from offbeat.strategies.roll import Ballot
from problems import (
    OPTIMIZERS,
    Batch,
    Simulated,
    flat,
    gradients,
    make_batch,
    make_model,
    make_wide,
    train_step,
)
from worlds import run, simulated

BAD_RANK, BAD_STEP = 1, 2  # the third step


def batch_of(rank: int, step: int, bad: Sequence[int] = (BAD_RANK,)) -> Batch:
    x, y = make_batch(rank, step)
    if step == BAD_STEP and rank in bad:
        x[0, 0] = math.nan
    return x, y


def train(
    rank: int, size: int, text: str, kind: str, steps: int, bad: tuple[int, ...], options: dict
) -> tuple[list[Tensor], Tensor, str, dict[str, Any]]:
    """The model after each step and after finish, the error, and the totals."""
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS[kind](model.parameters())
    sync = attach(model, optimizer, text, **options)
    trace: list[Tensor] = []

    def loop() -> None:
        for step in range(steps):
            train_step(model, optimizer, batch_of(rank, step, bad))
            trace.append(flat(model))
        sync.finish()

    kinds, text = error_of(loop)
    sync.detach()
    assert kinds[:1] in ([], ["OffbeatError"]), text
    return trace, flat(model), text, sync.stats.details


LEAVE_OUT: dict[str, Any] = {"non_finite": "exclude"}


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
def test_bsp_goes_on_without_it(kind: str) -> None:
    """g ← the mean of the others, on all workers: also on the one that is left out."""
    model = make_model(0)
    optimizer = OPTIMIZERS[kind](model.parameters())
    want = []
    for step in range(6):
        ranks = [r for r in range(3) if (r, step) != (BAD_RANK, BAD_STEP)]
        each = [gradients(model, make_batch(rank, step)) for rank in ranks]
        for p, *parts in zip(model.parameters(), *each, strict=True):
            p.grad = sum(parts) / len(ranks)  # type: ignore[assignment]
        optimizer.step()
        want.append(flat(model))
    for rank, (trace, final, error, details) in enumerate(
        run(train, "bsp", kind, 6, (BAD_RANK,), LEAVE_OUT, workers=3)
    ):
        assert error == "nothing was raised"
        for got, expected in zip(trace, want, strict=True):
            close(got, expected)
        close(final, want[-1])
        assert details.get("not_finite", 0) == (rank == BAD_RANK)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize(
    ("text", "period"),
    [
        ("local:period=3", 3),
        ("local:period=1", 1),
        ("selsync:delta=0", 1),
        ("fedavg:period=3", 3),
        ("diloco:period=3,outer_lr=1,outer_momentum=0", 3),
    ],
)
def test_means_of_models_go_on_without_it(text: str, period: int, kind: str) -> None:
    """x ← the mean of the others on all workers, and its optimizer begins anew."""
    reference = Simulated.start(3, kind)
    for step in range(9):
        reference.step(step)
        if step == BAD_STEP:  # what a batch with a NaN has left behind
            reference.optimizers[BAD_RANK].state.clear()
        if (step + 1) % period == 0:
            reference.average([1.0, float(step != BAD_STEP), 1.0])
    for trace, final, error, _ in run(train, text, kind, 9, (BAD_RANK,), LEAVE_OUT, workers=3):
        assert error == "nothing was raised"
        close(trace[-1], reference.flat()[0])
        close(final, reference.flat()[0])


def train_alike(rank: int, size: int, text: str, bad: tuple[int, ...]) -> Any:
    """All workers read the same batches, so every mean is the same, whoever is left out of it."""
    model = nn.Sequential(make_model(seed=0), nn.BatchNorm1d(1).double())
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    sync = attach(model, optimizer, text, **LEAVE_OUT)
    trace, buffers = [], []
    for step in range(14):
        x, y = make_batch(0, step)
        if step == BAD_STEP and rank in bad:
            x = x * math.nan
        train_step(model, optimizer, (x, y))
        trace.append(flat(model))
        buffers.append(torch.cat([model[1].running_mean, model[1].running_var]))
    sync.finish()
    return torch.stack(trace), torch.stack(buffers), flat(model), sync.stats.details


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("text", "same", "back"),
    [
        ("fedavg:period=3", 5, 3),
        ("diloco:period=3", 5, 3),
        ("diloco:period=3,fragments=3", 3, 3),
        ("diloco:period=4,fragments=2,overlap=1", 6, 4),
        ("async:staleness=4", 7, 4),
        ("async:staleness=4,outer_momentum=0.5,outer_lr=0.7", 7, 4),
        ("async:staleness=4,schedule=eager", 0, 9),
        ("streaming:parts=2,schedule=cyclic,staleness=4", 5, 3),
        ("streaming:parts=3,staleness=6,outer_gain=1", 0, 9),
        ("streaming:parts=1,staleness=6", 0, 9),
    ],
)
def test_who_is_left_out_changes_no_mean(text: str, same: int, back: int) -> None:
    """The others' models are those of a run without it for ``same`` steps, a landing included.

    The one that is left out has a model again after ``back`` steps. Later its updates count again.
    """
    want = simulated(train_alike, text, (), workers=3)
    got = simulated(train_alike, text, (BAD_RANK,), workers=3)
    for rank, (trace, buffers, final, details) in enumerate(got):
        if rank != BAD_RANK:
            close(trace[:same], want[rank][0][:same])
            assert trace.isfinite().all()
            assert buffers.isfinite().all()
        assert trace[back - 1 :].isfinite().all()
        assert buffers[-1].isfinite().all()
        assert torch.equal(final, got[0][2])
        assert final.isfinite().all()
        assert (details.get("not_finite", 0) > 0) == (rank == BAD_RANK)


def fail_last(rank: int, size: int, text: str) -> Tensor:
    """The last step before ``finish`` has the NaN in it."""
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    sync = attach(model, optimizer, text, **LEAVE_OUT)
    for step in range(BAD_STEP + 1):
        train_step(model, optimizer, batch_of(rank, step))
    sync.finish()
    return flat(model)


@pytest.mark.parametrize("text", ["fedavg:period=100", "fedavg:period=100,fraction=0.34"])
def test_the_final_mean_goes_on_without_it(text: str) -> None:
    """Also where not all models count in a round, and the others were not drawn."""
    reference = Simulated.start(3, "sgd")
    for step in range(BAD_STEP + 1):
        reference.step(step)
    reference.average([1.0, 0.0, 1.0])
    for model in simulated(fail_last, text, workers=3):
        close(model, reference.flat()[0])


@pytest.mark.parametrize(
    "text",
    [
        "diloco:period=2",
        "diloco:period=4,fragments=2,overlap=2",
        "async:staleness=2",
        "async:staleness=8",
        "async:schedule=eager",
        "streaming:parts=2,schedule=cyclic,staleness=4",
        "streaming:parts=2",
    ],
)
def test_the_final_mean_is_finite(text: str) -> None:
    """A worker that can go on from the common model does so before it is averaged."""
    first, *others = simulated(fail_last, text, workers=3)
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)


def test_a_round_of_nobody_changes_nothing() -> None:
    """FedAvg with one worker drawn at a time, which is the one: the others go on."""
    bad = next(rank for rank in range(3) if draws_of(rank, range(BAD_STEP + 1, BAD_STEP + 2)))
    for rank, (trace, final, error, details) in enumerate(
        run(
            *(train, "fedavg:period=1,fraction=0.34,unselected=restart", "momentum", 8),
            *((bad,), LEAVE_OUT),
            workers=3,
        )
    ):
        assert error == "nothing was raised"
        assert final.isfinite().all()
        assert trace[-1].isfinite().all()
        assert trace[BAD_STEP].isfinite().all() == (rank != bad)
        assert (details.get("not_finite", 0) > 0) == (rank == bad)


def test_a_model_that_has_become_nan_between_two_rounds_is_left_out() -> None:
    """The last gradient before a round may be finite again: the model is looked at, too."""
    reference = Simulated.start(3, "sgd")
    for step in range(4):
        reference.step(step)
    reference.average([1.0, 0.0, 1.0])

    def ruined(rank: int, size: int) -> Tensor:
        model = make_model(seed=rank)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        sync = attach(model, optimizer, "local:period=4", **LEAVE_OUT)
        for step in range(4):
            if rank == BAD_RANK and step == 3:
                with torch.no_grad():
                    model[3].bias.fill_(math.nan)
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            else:
                train_step(model, optimizer, make_batch(rank, step))
        sync.finish()
        return flat(model)

    for model in simulated(ruined, workers=3):
        close(model, reference.flat()[0])


def wide(rank: int, size: int, options: dict) -> list[Tensor]:
    """Buckets that leave during backward, when the NaN in them is not known yet."""
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 150_000), nn.Tanh(), nn.Linear(150_000, 1)).double()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with attach(model, optimizer, "bsp", **options) as sync:
        assert len(sync._worker.optimizers[0].buckets) > 1
        trace = []
        for step in range(4):
            train_step(model, optimizer, batch_of(rank, step))
            trace.append(flat(model)[::997])
    return trace


def test_buckets_that_have_left_already_are_sent_again() -> None:
    """Without the NaN: the step is that of the others' gradients."""
    first, *others = simulated(wide, LEAVE_OUT, workers=3)
    assert all(one.isfinite().all() for one in first)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    alone = simulated(wide_of_two, workers=2)[0]
    close(first[BAD_STEP] - first[BAD_STEP - 1], alone)


def wide_of_two(rank: int, size: int) -> Tensor:
    """The third step alone, of ranks 0 and 2, from where the three have come."""
    rank = 2 * rank
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 150_000), nn.Tanh(), nn.Linear(150_000, 1)).double()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for step in range(BAD_STEP):
        each = [gradients(model, make_batch(one, step)) for one in range(3)]
        for p, *parts in zip(model.parameters(), *each, strict=True):
            p.grad = sum(parts) / 3  # type: ignore[assignment]
        optimizer.step()
    before = flat(model)[::997]
    with attach(model, optimizer, "bsp"):
        train_step(model, optimizer, make_batch(rank, BAD_STEP))
    return flat(model)[::997] - before


def lossy(rank: int, size: int, text: str, wire: str) -> Tensor:
    model = make_wide(seed=rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    with attach(model, optimizer, text, wire=wire, **LEAVE_OUT):
        for step in range(6):
            x, y = batch_of(rank, step)
            optimizer.zero_grad()
            (model(x.float()) - y.float()).square().mean().backward()
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize("text", ["bsp", "local:period=3"])
def test_a_lossy_wire_goes_on_without_it(text: str) -> None:
    """All hold the same bits, about those of an exact wire: no error of rounding is NaN."""
    exact = simulated(lossy, text, "float32", workers=3)[0]
    start = flat(make_wide(seed=0))
    first, *others = simulated(lossy, text, "int8", workers=3)
    assert all(torch.equal(first, other) for other in others)
    assert float((first - exact).norm()) < 0.02 * float((exact - start).norm())


def test_nobody_is_left() -> None:
    """All workers raise when none has anything finite to contribute."""
    for text in ("bsp", "local:period=1"):
        for trace, _, error, _ in run(train, text, "sgd", 4, (0, 1, 2), LEAVE_OUT, workers=3):
            assert error == (
                "3 workers would contribute NaN or infinity to the mean at step 3, and nobody else "
                'anything (non_finite="exclude")'
            )
            assert len(trace) == 2


AVERAGING = [
    "bsp",
    "local:period=3",
    "local:period=1",
    "fedavg:period=3",
    "selsync:delta=0",
    "diloco:period=3",
    "diloco:period=4,fragments=2,overlap=1",
    "async:staleness=4",
    "async:staleness=2,schedule=eager",
    "streaming:parts=2",
    "streaming:parts=2,schedule=cyclic,staleness=2",
]


@pytest.mark.parametrize("text", AVERAGING)
def test_raise_stops_all_workers_before_the_mean(text: str) -> None:
    """The others' models have not taken it in; the message names rank and step."""
    results = simulated(train, text, "momentum", 12, (BAD_RANK,), RAISE, workers=3)
    for rank, (_, model, error, details) in enumerate(results):
        assert error.startswith(f"rank {BAD_RANK} would contribute NaN or infinity to the mean at ")
        step = int(error.partition("at step ")[2].partition(";")[0])
        assert BAD_STEP + 1 <= step <= BAD_STEP + 5
        assert model.isfinite().all() or rank == BAD_RANK
        assert details.get("not_finite", 0) >= (rank == BAD_RANK)


RAISE = {"non_finite": "raise"}


@pytest.mark.sampled
@pytest.mark.parametrize("text", AVERAGING)
def test_by_default_it_is_told_once(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each worker logs rank and step, once; the mean is what it is."""
    results = simulated(train, text, "sgd", 12, (BAD_RANK,), {}, workers=3)
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    told = [one for one in told if "SelSync asks" not in one]
    begins = [f"rank {rank}: rank {BAD_RANK} would contribute NaN" for rank in range(3)]
    assert sorted(one[: len(begins[0])] for one in told) == begins
    others = {one.partition("prevents")[0].partition("to all workers")[2] for one in told}
    offered = "exclude" in offbeat.parse_strategy(text).non_finite
    want = '"raise" or "exclude"' if offered else '"raise"'
    assert others == {f"; attach(..., non_finite={want}) "}
    assert all(error == "nothing was raised" for _, _, error, _ in results)
    assert not any(model.isfinite().all() for _, model, _, _ in results)


def one_at_a_time(rank: int, size: int) -> int:
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    sync = attach(model, optimizer, "fedavg:period=1,fraction=0.34")
    for step in range(4):
        train_step(model, optimizer, batch_of(rank, step, bad=(0, 1, 2)))
    sync.detach()
    return int(sync.stats.details.get("not_finite", 0))


def test_who_is_not_drawn_contributes_nothing() -> None:
    """FedAvg averages others then, and there is nothing to tell."""
    counts = simulated(one_at_a_time, workers=3)
    assert counts == [draws_after(rank) for rank in range(3)]
    assert sum(counts) == 2


def draws_after(rank: int) -> int:
    """How often FedAvg draws ``rank`` of 3, one at a time, from the step with the NaN on."""
    return len(draws_of(rank, range(BAD_STEP + 1, 5)))


def draws_of(rank: int, rounds: range) -> list[int]:
    """In which of the rounds FedAvg draws ``rank`` of 3, one at a time."""
    purpose = int.from_bytes(b"fedavg", "big")
    draws = {r: np.random.default_rng([0, purpose, r]).permutation(3)[0] for r in rounds}
    return [r for r, drawn in draws.items() if drawn == rank]


def test_what_a_strategy_cannot_do_is_refused() -> None:
    """An option is honoured or refused."""
    model = make_model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(ValueError, match='non_finite must be "warn", "raise" or "exclude"'):
        attach(model, optimizer, "bsp", non_finite="ignore")
    for text in SERVERS:
        can = 'it can "warn" or "raise": a server takes in push after push'
        with pytest.raises(ValueError, match=f'="exclude" with {text}.*: {can}'):
            attach(model, optimizer, text, non_finite="exclude")
    with pytest.raises(ValueError, match=r"non_finite=\"raise\" with .*: it can \"warn\""):
        attach(model, optimizer, "selsync:aggregate=gradients", non_finite="raise")


SERVERS = ["ssp:staleness=1", "easgd:period=2", "downpour"]


def push(rank: int, size: int, text: str, wire: str, non_finite: str) -> Any:
    model = make_wide(seed=rank)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    sync = attach(model, optimizer, text, wire=wire, non_finite=non_finite)

    def loop() -> None:
        for step in range(8):
            x, y = batch_of(rank, step)
            optimizer.zero_grad()
            (model(x.float()) - y.float()).square().mean().backward()
            optimizer.step()
        sync.finish()

    kinds, text = error_of(loop)
    sync.detach()
    return kinds, text, sync.step, bool(flat(model).isfinite().all())


@pytest.mark.parametrize("wire", ["int8", *nightly(["float32"])])
@pytest.mark.parametrize("text", [SERVERS[0], *nightly(SERVERS[1:])])
def test_nothing_is_pushed_that_is_not_finite(text: str, wire: str) -> None:
    """The worker itself says so; the others' models have not taken it in when they learn of it."""
    results = workers.run(push, text, wire, "raise", workers=3)
    for rank, (kinds, message, step, finite) in enumerate(results):
        if rank == BAD_RANK:
            assert kinds[0] == "OffbeatError"
            found = f"rank {rank} would push NaN or infinity to the parameter server at step "
            assert message.startswith(found)
            told = int(message.removeprefix(found).split(";")[0])
            assert told in (step, step + 1), "after the last step, or in one"
            assert step >= BAD_STEP
        else:
            assert kinds[0] == "CommunicationError"
            assert f"lost the connection to rank {BAD_RANK}, which gave up" in message
            assert finite


@pytest.mark.parametrize("text", SERVERS)
def test_a_push_that_is_not_finite_is_told_once(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    results = simulated(push, text, "float32", "warn", workers=3)
    told = [r.getMessage() for r in caplog.records if "would push" in r.getMessage()]
    assert len(told) <= 3
    ranks = [int(one.split()[1]) for one in told]
    assert ranks[0] == BAD_RANK
    assert len({*ranks}) == len(ranks), "the others when it has come back to them, once each"
    assert [kinds for kinds, *_ in results] == [[]] * 3
    assert not any(finite for *_, finite in results)


def scaled(rank: int, size: int) -> tuple[int, bool]:
    model = make_model(seed=rank, dtype=torch.float32)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with attach(model, optimizer, "bsp", scaler=scaler, non_finite="raise") as sync:
        for step in range(3):
            optimizer.zero_grad()
            x, y = make_batch(rank, step, dtype=torch.float32)
            scaler.scale((model(x) - y).square().sum() * 100).backward()
            scaler.step(optimizer)
            scaler.update()
    return sync.step, bool(flat(model).isfinite().all())


def test_gradients_that_overflow_under_a_scaler_are_none_of_it() -> None:
    """It skips such a step, and looks for another scale."""
    assert run(scaled, workers=2) == [(3, True)] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1, 2, 3, 64, 1000])
def test_the_roll_tells_who(size: int, dtype: torch.dtype) -> None:
    """Counts stay exact, and one such worker is named, whoever it is."""
    for bad in {0, size // 2, size - 1}:
        ballots = [
            Ballot(1.0, True, r % 2 == 0, r % 3 == 0, 0.5, 7, 9, (2.0,), r, r != bad)
            for r in range(size)
        ]
        sums = torch.tensor([b.values() for b in ballots], dtype=dtype).sum(0).tolist()
        roll = ballots[0].read(sums, size)
        assert (roll.not_finite, roll.who) == (1, bad)
        assert (roll.weight, roll.stepping, roll.more) == (size, size, (2.0 * size,))
        assert roll.finishing == len(range(0, size, 2))
        assert roll.flag == len(range(0, size, 3))


def test_the_roll_counts_several() -> None:
    """None of them is named; in float64, in which a roll of its own travels, all is exact."""
    for size, bad in itertools.product([5, 200], [2, 5]):
        ballots = [
            Ballot(1.0, True, False, True, 0.0, 0, 0, rank=r, finite=r >= bad) for r in range(size)
        ]
        sums = torch.tensor([b.values() for b in ballots], dtype=torch.float64).sum(0).tolist()
        roll = ballots[0].read(sums, size)
        assert (roll.not_finite, roll.who, roll.flag, roll.finishing) == (bad, None, size, 0)


def test_the_norm_tells_of_every_kind() -> None:
    """One number, anywhere, of each kind that is not finite."""
    for value, dtype in itertools.product(
        (math.nan, math.inf, -math.inf),
        (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    ):
        tensors = [torch.ones(70_000, dtype=dtype), torch.ones(3, 3, dtype=dtype)]
        assert math.isfinite(squared_norm(tensors))
        for i, place in ((0, -1), (1, (2, 0))):
            tensors[i][place] = value
            assert not math.isfinite(squared_norm(tensors))
            tensors[i][place] = 1
