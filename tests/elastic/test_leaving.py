"""A worker dies, gives up or is interrupted: the others notice at once, in every wait."""

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat
from cells import some
from loops import attach, error_of, meet, sgd, start
from offbeat.errors import CommunicationError
from offbeat.transport.communicator import Communicator
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator
from problems import flat, make_batch, make_model, train_step
from transport.communicators import meet as meet_in_store
from workers import run

TIMEOUT_SECONDS = 100.0  # more than a test may take, so that none ends by a time-out

# -- one dies or gives up --------------------------------------------------------------------------


def leave(rank: int, size: int, text: str, where: str, way: str, folder: str) -> Any:
    """Rank 0 computes for long, the last rank leaves, and the others wait for both."""
    model, optimizer, sync = start(rank, text, timeout_seconds=TIMEOUT_SECONDS)
    others, own = range(size - 1), list[Tensor]()

    def train() -> None:
        for step in range(30):
            if step == 3 and rank == 0:
                meet(folder, rank, others)  # until the others have noticed
            if step == 3 and rank == size - 1:
                if way == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                own.append(flat(model))
                raise ZeroDivisionError
            if step == 4 and where == "consensus":
                with sync.consensus():
                    pass
            if step == 4 and where == "finish":
                sync.finish()
                return
            train_step(model, optimizer, make_batch(rank, step))

    try:
        with sync:
            train()
    except ZeroDivisionError:
        meet(folder, rank, range(size))  # its process lives on
        same = torch.equal(flat(model), own[0])
        train_step(model, optimizer, make_batch(rank, 0))  # without hooks
        return same
    except CommunicationError as error:
        meet(folder, rank, range(size) if way == "gives up" else others)
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("ssp:staleness=2", "training"),
        ("ssp:staleness=2", "consensus"),
        ("easgd:period=1", "finish"),
        pytest.param("downpour", "finish", marks=pytest.mark.nightly),
    ],
)
def test_the_death_of_a_client_of_a_busy_server_is_noticed(
    text: str, where: str, tmp_path: Path
) -> None:
    """No worker waits until the time-out, and errors name the dead rank, not the server.

    Pitfall 19.
    """
    results = run(leave, text, where, "dies", str(tmp_path), workers=4, may_die=(3,))
    for rank in (0, 1, 2):  # rank 0 notices when it is back
        assert "lost the connection to rank 3, which died" in results[rank]


@pytest.mark.parametrize(
    "text",
    some(["bsp", "local:period=1", "async:staleness=2", "streaming", "selsync", "diloco"], 0, 2),
)
def test_all_workers_notice_that_one_gives_up(text: str, tmp_path: Path) -> None:
    """Also those in the ring that wait for a busy one.

    The error names the rank and its exit reason. The exception starts no collective, and detaches
    the model.
    """
    results = run(leave, text, "training", "gives up", str(tmp_path), workers=4)
    for rank in (0, 1, 2):
        assert "lost the connection to rank 3, which gave up" in results[rank]
        assert re.match(rf"rank {rank}: .* failed after", results[rank])
    assert results[3] is True, "the model is that of before the exception"


def fail_beside(rank: int, size: int) -> Any:
    """An operation of ranks 0 and 2 fails while rank 0 waits for a message of rank 1."""
    communicator = TorchCommunicator(None, timeout_seconds=TIMEOUT_SECONDS)
    duplicate = communicator.duplicate()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = None
    if rank == 0:
        kept = duplicate.broadcast(torch.ones(1), source=2, what="rank 2's")
        text = error_of(communicator.receive(torch.zeros(1), source=1, what="a message").wait)[1]
        seen = text, error_of(kept.wait)[1]
    meet_in_store("rank 0 knows", [0, 1])  # rank 1 is busy until then, and notices nothing
    communicator.close()
    return seen


def test_a_failed_operation_that_is_not_awaited_ends_the_others() -> None:
    """Gloo may leave others on the same connections blocked, so all connections are closed."""
    text, kept = run(fail_beside, workers=3, may_die=(2,))[0]
    assert text.startswith("rank 0: a message failed after "), text
    assert "lost the connection to rank 2, which died" in text
    assert kept == text


