"""Properties of all strategies with a parameter server: checkpoints, updates, failures."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from cells import some
from loops import attach, error_of, start
from offbeat import Compute, Network, simulate
from offbeat.strategies.base import Strategy
from offbeat_lab.baselines.downpour import Downpour
from offbeat_lab.baselines.easgd import EASGD
from offbeat_lab.baselines.ssp import SSP
from problems import flat, make_batch, train_step
from workers import run

# -- checkpoints ----------------------------------------------------------------------------------


def saved(rank: int, size: int, strategy: Strategy, folder: Path) -> Any:
    """Try to save and to load at step 3, save in a consensus, and train on to step 6."""
    model, optimizer, sync = start(rank, strategy, "momentum")
    for step in range(3):
        train_step(model, optimizer, make_batch(rank, step))
    before = flat(model)
    calls = (
        sync.state_dict,
        lambda: sync.load_state_dict({}),
        lambda: offbeat.save(folder, sync),
        lambda: offbeat.load(folder, sync),
    )
    errors = [error_of(call) for call in calls]
    unchanged = torch.equal(flat(model), before)
    with sync.consensus():
        file = torch.load(offbeat.save(folder, sync), weights_only=True)
        same = all(map(torch.equal, file["model"].values(), model.state_dict().values()))
    for step in range(3, 6):
        train_step(model, optimizer, make_batch(rank, step))
    sync.finish()
    return errors, unchanged, same, flat(model)


@pytest.mark.parametrize("strategy", [SSP(staleness=1), Downpour(), EASGD(period=2)], ids=str)
def test_only_a_consensus_can_be_saved(strategy: Strategy, tmp_path: Path) -> None:
    """Everything else is refused in one line, and training continues."""
    results = run(saved, strategy, tmp_path, workers=2)
    for errors, unchanged, same, end in results:
        for kinds, message in errors:
            assert kinds[0] == "CheckpointError"
            assert message.startswith(f"{strategy} cannot be saved or resumed: save inside ")
            assert "\n" not in message
        assert unchanged
        assert same
        assert torch.equal(end, results[0][3])


# -- conservation --------------------------------------------------------------------------------


def drift(rank: int, size: int, strategy: Strategy) -> tuple[Tensor, ...]:
    """Make updates that do not depend on the model; return their sum, a consensus, and the end."""
    model = nn.Module()
    model.x = nn.Parameter(torch.zeros(30, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, strategy)
    total = torch.zeros(30, dtype=torch.float64)
    for step in range(9 + 4 * rank):
        generator = torch.Generator().manual_seed(100 * rank + step)
        model.x.grad = torch.randn(30, generator=generator, dtype=torch.float64)
        total -= 0.1 * model.x.grad / size
        optimizer.step()
        if step == 2 + 3 * rank:
            with sync.consensus():
                seen = model.x.detach().clone()
    sync.finish()
    return total, seen, model.x.detach()


@pytest.mark.parametrize(
    "strategy",
    [
        SSP(staleness=0),
        SSP(staleness=3),
        Downpour(push_every=2, fetch_every=3),
    ],
    ids=str,
)
def test_every_update_reaches_the_server_once(strategy: Strategy) -> None:
    """This includes updates made while a request is in flight, and those of a partial period."""
    results = simulate(
        lambda: drift(dist.get_rank(), 3, strategy),
        workers=3,
        network=Network("1Mbit/s", latency="2ms"),
        compute=Compute("1ms"),
    ).results
    want = sum(total for total, *_ in results)
    for _, seen, end in results:
        torch.testing.assert_close(end, want, rtol=0, atol=1e-13)
        assert torch.equal(end, results[0][2])
        assert torch.equal(seen, results[0][1])


def late(rank: int, size: int) -> Tensor:
    model, optimizer, sync = start(rank, SSP(staleness=1), timeout_seconds=2)
    for step in range(40 * rank):
        time.sleep(0.1)
        train_step(model, optimizer, make_batch(rank, step))
    sync.finish()
    return flat(model)


def test_a_worker_at_the_end_does_not_time_out_while_others_train() -> None:
    """The last worker trains for twice the time-out. Its requests show that it is alive."""
    first, second = run(late, workers=2)
    assert torch.equal(first, second)


# -- non-finite values ---------------------------------------------------------------------------

BAD_RANK, BAD_STEP = 1, 2  # the third step
PUSHING: list[Strategy] = [SSP(staleness=1), EASGD(period=2), Downpour()]


def push_nan(rank: int, size: int, strategy: Strategy, non_finite: str) -> Any:
    model, optimizer, sync = start(rank, strategy, "momentum", non_finite=non_finite)

    def loop() -> None:
        for step in range(8):
            x, y = make_batch(rank, step)
            bad = (rank, step) == (BAD_RANK, BAD_STEP)
            train_step(model, optimizer, (x * math.nan if bad else x, y))
        sync.finish()

    kinds, text = error_of(loop)
    sync.detach()
    return kinds, text, sync.step, bool(flat(model).isfinite().all()), sync.stats.details


@pytest.mark.parametrize("strategy", some(PUSHING, 0), ids=str)
def test_non_finite_values_are_not_pushed(strategy: Strategy) -> None:
    """The worker with the values raises, and the models of the other workers stay finite."""
    results = run(push_nan, strategy, "raise", workers=3)
    for rank, (kinds, message, step, finite, details) in enumerate(results):
        if rank == BAD_RANK:
            assert kinds[0] == "OffbeatError"
            found = f"rank {rank} would push NaN or infinity to the parameter server at step "
            assert message.startswith(found)
            named = int(message.removeprefix(found).split(";")[0])
            assert named in (step, step + 1), "after the last step, or in one"
            assert step >= BAD_STEP
            assert details["non_finite"] == 1
        else:
            assert kinds[0] == "CommunicationError"
            assert f"lost the connection to rank {BAD_RANK}, which gave up" in message
            assert finite


@pytest.mark.parametrize("strategy", PUSHING, ids=str)
def test_a_non_finite_push_is_logged_once(
    strategy: Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    """Each worker logs it once. With "warn" all models receive the values."""
    results = simulate(lambda: push_nan(dist.get_rank(), 3, strategy, "warn"), workers=3).results
    logged = [r.getMessage() for r in caplog.records if "would push" in r.getMessage()]
    ranks = [int(one.split()[1]) for one in logged]
    assert ranks[0] == BAD_RANK
    assert len({*ranks}) == len(ranks), "the others once it has come back to them"
    assert [kinds for kinds, *_ in results] == [[]] * 3
    assert not any(finite for *_, finite, _ in results)
