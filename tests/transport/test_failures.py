"""Late, dead and stuck workers: the error names them, in finite time."""

import itertools
import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loops import error_of
from offbeat.errors import CommunicationError, CommunicationTimeout
from offbeat.transport.communicator import Communicator
from offbeat.transport.future import explained
from offbeat.transport.host import Promise
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.torch_backend import process_groups
from offbeat.transport.torch_backend.process_groups import GroupFactory, OpeningError, backends_of
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator
from transport.communicators import meet
from workers import run

KNOB = "raise it in attach(..., timeout_seconds=...)"


def seconds_in(text: str) -> float:
    """Seconds after which the operation failed, as the error says."""
    found = re.search(r" failed after (\d+\.\d) s", text)
    assert found, text
    return float(found[1])


# -- opening --------------------------------------------------------------------------------------


def come_late(rank: int, size: int) -> float:
    if rank == 1:
        time.sleep(0.4)
    communicator = TorchCommunicator(None, timeout_seconds=20, liveness_seconds=0.1)
    total = communicator.sum(torch.ones(1), what="test").wait().item()
    communicator.close(together=True)
    return total


def test_opening_waits_for_late_workers_until_the_time_out() -> None:
    """Its time limit is timeout_seconds, not the shorter one of the liveness check."""
    assert run(come_late, workers=2) == [2.0, 2.0]


def come_without(rank: int, size: int) -> Any:
    if rank == 1:
        meet("rank 0 has given up", [0, 1])
        return None
    with pytest.raises(CommunicationTimeout) as caught:
        TorchCommunicator(None, timeout_seconds=0.5)
    meet("rank 0 has given up", [0, 1])
    return str(caught.value)


def test_a_worker_that_does_not_open_its_connections_is_named() -> None:
    """The error comes in finite time and names the setting to change. Pitfall 19."""
    text = run(come_without, workers=2)[0]
    assert re.match(r"rank 0: opening connections failed after [\d.]+ s: rank 1 did not come", text)
    assert "timeout_seconds=0.5" in text
    assert KNOB in text
    assert seconds_in(text) >= 0.5


def test_a_member_that_ended_because_of_another_is_not_blamed() -> None:
    """Rank 1 died. Rank 2 has noticed, given up and ended before rank 0 looks."""
    store = dist.HashStore()

    def opening(rank: int, lost: list[int]) -> str:
        factory = GroupFactory(store, rank, 3, "test", itertools.count(), lost=lambda: lost)
        with pytest.raises(OpeningError) as caught:
            factory.open("gloo", 5)
        return str(caught.value)

    assert opening(2, [1]) == "rank 1 died"
    assert opening(0, [2]) == "rank 2 has given up: rank 1 died"


# -- operations -----------------------------------------------------------------------------------


def lose_one(rank: int, size: int) -> Any:
    communicator = TorchCommunicator(None, timeout_seconds=100, liveness_seconds=100)
    duplicate = communicator.duplicate()
    communicator.sum(torch.ones(1), what="a sum").wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    first = error_of(communicator.sum(torch.ones(1), what="the next sum").wait)
    seen: list[Any] = [first]
    for one in (communicator, duplicate):
        with pytest.raises(CommunicationError) as caught:
            one.sum(torch.ones(1), what="another sum").wait()
        seen.append((type(caught.value).__name__, str(caught.value)))
        assert caught.value.__cause__ is None
    communicator.close()
    return seen


def test_a_dead_worker_is_named_at_once_and_in_later_errors() -> None:
    """Long before the time-out, which is longer than a test may take.

    Later operations, also of duplicates, raise the same error. Pitfall 19.
    """
    results = run(lose_one, workers=3, may_die=(1,))
    for rank in (0, 2):
        (kinds, text), *later = results[rank]
        assert kinds[0] == "CommunicationError"
        assert re.match(rf"rank {rank}: the next sum failed after .* s: lost the ", text), text
        assert "lost the connection to rank 1, which died or was cut off" in text
        assert later == [(kinds[0], text)] * 2


def leave(rank: int, size: int) -> Any:
    """Rank 1 leaves without taking part in the second sum of rank 0."""
    group = dist.new_group(backend="cpu:gloo")
    assert dist.get_backend(group) == "cpu:gloo"
    communicator = TorchCommunicator(group, timeout_seconds=20, liveness_seconds=5.0)
    communicator._channel.collectives = None  # CPU tensors use gloo also if others use NCCL
    communicator.sum(torch.ones(1), what="a sum").wait()
    seen = (
        error_of(communicator.sum(torch.ones(1), what="the next sum").wait) if rank == 0 else None
    )
    communicator.close()
    meet("rank 0 has noticed", [0, 1])
    return seen


def test_failures_are_detected_in_a_group_with_a_backend_for_each_device() -> None:
    """Rank 0 waits in slices, and finds the exit reason that rank 1 has published."""
    kinds, text = run(leave, workers=2)[0]
    assert kinds[0] == "CommunicationError", "and no time-out"
    assert "rank 1, which gave up" in text