# -- Ctrl-C ----------------------------------------------------------------------------------------


def interrupt(wait: Callable[[], object]) -> None:
    """Send Ctrl-C to this process a moment after ``wait`` has begun."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        wait()
    timer.join()


WAITS: dict[str, Callable[[Communicator], Any]] = {
    "a sum": lambda communicator: communicator.sum(torch.ones(4), what="a sum").wait(),
    "a gather": lambda communicator: communicator.gather(torch.ones(4), what="a gather").wait(),
    "an exchange": lambda communicator: communicator.exchange(
        torch.ones(4), what="an exchange"
    ).wait(),
    "a message": lambda communicator: communicator.receive(
        torch.ones(4), source=1, what="a message"
    ).wait(),
    "a promise": lambda communicator: communicator.await_promise(
        communicator.host.promise(), what="promise"
    ).wait(),
    "the end": lambda communicator: communicator.close(together=True),
}


def interrupt_waits(rank: int, size: int, folder: str) -> Any:
    for name, wait in WAITS.items():
        communicator = TorchCommunicator(None, timeout_seconds=TIMEOUT_SECONDS)
        if rank == 0:
            interrupt(lambda f=communicator, w=wait: w(f))
        meet_in_store(f"after {name}", [0, 1])
        communicator.close()
    if rank == 0:
        interrupt(lambda: TorchCommunicator(None, timeout_seconds=TIMEOUT_SECONDS))
        meet_in_store("after the opening", [0, 1])
        meet(folder, rank, [0, 1])  # rank 0 keeps the store
        return None
    meet_in_store("after the opening", [0, 1])
    text = error_of(lambda: TorchCommunicator(None, timeout_seconds=TIMEOUT_SECONDS))[1]
    meet(folder, rank, [0, 1])
    return text


def test_ctrl_c_interrupts_every_wait(tmp_path: Path) -> None:
    """Long before the time-out. A worker that joins an interrupted opening raises."""
    text = run(interrupt_waits, str(tmp_path), workers=2)[1]
    assert re.match(r"rank 1: opening connections failed after .* s: rank 0 has given up", text)


# -- attaching -------------------------------------------------------------------------------------


def attach_without_one(rank: int, size: int, dies: int, folder: str) -> Any:
    meet(folder, rank, range(size))
    if rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    model = make_model()
    kinds, text = error_of(lambda: attach(model, sgd(model), "bsp", timeout_seconds=1.0))
    if dies:  # else the store has gone with it
        meet_in_store("all have seen it", [r for r in range(size) if r != dies])
    return kinds, text


@pytest.mark.parametrize("dies", [0, 1])
def test_attach_without_a_worker_raises_one_clear_error(dies: int, tmp_path: Path) -> None:
    """The store's own errors are not shown, also if rank 0 kept the store."""
    results = run(attach_without_one, dies, str(tmp_path), workers=3, may_die=(dies,))
    for rank, seen in enumerate(results):
        if rank == dies:
            continue
        kinds, text = seen
        assert "CommunicationError" in kinds, (kinds, text)
        assert text.startswith(f"rank {rank}: opening connections failed after "), text
        if dies:
            assert "rank 1 did not come" in text or "has given up" in text, text
        assert "Exception raised" not in text


@pytest.mark.parametrize(
    ("seconds", "error", "shown"),
    [
        (float("inf"), ValueError, "inf"),
        (float("nan"), ValueError, "nan"),
        (0, ValueError, "0"),
        (-1.5, ValueError, "-1.5"),
        (0.0009, ValueError, "0.0009"),
        (1e30, ValueError, r"1e\+30"),
        (10**400, ValueError, "10000"),
        (True, TypeError, "True"),
        ("300", TypeError, "'300'"),
        (None, TypeError, "None"),
    ],
)
def test_an_invalid_time_out_is_refused(seconds: Any, error: Any, shown: str) -> None:
    """The check needs no process group."""
    model = make_model()
    needed = r"in \[.*\] \(seconds: from .*\)" if error is ValueError else "a number"
    with pytest.raises(error, match=f"^timeout_seconds must be {needed}, got {shown}"):
        offbeat.attach(model, sgd(model), offbeat.BSP(), timeout_seconds=seconds)
