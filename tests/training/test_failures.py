"""Every failure in training ends in one clear error on every worker, within seconds."""

import contextlib
import gc
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat
from cells import some
from loops import Quick, attach, error_of, meet, sgd, start
from offbeat.strategies.base import Strategy
from offbeat_lab.baselines import STRATEGIES
from offbeat_lab.baselines.ssp import SSP
from problems import flat, make_batch, make_model, make_wide, train_step
from transport.communicators import held
from workers import run

KINDS = [
    offbeat.BSP(),
    offbeat.LocalSGD(period=1),
    offbeat.SelSync(delta=0.0),
    offbeat.AsyncAveraging(staleness=2),
    offbeat.AsyncAveraging(staleness=2, schedule="eager"),
]

OPERATION = (
    r"votes at step|agreement on|mean of the|launch \d+ \(part 0\)|push_pull|request|values of"
)

# -- no further thread ----------------------------------------------------------------------------


def lack_threads(rank: int, size: int, strategy: str, number: int, folder: str) -> Any:
    """Train. Rank 0 can start ``number`` more threads. Returns the error and what is left over."""
    before, begin, started = held(), threading.Thread.start, [0]

    def refuse(thread: threading.Thread) -> None:
        started[0] += 1
        if started[0] > number:
            raise RuntimeError("can't start new thread")
        begin(thread)

    def train() -> None:
        chosen = offbeat.parse_strategy(strategy, STRATEGIES)
        synchronizers.append(offbeat.attach(model, optimizer, chosen, timeout_seconds=8))
        for step in range(20):
            train_step(model, optimizer, make_batch(rank, step, dtype=torch.float32))

    model, synchronizers = make_wide(rank), list[Any]()
    optimizer = sgd(model)
    if rank == 0:
        threading.Thread.start = refuse  # type: ignore[method-assign]
    kinds, text = error_of(train)
    meet(folder, rank, [0, 1])
    for sync in synchronizers:
        sync.detach()
    gc.collect()
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return kinds, text, held(before), before, [len(each) for each in hooks]


LACKS = [("ssp:staleness=2", 8), *(("streaming", number) for number in range(12))]


@pytest.mark.parametrize("lack", some(LACKS, 0, 1, 4), ids=str)
def test_a_lack_of_threads_is_named(lack: tuple[str, int], tmp_path: Path) -> None:
    """In one line, whichever thread it is. Nothing is left over."""
    results = run(lack_threads, *lack, str(tmp_path), workers=2)
    assert "can't start new thread. Raise the limit on threads (ulimit -u" in results[0][1]
    for kinds, text, after, before, hooks in results:
        assert "OffbeatError" in kinds
        assert "\n" not in text
        assert all(a <= b for a, b in zip(after, before, strict=True)), (after, before)
        assert hooks == [0, 0]


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
    """Rank 1 is busy or stopped until the others have noticed, or is killed and leaves a child."""
    model = make_model(seed=rank)
    optimizer = sgd(model)
    attach(model, optimizer, strategy, timeout_seconds=1.5, group=Quick())
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))

    def train() -> None:
        for step in range(40):
            if (rank, step) == (1, 3):
                if way == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif way == "survived by a child":
                    if child := os.fork():
                        Path(folder, "pid1").write_text(str(child))
                        os.kill(os.getpid(), signal.SIGKILL)
                    signal.pause()
                else:
                    meet(folder, rank, [0, 2])
            train_step(model, optimizer, make_batch(rank, step))

    kinds, text = error_of(train)
    if rank != 1:
        meet(folder, rank, [0, 2])
        with contextlib.suppress(ProcessLookupError):  # the other one may have ended the child
            end = signal.SIGKILL if way == "survived by a child" else signal.SIGCONT
            os.kill(int(Path(folder, "pid1").read_text()), end)
    return kinds, text, bool(flat(model).isfinite().all())


@pytest.mark.parametrize(
    ("strategy", "way"),
    [
        (KINDS[3], "busy"),
        (KINDS[1], "stopped"),
        (KINDS[1], "survived by a child"),
        pytest.param(KINDS[0], "busy", marks=pytest.mark.nightly),
        pytest.param(KINDS[0], "stopped", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_silent_worker_is_named_after_the_time_out(
    strategy: Strategy, way: str, tmp_path: Path
) -> None:
    """Pitfall 19: CommunicationTimeout names operation, rank, seconds and argument.

    The connections of a stopped process stay open, and so do those that a child has inherited. A
    worker that lives learns of the failure, too.
    """
    ends = (1,) if way == "survived by a child" else ()
    results = run(fall_silent, strategy, way, str(tmp_path), workers=3, may_die=ends)
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
    if not ends:
        assert "CommunicationError" in results[1][0], "it must not continue alone"
