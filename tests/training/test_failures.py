"""Every failure in training ends in one clear error on every worker, within seconds."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import offbeat
from loops import Quick, attach, error_of, meet, sgd, start
from offbeat.strategies.base import Strategy
from offbeat_lab.baselines.ssp import SSP
from problems import flat, make_batch, make_model, train_step
from workers import run

KINDS = [
    offbeat.BSP(),
    offbeat.LocalSGD(period=1),
    offbeat.SelSync(delta=0.0),
    offbeat.AsyncAveraging(staleness=2),
    offbeat.AsyncAveraging(staleness=2, schedule="eager"),
]

OPERATION = (
    r"votes at step|agreement on|mean of the|launch \d+ \(part 0\) at step|push_pull|request"
)

# -- workers that die or get stuck ----------------------------------------------------------------


def die(rank: int, size: int, strategy: Strategy, folder: str) -> Any:
    model, optimizer, sync = start(rank, strategy, timeout_seconds=100)

    def train() -> None:
        for step in range(40):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            train_step(model, optimizer, make_batch(rank, step))

    kinds, text = error_of(train)
    steps = sync.step
    after = flat(model)
    meet(folder, rank, [0, 2])  # who detaches before the other has noticed would be missed, too
    sync.detach()
    return kinds, text, steps, bool(after.isfinite().all())


@pytest.mark.parametrize("strategy", [KINDS[0], KINDS[4], SSP(staleness=2)], ids=str)
def test_a_dead_worker_is_named_by_every_survivor(strategy: Strategy, tmp_path: Path) -> None:
    """Pitfalls 15 and 19: CommunicationError names the dead rank and the operation.

    Under SSP each worker has a part of the parameter server. The test takes less than
    timeout_seconds.
    """
    results = run(die, strategy, str(tmp_path), workers=3, may_die=(1,))
    assert results[1] is None
    for rank in (0, 2):
        kinds, text, steps, finite = results[rank]
        assert kinds[0] == "CommunicationError", text
        assert re.match(rf"rank {rank}: .+ failed after \d+\.\d s: ", text), text
        assert re.search(OPERATION, text), text
        assert "lost the connection to rank 1, which" in text
        assert 2 <= steps <= 6
        assert finite


def give_up(rank: int, size: int, folder: str) -> Any:
    """Rank 1 dies.

    Survivors stay alive until all have noticed, like workers that save their state.
    """
    model, optimizer, sync = start(rank, offbeat.LocalSGD(period=1), timeout_seconds=100)
    train_step(model, optimizer, make_batch(rank, 0))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    kinds, text = error_of(lambda: train_step(model, optimizer, make_batch(rank, 1)))
    sync.detach()
    meet(folder, rank, [0, 2, 3, 4])
    return kinds, text


def test_survivors_without_a_link_to_the_dead_worker_notice_soon(tmp_path: Path) -> None:
    """Pitfall 19: after one worker detaches, the others fail before their time-out."""
    results = run(give_up, str(tmp_path), workers=5, may_die=(1,))
    for rank in (0, 2, 3, 4):
        kinds, text = results[rank]
        assert kinds[0] == "CommunicationError", text
        assert "lost the connection to rank 1, which" in text, "and nobody else"


def fall_silent(rank: int, size: int, strategy: Strategy, way: str, folder: str) -> Any:
    """Rank 1 is busy, or stopped by the kernel, until the others have noticed."""
    model = make_model(seed=rank)
    optimizer = sgd(model)
    attach(model, optimizer, strategy, timeout_seconds=1.5, group=Quick())
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))

    def train() -> None:
        for step in range(40):
            if (rank, step) == (1, 3):
                if way == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                else:
                    meet(folder, rank, [0, 2])
            train_step(model, optimizer, make_batch(rank, step))

    kinds, text = error_of(train)
    if rank != 1:
        meet(folder, rank, [0, 2])
        os.kill(int(Path(folder, "pid1").read_text()), signal.SIGCONT)
    return kinds, text, bool(flat(model).isfinite().all())


@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        (KINDS[3], "busy"),
        (KINDS[1], "stopped"),
        pytest.param(KINDS[0], "busy", marks=pytest.mark.nightly),
        pytest.param(KINDS[0], "stopped", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_silent_worker_is_named_after_the_time_out(
    strategy: Strategy, way: str, tmp_path: Path
) -> None:
    """Pitfall 19: CommunicationTimeout names operation, rank, seconds and argument.

    The connections of a stopped process stay open. It learns of the failure, too.
    """
    results = run(fall_silent, strategy, way, str(tmp_path), workers=3)
    for rank in (0, 2):
        kinds, text, finite = results[rank]
        assert kinds[:2] == ["CommunicationTimeout", "CommunicationError"], text
        assert "TimeoutError" in kinds
        found = re.match(
            rf"rank {rank}: (.+) failed after (\d+\.\d) s: no answer from rank 1,", text
        )
        assert found, text
        assert re.match(OPERATION, found[1]), text
        assert float(found[2]) >= 1.4, text
        assert "timeout_seconds=1.5: raise it in attach(..., timeout_seconds=...)" in text
        assert finite
    assert "CommunicationError" in results[1][0], "it must not continue alone"
