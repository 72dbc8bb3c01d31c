"""The global model of all strategies: precision of P, buffers, memory."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loops import attach, sgd
from offbeat import StreamingAveraging
from offbeat.averaging.model_mean import moved_to_mean
from offbeat.extend import GlobalModel, Outer
from problems import flat, make_wide
from worlds import run

# -- the precision of P ---------------------------------------------------------------------------


def small_steps(rank: int, size: int, dtype: torch.dtype) -> list[float]:
    """Step down by a unit in the last place below 1, six times. Returns x, in such units."""
    model = nn.Module()
    model.x = nn.Parameter(torch.ones(1, dtype=dtype))
    unit = torch.finfo(dtype).eps / 2
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    with attach(model, optimizer, "diloco:period=1,outer_lr=0.125,outer_momentum=0.0"):
        for _ in range(6):
            model.x.grad = torch.full_like(model.x, unit)
            optimizer.step()
            seen.append(float((model.x.detach().double() - 1) / unit))
    return seen


@pytest.mark.parametrize(
    ("dtype", "half"),
    [
        (torch.bfloat16, True),
        (torch.float16, True),
        (torch.float32, False),
        (torch.float64, False),
    ],
    ids=str,
)
def test_small_outer_steps_add_up_in_p(dtype: torch.dtype, half: bool) -> None:
    """An eighth of a unit in the last place is lost in x, and not in a P of more precision.

    P is float32 for half types, and the rounding error of x is stored. Otherwise P has the dtype of
    x.
    """
    # After n steps P = 1 − n/8 units, and x is P rounded. Half a unit is rounded to the even 1.
    for seen in run(small_steps, dtype, workers=2):
        assert seen == [0.0] * 4 + [-1.0 if half else 0.0] * 2


UNIT = 2**-7  # in the last place of a bfloat16 number from 1 to 2


def take_turns(rank: int, size: int, text: str, wire: str) -> tuple[Tensor, list[Tensor]]:
    """In each step one worker moves by a unit. Returns the moves in units, and P."""
    model = nn.Module()
    start = 1.25 + torch.arange(4096) % 64 * UNIT
    model.x = nn.Parameter(start.bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(number: int) -> None:
        model.x.grad = torch.full_like(model.x, -UNIT * (number % size == rank))
        optimizer.step()

    with attach(model, optimizer, text, wire=wire) as sync:
        for number in range(24):
            step(number)
            if number == 9:
                with sync.consensus():
                    assert not torch.equal(model.x.detach(), start)
            if number == 14:
                saved = copy.deepcopy(sync.state_dict())
                step(number)
                sync.load_state_dict(saved)
        sync.finish()
        shared = sync._iteration.flow.state.shared
    return (model.x.detach().double() - start) / UNIT, shared


@pytest.mark.parametrize("wire", ["float32", "int2"])
@pytest.mark.parametrize(
    "text",
    [
        "local:period=1",
        "async:staleness=4",
        "diloco:period=3,fragments=3,overlap=1,outer_lr=1.0,outer_momentum=0.0",
        "streaming:outer_gain=1",
    ],
)
def test_moves_of_one_worker_add_up_in_bfloat16(text: str, wire: str) -> None:
    """A quarter of a unit is lost in x, but its rounding error is part of the next landing."""
    found = run(take_turns, text, wire, workers=4)
    for moved, shared in found:
        error = (moved - 24 / 4).abs().mean()
        assert error <= (0 if wire == "float32" else 0.1)
        assert [p.tolist() for p in shared] == [p.tolist() for p in found[0][1]]


def take_small_turns(
    rank: int, size: int, strategy: Any, wire: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, list[Tensor]]:
    """In each step one worker moves by 1/16 unit. Returns the moves in units, and P."""
    model = nn.Module()
    start = (1.25 + torch.arange(4096) % 64 * UNIT).to(dtype)
    model.x = nn.Parameter(start.clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(number: int) -> None:
        model.x.grad = torch.full_like(model.x, -UNIT / 16 * (number % size == rank))
        optimizer.step()

    with attach(model, optimizer, strategy, wire=wire) as sync:
        for number in range(96):
            step(number)
            if number == 40:
                saved = copy.deepcopy(sync.state_dict())
                step(number)
                sync.load_state_dict(saved)
        sync.finish()
        shared = sync._iteration.flow.state.shared
    return (model.x.detach() - start) / UNIT, shared


@pytest.mark.parametrize(
    ("schedule", "wire", "dtype"),
    [
        *(("eager", "float32", dtype) for dtype in (torch.float32, torch.float64)),
        *((one, "int2", torch.float32) for one in ("eager", "cyclic,staleness=4")),
    ],
    ids=str,
)
def test_what_the_rounding_of_p_loses_is_sent_again(
    schedule: str, wire: str, dtype: torch.dtype
) -> None:
    """P in bfloat16 cannot hold a landing of 1/64 unit. x holds it, and so do later updates.

    The worker saves and loads its state in between.
    """
    text = f"streaming:outer_gain=1,stored=bfloat16,schedule={schedule}"
    found = run(take_small_turns, text, wire, dtype, workers=4)
    for moved, (shared,) in found:
        assert (moved - 96 / 4 / 16).abs().mean() <= (1e-3 if wire == "float32" else 0.05)
        assert shared.dtype == torch.bfloat16
        assert shared.equal(found[0][1][0])
        distance = (shared.float() - 1.25 - torch.arange(4096) % 64 * UNIT) / UNIT - moved
        assert distance.abs().max() <= 1


def save_early(rank: int, size: int) -> Tensor:
    """Take steps of 1/64 unit, fewer than P can hold, and land what is in flight."""
    model = nn.Module()
    model.x = nn.Parameter(torch.full((4096,), 1.25))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy = "streaming:outer_gain=1,stored=bfloat16"
    with attach(model, optimizer, strategy, wire="float32") as sync:
        for _ in range(6):
            model.x.grad = torch.full_like(model.x, -UNIT / 64)
            optimizer.step()
        sync.state_dict()
        return (model.x.detach() - 1.25) / UNIT


def test_x_is_not_replaced_by_a_rounded_p() -> None:
    """Without a step since the launch, x becomes P, but not its bfloat16 number."""
    for moved in run(save_early, workers=2):
        assert moved.tolist() == [6 / 64] * 4096


@pytest.mark.parametrize(
    "more",
    [
        {"lands": 0},
        *({"lands": 1, "outer": one} for one in (Outer(lr=0.5), Outer(momentum=0.5))),
    ],
    ids=str,
)
def test_a_rounded_p_needs_updates_that_send_once_what_it_loses(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match='stored="bfloat16" requires the default outer step'):
        GlobalModel(stored="bfloat16", **more)
    with pytest.raises(ValueError, match='stored="bfloat16" requires outer_gain=1'):
        StreamingAveraging(stored="bfloat16")


# -- buffers --------------------------------------------------------------------------------------


def moved(value: Tensor, rank: int, step: int) -> Tensor:
    """The statistics after the forward pass of a step."""
    return 0.2 * value + 0.8 * torch.tensor([rank + step % 3, 1.0 * (rank != step % 2)])


def statistics(rank: int, size: int, text: str, wire: str) -> list[Tensor]:
    """The buffer after each step. Each forward pass replaces the tensor."""
    model = make_wide(seed=rank)
    model.register_buffer("statistic", torch.zeros(2))
    optimizer = sgd(model)
    trace = []
    sync = attach(model, optimizer, text, wire=wire)
    for step in range(8):
        model.statistic = moved(model.statistic, rank, step)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        trace.append(model.statistic.clone())
    sync.finish()
    return trace


@pytest.mark.parametrize("wire", ["float32", "int8"])
@pytest.mark.parametrize(
    ("text", "period", "delay"),
    [
        ("local:period=2", 2, 0),
        ("diloco:period=2,overlap=1", 2, 1),
        ("async:staleness=2", 1, 1),
        ("streaming:parts=1,schedule=cyclic,staleness=2", 1, 1),
    ],
)
def test_buffers_stay_between_their_value_and_the_mean(
    text: str, period: int, delay: int, wire: str
) -> None:
    """A buffer moves by (mean − sent), and never beyond the mean or away from it, on any wire."""
    results = run(statistics, text, wire, workers=2)
    now, sent, clamped = [torch.zeros(2)] * 2, [], 0
    for step in range(1, 9):
        now = [moved(value, rank, step - 1) for rank, value in enumerate(now)]
        if not delay and step % period == 0:
            sent = now
        if sent and (step - delay) % period == 0:
            mean = sum(sent) / 2
            shifted = [value + mean - own for value, own in zip(now, sent, strict=True)]
            now = [
                torch.minimum(
                    torch.maximum(new, torch.minimum(old, mean)), torch.maximum(old, mean)
                )
                for new, old in zip(shifted, now, strict=True)
            ]
            clamped += sum(not torch.equal(*pair) for pair in zip(shifted, now, strict=True))
        if delay and step % period == 0:
            sent = now
        for value, trace in zip(now, results, strict=True):
            torch.testing.assert_close(trace[step - 1], value, rtol=0, atol=1e-5)
    assert clamped or not delay


def test_buffers_that_are_not_finite() -> None:
    """NaN becomes the mean, and so does a value that is unchanged since it was sent.

    ∞ − ∞ would be NaN.
    """
    nan, inf = math.nan, math.inf
    now = torch.tensor([-inf, 0.0, 2.0, nan, 1.0, nan])
    sent = torch.tensor([-inf, 0.0, 2.0, nan, nan, 2.0])
    mean = torch.tensor([-inf, 0.0, 3.0, 5.0, 6.0, 7.0])
    assert moved_to_mean(now, mean, sent).tolist() == mean.tolist()


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wire", "copies"),
    [
        ("local:period=2", "float32", 0),
        ("async:staleness=2", "float32", 0),
        ("async:staleness=2,schedule=eager", "float32", 1),
        ("diloco:period=2", "float32", 1),
        ("local:period=2", "int8", 1),
        ("streaming", "int8", 1),
    ],
)
def test_p_is_stored_where_something_needs_it(text: str, wire: str, copies: int) -> None:
    """For outer steps and quantized updates, and if a message may land at any time."""

    def stored(rank: int, size: int) -> float:
        model = make_wide(seed=rank)
        sync = attach(model, sgd(model), text, wire=wire)
        numbers = sum(shared.numel() for shared in sync.state_dict()["state"]["shared"])
        sync.finish()
        return float(numbers / flat(model).numel())

    assert run(stored, workers=2) == [copies] * 2


def moved_after_the_last_step(rank: int, size: int, text: str) -> list[Tensor]:
    """Return the running mean after a forward pass that no step follows, and then the shown one."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = sgd(model, 0.1)
    sync = attach(model, optimizer, text)
    for step in range(5):  # the means of local:period=4 and diloco:period=4 are those of step 4
        x = torch.full((4, 2), float(rank))
        model(x).sum().backward()
        if step < 4:
            optimizer.step()
            optimizer.zero_grad()
    own = model[0].running_mean.clone()
    with sync.consensus():
        shown = model[0].running_mean.clone()
    sync.finish()
    sync.finish()  # a second call does nothing
    return [own, shown, model[0].running_mean.clone()]


@pytest.mark.parametrize("text", ["local:period=4", "diloco:period=4", "bsp", "streaming"])
def test_buffers_that_move_after_the_last_step_are_averaged(text: str) -> None:
    results = run(moved_after_the_last_step, text, workers=3)
    mean = sum(own for own, *_ in results) / 3
    assert not torch.equal(results[0][0], results[1][0])
    for _, shown, end in results:
        torch.testing.assert_close(shown, mean)
        assert torch.equal(end, results[0][2])
        torch.testing.assert_close(end, mean)
