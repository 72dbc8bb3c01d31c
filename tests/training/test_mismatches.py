"""Workers that call different things: a MismatchError on all of them, and no abort inside gloo."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
import worlds
from loops import attach, error_of, start
from problems import flat, make_batch, train_step
from workers import run as real

STRATEGIES = ["bsp", "local:period=4", "selsync:delta=0", "streaming"]
GLOO_AND_SIMULATED = pytest.mark.parametrize("run", [real, worlds.simulated])
STEPS = 3


def call(name: str, sync: Any, folder: str) -> None:
    match name:
        case "consensus()":
            with sync.consensus():
                pass
        case "finish()":
            sync.finish()
        case "offbeat.save()":
            offbeat.save(folder, sync)
        case "offbeat.load()":
            offbeat.load(folder, sync)
        case "state_dict()":
            sync.state_dict()


def calls(rank: int, size: int, strategy: str, names: tuple[str, str], folder: str) -> Any:
    model, optimizer, sync = start(rank, strategy)
    for step in range(STEPS):
        train_step(model, optimizer, make_batch(rank, step))
    error = error_of(lambda: call(names[rank], sync, folder))
    sync.detach()
    return error


@GLOO_AND_SIMULATED
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "names",
    [
        ("consensus()", "offbeat.save()"),
        ("offbeat.save()", "finish()"),
        ("offbeat.load()", "state_dict()"),
    ],
)
def test_two_different_calls_are_named_on_both_workers(
    run: Callable[..., Any], strategy: str, names: tuple[str, str], tmp_path: Any
) -> None:
    """Their messages have other sizes, for which gloo ends the process (SIGABRT)."""
    for kinds, text in run(calls, strategy, names, str(tmp_path), workers=2):
        assert kinds[0] == "MismatchError", text
        assert text.startswith(
            f"rank 0 is in {names[0]} after step 3, rank 1 is in {names[1]} after step 3: "
        )


def one_saves(rank: int, size: int, strategy: str, folder: str, inside: bool) -> Any:
    """Rank 0 saves alone, perhaps ``inside`` a consensus. Both train on."""
    model, optimizer, sync = start(rank, strategy, timeout_seconds=3 if inside else 20)
    train_step(model, optimizer, make_batch(rank, 0))

    def go_on() -> None:
        with sync.consensus() if inside else nullcontext():
            if rank == 0:
                offbeat.save(folder, sync)
        for step in range(1, 9):
            train_step(model, optimizer, make_batch(rank, step))
        sync.finish()

    error = error_of(go_on)
    sync.detach()
    return error


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_save_on_one_rank_names_it(strategy: str, tmp_path: Any) -> None:
    """As DDP users write it: ``if rank == 0: save``. Both have the votes before one leaves."""
    for kinds, text in real(one_saves, strategy, str(tmp_path), False, workers=2):
        assert kinds[0] == "MismatchError", text
        assert text.startswith("rank 0 is in offbeat.save() after step 1, rank 1 ")


@pytest.mark.parametrize("strategy", ["bsp", "local:period=4"])
def test_a_save_in_a_consensus_on_one_rank_ends_in_a_time_out(strategy: str, tmp_path: Any) -> None:
    """The other worker trains on and waits for its vote. Gloo ended the process."""
    (kinds, text), (others, other) = real(one_saves, strategy, str(tmp_path), True, workers=2)
    assert "CommunicationError" in kinds, text
    assert "offbeat.save() inside consensus(), which every rank must call, failed" in text
    assert "CommunicationError" in others, other


# -- several optimizers ----------------------------------------------------------------------------


def two_networks(rank: int, size: int, widths: tuple[int, int], order: list[str]) -> Any:
    """``order`` has the networks that each rank steps, such as "abab"."""
    torch.manual_seed(rank)
    a, b = nn.Linear(4, widths[0]), nn.Linear(4, widths[1])
    optimizers = torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.Adam(b.parameters())
    sync = attach(nn.ModuleList([a, b]), [*optimizers], "bsp")

    def train() -> None:
        for name in order[rank]:
            net, optimizer = (a, optimizers[0]) if name == "a" else (b, optimizers[1])
            optimizer.zero_grad()
            net(torch.full((2, 4), 1.0 + rank)).square().sum().backward()
            optimizer.step()
        sync.finish()

    error = error_of(train)
    sync.detach()
    return error, flat(a), flat(b)


@GLOO_AND_SIMULATED
@pytest.mark.parametrize("widths", [(3, 3), (3, 300)])
def test_steps_of_different_optimizers_are_not_averaged(
    run: Callable[..., Any], widths: tuple[int, int]
) -> None:
    """With equal sizes two networks were mixed. With others gloo ended the process."""
    for (kinds, text), *_ in run(two_networks, widths, ["abab", "abb"], workers=2):
        assert kinds[0] == "MismatchError", text
        assert text.startswith("rank 0 steps optimizer 0 (SGD) at step 1, rank 1 steps optimizer 1")


@GLOO_AND_SIMULATED
def test_a_waiting_worker_follows_the_optimizer_of_the_others(run: Callable[..., Any]) -> None:
    """After its last step the other worker steps in another order. The models stay equal."""
    results = run(two_networks, (3, 5), ["ababbaab", "abab"], workers=2)
    assert [error for error, *_ in results] == [([], "nothing was raised")] * 2
    for rank_0, rank_1 in zip(results[0][1:], results[1][1:], strict=True):
        assert torch.equal(rank_0, rank_1)
    alone = run(two_networks, (3, 5), ["ababbaab", "ababbaab"], workers=2)
    assert not torch.equal(alone[0][1], results[0][1]), "rank 1 took more steps there"


# -- other dtypes ----------------------------------------------------------------------------------


def convert(rank: int, size: int, strategy: str, then: str) -> Any:
    model, optimizer, sync = start(rank, strategy)
    train_step(model, optimizer, make_batch(rank, 0))
    dtype = torch.float32
    if rank == 1:
        model.to(dtype)

    def go_on() -> None:
        if then == "consensus":
            with sync.consensus():
                pass
        for step in range(1, 9):
            x, y = make_batch(rank, step, dtype=dtype if rank else torch.float64)
            train_step(model, optimizer, (x, y))
        sync.finish()

    error = error_of(go_on)
    sync.detach()
    return error


@pytest.mark.parametrize("then", ["step", "consensus"])
@pytest.mark.parametrize("strategy", ["bsp", "local:period=4", "streaming"])
def test_a_model_converted_on_one_worker_is_refused_there(strategy: str, then: str) -> None:
    (kinds, text), (others, other) = real(convert, strategy, then, workers=2)
    assert kinds[0] == "CommunicationError", text
    assert others[0] == "AttachError", other
    assert "to another dtype after attach()" in other


def shown_on_rank_0(rank: int, size: int, strategy: str) -> Any:
    model, optimizer, sync = start(rank, strategy)

    def train() -> None:
        for step in range(6):
            train_step(model, optimizer, make_batch(rank, step))
            if rank == 0 and step % 3 == 2:
                with sync.consensus():
                    pass
        sync.finish()

    error = error_of(train)
    sync.detach()
    return error


@GLOO_AND_SIMULATED
@pytest.mark.parametrize("strategy", [*STRATEGIES, "diloco", "async"])
def test_a_consensus_on_one_rank_is_named_at_the_end(
    run: Callable[..., Any], strategy: str
) -> None:
    """The others end training first, and it would then go on alone without an error."""
    for kinds, text in run(shown_on_rank_0, strategy, workers=3):
        assert kinds[0] == "MismatchError", text
        assert "rank 0 is in consensus() after step 3, rank " in text  # 1 or 2
        assert " is in finish() after step 6: call consensus() on every rank" in text


def ends_early(rank: int, size: int, early: bool) -> Any:
    """Rank 1 has fewer steps if ``early``, else as many as rank 0, which alone shows the mean."""
    model, optimizer, sync = start(rank, "streaming")
    for step in range(4 if early and rank == 1 else 6):
        train_step(model, optimizer, make_batch(rank, step))
    if rank == 0:
        with sync.consensus():
            shown = flat(model).clone()
    sync.finish()
    return (shown if rank == 0 else flat(model)), flat(model)


@GLOO_AND_SIMULATED
@pytest.mark.parametrize("early", [False, True])
def test_a_worker_that_ended_takes_part_in_a_later_consensus(
    run: Callable[..., Any], early: bool
) -> None:
    rows = run(ends_early, early, workers=2)
    torch.testing.assert_close(rows[0][0], rows[0][1])
    assert rows[0][1].equal(rows[1][1])


def shows_more_often(rank: int, size: int) -> Any:
    """Both show the mean after two steps. Rank 0 does so again after four, when rank 1 has six."""
    model, optimizer, sync = start(rank, "streaming")
    for step in range(6):
        train_step(model, optimizer, make_batch(rank, step))
        if step == 1 or (rank == 0 and step == 3):
            with sync.consensus():
                pass
    sync.finish()
    return flat(model)


@GLOO_AND_SIMULATED
def test_a_worker_that_has_shown_the_mean_may_end_first(run: Callable[..., Any]) -> None:
    """Its evaluations may follow the clock, so that it has fewer of them."""
    first, second = run(shows_more_often, workers=2)
    assert first.equal(second)