@pytest.mark.parametrize(
    ("text", "backends"),
    [
        ("gloo", {"cpu": "gloo", "cuda": "gloo"}),
        ("nccl", {"cuda": "nccl"}),
        ("cpu:gloo", {"cpu": "gloo"}),
        ("cpu:gloo,cuda:nccl", {"cpu": "gloo", "cuda": "nccl"}),
    ],
)
def test_the_backend_for_each_device_is_known(
    text: str, backends: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: text)
    assert backends_of(None) == backends
    monkeypatch.setattr(dist, "get_backend", lambda group: "undefined")
    assert "gloo" in backends_of(None).values() or torch.cuda.is_available()


def choose_backends(rank: int, size: int) -> tuple[str, str]:
    both = {"cpu": "gloo", "cuda": "nccl"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_groups, "backends_of", lambda group: both)
        inside = GroupFactory.among(None, range(size), inside=True)
        return GroupFactory.among(None).backend, inside.backend


def test_only_the_processes_of_a_node_use_nccl() -> None:
    assert run(choose_backends, workers=2) == [("gloo", "nccl")] * 2


def be_patient(rank: int, size: int) -> Any:
    communicator = TorchCommunicator(None, timeout_seconds=0.1, liveness_seconds=5.0)
    seen: Any = None
    if rank == 0:
        late = communicator.receive(torch.zeros(1), source=1, what="a push", patient=True)
        value = late.wait().item()
        communicator.send(torch.zeros(1), destination=2, what="go").wait()
        lost = communicator.receive(torch.zeros(1), source=2, what="a push", patient=True)
        seen = value, error_of(lost.wait)
    elif rank == 1:
        time.sleep(0.3)  # more than two time-outs
        communicator.send(torch.tensor([7.0]), destination=0, what="a push").wait()
        seen = error_of(
            communicator.receive(torch.zeros(1), source=2, what="never", patient=True).wait
        )
    else:
        communicator.receive(torch.zeros(1), source=0, what="go", patient=True).wait()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    communicator.close()
    return seen


def test_a_patient_receive_fails_only_with_its_connection() -> None:
    """The message may be late.

    When the sender dies, the error names it at once, and is no time-out.
    """
    (value, lost), other, _ = run(be_patient, workers=3, may_die=(2,))
    assert value == 7.0
    for kinds, text in (lost, other):
        assert kinds[0] == "CommunicationError"
        assert "lost the connection to rank 2, which died" in text
        assert "time-out" not in text
        assert seconds_in(text) >= 0.2, "two time-outs"
    assert lost[1].startswith("rank 0: a push failed after ")


# -- promises -------------------------------------------------------------------------------------


def break_a_promise(rank: int, size: int) -> Any:
    communicator: Communicator = SingleCommunicator(timeout_seconds=0.3)
    if size > 1:
        communicator = TorchCommunicator(None, timeout_seconds=0.3, liveness_seconds=5.0)
    promise: Promise[int] = communicator.host.promise()
    answer = communicator.await_promise(promise, what="an answer of this rank's own")
    early, seen = answer.done(), error_of(answer.wait)
    communicator.close()
    return early, *seen


@pytest.mark.parametrize(("workers", "fails"), [(1, "was not fulfilled"), (2, "failed after")])
def test_an_unfulfilled_promise_ends_in_a_time_out(workers: int, fails: str) -> None:
    """The error names the rank, the promise and the setting to change."""
    for rank, (early, kinds, text) in enumerate(run(break_a_promise, workers=workers)):
        assert not early
        assert kinds[0] == "CommunicationTimeout"
        assert f"an answer of this rank's own {fails}" in text
        assert "timeout_seconds=0.3" in text
        assert workers == 1 or (text.startswith(f"rank {rank}: ") and seconds_in(text) >= 0.3)


# -- activities -----------------------------------------------------------------------------------


def lose_one_beside(rank: int, size: int) -> Any:
    communicator = TorchCommunicator(None, timeout_seconds=2.0, liveness_seconds=5.0)
    if rank == 2:
        communicator.receive(torch.zeros(1), source=0, what="go", patient=True).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    promise: Promise[Exception] = communicator.host.promise()

    def activity() -> None:
        try:
            communicator.receive(torch.zeros(1), source=2, what="a request", patient=True).wait()
        except CommunicationError as error:
            promise.fulfil(error)

    communicator.host.spawn(activity, what="a test activity")
    if rank == 0:
        communicator.send(torch.zeros(1), destination=2, what="go").wait()
    raw = communicator.await_promise(promise, what="the error of the activity").wait()
    first = explained(raw)
    time.sleep(0.3)
    again = explained(raw)
    communicator.close()
    return type(raw).__name__, str(raw), type(first).__name__, str(first), str(again)


def test_the_worker_explains_errors_of_background_threads() -> None:
    """The thread's own error names no rank; explained() on the worker does, also much later."""
    results = run(lose_one_beside, workers=3, may_die=(2,))
    for rank in (0, 1):
        raw_kind, raw, kind, text, again = results[rank]
        assert raw_kind != "CommunicationError"
        assert raw.startswith("a request failed: ")
        assert "rank" not in raw
        assert kind == "CommunicationError"
        assert re.match(rf"rank {rank}: a request failed after .* s: lost the ", text), text
        assert "lost the connection to rank 2, which died or was cut off" in text
        assert again == text
