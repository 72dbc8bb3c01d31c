"""Closing: releases all resources, ends pending operations, and loses no result of a peer."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from loops import error_of
from offbeat.errors import CommunicationError
from offbeat.transport.communicator import Communicator
from offbeat.transport.future import Future
from offbeat.transport.torch_backend import process_groups as groups
from offbeat.transport.torch_backend import threads
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator
from transport.communicators import held, meet
from workers import run


def open_one(**settings: float) -> TorchCommunicator:
    """Open one whose time limits are longer than a test may take, so that none waits for them."""
    return TorchCommunicator(None, **{"timeout_seconds": 100, "liveness_seconds": 100, **settings})


# -- resources ------------------------------------------------------------------------------------


def close_together(communicator: Communicator, duplicate: Communicator) -> Any:
    duplicate.sum(torch.ones(1000), what="a sum").wait()
    communicator.close(together=True)
    communicator.close()


def close_alone(communicator: Communicator, duplicate: Communicator) -> Any:
    duplicate.sum(torch.ones(1000), what="a sum").wait()
    dist.barrier()
    communicator.close()


def close_under_way(communicator: Communicator, duplicate: Communicator) -> Any:
    """Close with operations that no peer answers, whose futures are kept."""
    after, before = (
        (communicator.rank + 1) % communicator.size,
        (communicator.rank - 1) % communicator.size,
    )
    futures: list[Future[Any]] = [
        communicator.receive(torch.zeros(1), source=before, tag=7, what="a message"),
        duplicate.send(torch.zeros(10**6), destination=after, tag=8, what="a message"),
    ]
    if communicator.rank == 0:
        futures.append(duplicate.sum(torch.ones(1000), what="a sum"))
    dist.barrier()
    communicator.close()
    assert "has given up" in error_of(futures[0].wait)[1]
    return futures


def close_with_an_activity(communicator: Communicator, duplicate: Communicator) -> Any:
    """Close with a thread inside gloo."""
    before = (communicator.rank - 1) % communicator.size
    errors: list[Exception] = []

    def activity() -> None:
        try:
            duplicate.receive(torch.zeros(1), source=before, what="x", patient=True).wait()
        except Exception as error:  # unexplained, if a peer has closed first
            errors.append(error)

    communicator.host.spawn(activity, what="a test activity")
    dist.barrier()
    communicator.close()
    assert len(errors) == 1
    return errors


def close_after_a_failure(communicator: Communicator, duplicate: Communicator) -> Any:
    """Rank 0 closes; the others fail, keep their errors, and close."""
    kept: list[Any] = []
    if communicator.rank > 0:
        kept.append(communicator.sum(torch.ones(1000), what="a sum"))
        for _ in range(2):  # the first fails in flight, the second at its start
            with pytest.raises(CommunicationError, match="lost the connection to rank 0") as caught:
                duplicate.receive(torch.zeros(1), source=0, what="a message").wait()
            kept.append(caught.value)
    communicator.close()
    return kept


WAYS = [
    close_together,
    close_alone,
    close_under_way,
    close_with_an_activity,
    close_after_a_failure,
]


def open_and_close(rank: int, size: int, ways: list[Any], times: int) -> Any:
    gc.disable()  # nothing may depend on the garbage collector
    counts, kept = [held()], []
    for i in range(times):
        communicator = open_one()
        kept.append(ways[i % len(ways)](communicator, communicator.duplicate()))
        counts.append(held(counts[0]))
    dist.barrier()
    return counts


@pytest.mark.parametrize(
    ("size", "times"), [(2, 20), pytest.param(3, 25, marks=pytest.mark.nightly)]
)
def test_closing_releases_threads_and_descriptors(size: int, times: int) -> None:
    """As many exist as before, however it was closed, while errors and futures live on.

    Pitfall 32.
    """
    for counts in run(open_and_close, WAYS, times, workers=size):
        assert counts == [counts[0]] * (times + 1)


# -- pending operations ----------------------------------------------------------------------------


def close_one(rank: int, size: int) -> Any:
    communicator = open_one()
    if rank == 0:
        outcome: list[str] = []

        def activity() -> None:
            request = communicator.receive(torch.zeros(1), source=1, what="a request", patient=True)
            communicator.send(torch.zeros(1), destination=1, tag=1, what="test").wait()
            outcome.append(error_of(request.wait)[1])
            time.sleep(0.2)  # it has something to finish
            outcome.append("ended")

        communicator.host.spawn(activity, what="a test activity")
        meet("rank 0 is being asked", [0, 1])
        communicator.close()
        alive = [t.name for t in threading.enumerate() if t.name == "a test activity"]
        communicator.close()  # again: nothing
        meet("all have seen it", [0, 1, 2])  # alive while the others ask what has happened
        return alive, outcome
    if rank == 1:
        communicator.receive(torch.zeros(1), source=0, tag=1, what="test").wait()
        meet("rank 0 is being asked", [0, 1])
    text = error_of(communicator.receive(torch.zeros(1), source=0, tag=9, what="an answer").wait)[1]
    meet("all have seen it", [0, 1, 2])
    communicator.close()
    return text


def test_closing_ends_background_threads_and_the_operations_of_peers() -> None:
    """close() is not a collective: operations of peers fail long before their time-out."""
    (alive, outcome), *others = run(close_one, workers=3)
    assert alive == []
    assert outcome == ["rank 0 has given up", "ended"]
    for rank, text in enumerate(others, start=1):
        assert text.startswith(f"rank {rank}: an answer failed after"), text
        assert "lost the connection to rank 0, which gave up" in text


def leave_one_behind(rank: int, size: int) -> Any:
    communicator, forever = open_one(closing_seconds=0.2), threading.Event()
    communicator.host.spawn(forever.wait, what="one that does not end")
    dist.barrier()
    started = time.perf_counter()
    communicator.close()
    seconds = time.perf_counter() - started
    forever.set()
    return seconds


def test_closing_abandons_a_thread_after_its_time_limit() -> None:
    """close() waits for a background thread for closing_seconds, not until it ends."""
    assert all(seconds >= 0.2 for seconds in run(leave_one_behind, workers=2))


def leave_one_inside(rank: int, size: int) -> Any:
    communicator = open_one()
    groups.close_connections = lambda group: None  # as if gloo did not wake
    if rank == 1:
        meet("rank 0 has left", [0, 1])
        return None
    kept = communicator.sum(torch.ones(4), what="a sum")
    message = communicator.receive(torch.zeros(1), source=1, what="a message", patient=True)
    ended = threading.Event()

    def finish() -> None:
        time.sleep(1.5)
        ended.set()

    communicator.host.spawn(message.wait, what="one that waits")
    communicator.host.spawn(finish, what="one that computes")
    communicator.close()
    meet("rank 0 has left", [0, 1])
    abandoned = {thread.name for thread in threads._abandoned}
    threads._abandoned.clear()  # for at the very end
    return ended.is_set(), abandoned, error_of(kept.wait)[1]


def test_closing_waits_for_computing_threads_but_not_for_operations_that_gloo_cannot_end() -> None:
    """Gloo sometimes runs an operation until its time-out although its connections are closed.

    close() abandons the call half a second after that.
    """
    ended, abandoned, text = run(leave_one_inside, workers=2)[0]
    assert ended
    assert {"a message", "one that computes"} & abandoned == {"a message"}
    assert text == "rank 0 has given up"


STUCK_IN_GLOO = """
import itertools, time
import torch.distributed as dist
from offbeat.transport.torch_backend.process_groups import GroupFactory

def connect(store, *_):
    store.set("given up", "rank 1 has given up: it is cut off")
    time.sleep(3600)  # as gloo waits for a member that does not connect

dist.ProcessGroupGloo = connect
factory = GroupFactory(dist.HashStore(), 0, 1, "groups", itertools.count())
factory.open("gloo", timeout_seconds=3600)
"""


def test_a_process_ends_although_gloo_still_connects_to_a_member() -> None:
    """Python waits for a few seconds at exit, not for gloo's time limit: here five hours."""
    ended = subprocess.run(
        [sys.executable, "-c", STUCK_IN_GLOO], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("OpeningError: rank 1 has given up: it is cut off\n")


LATE = """
import sys, time
import torch.distributed as dist
from datetime import timedelta
from offbeat.transport.torch_backend import threads

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)  # while Python shuts down

def give_up():
    raise ValueError("given up")

threads._EXIT_SECONDS = 0.1
store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=1))
slow = Slow()
try:
    get = lambda: store.get("a key that nobody sets")
    threads.call_in_thread(get, name="store", poll=give_up, interval_seconds=0.1)
except ValueError:
    sys.exit(3)
"""


def test_a_process_ends_without_abort_although_a_thread_returns_while_python_shuts_down() -> None:
    """Torch calls std::terminate in a thread that cannot get Python's lock any more."""
    ended = subprocess.run([sys.executable, "-c", LATE], capture_output=True, timeout=100)
    assert ended.returncode == 3
    assert b"terminate called" not in ended.stderr


def use_a_closed_one(rank: int, size: int, under_way: bool) -> Any:
    communicator = open_one()
    duplicate, x = communicator.duplicate(), torch.ones(1)
    ended = communicator.sum(torch.ones(1), what="an early sum")
    ended.wait()
    futures: list[Future[Any]] = []
    if under_way:
        futures = [communicator.receive(x, source=1 - rank, tag=3, what="a message")]
        futures += [communicator.await_promise(communicator.host.promise(), what="a promise")]
    dist.barrier()
    communicator.close()
    texts = [error_of(future.wait)[1] for future in futures]
    starts: list[Callable[[], Future[Any]]] = [
        lambda: communicator.sum(x, what="a sum"),
        lambda: duplicate.gather(x, what="a gather"),
        lambda: communicator.send(x, destination=1 - rank, what="a send"),
        lambda: duplicate.receive(x, source=1 - rank, what="a receive"),
        lambda: communicator.await_promise(communicator.host.promise(), what="a promise"),
    ]
    texts += [error_of(lambda start=start: start().wait())[1] for start in starts]
    kept = communicator.host.promise()
    kept.fulfil(3)
    assert communicator.await_promise(kept, what="a kept promise").wait() == 3
    assert all(future.done() for future in futures[:1])
    return texts, ended.wait().item()


@pytest.mark.parametrize("under_way", [False, True])
def test_operations_after_close_raise_an_explicit_error(under_way: bool) -> None:
    """This holds for duplicates, too. Results from before the call remain."""
    names = ["a sum", "a gather", "a send", "a receive", "a promise"]
    for rank, (texts, early) in enumerate(run(use_a_closed_one, under_way, workers=2)):
        if under_way:
            assert texts == [f"rank {rank} has given up"] * 7
        else:
            left = "after this worker has left: attach again"
            assert texts == [f"rank {rank}: {name} {left}" for name in names]
        assert early == 2.0


# -- together -------------------------------------------------------------------------------------


def end_together(rank: int, size: int, times: int) -> Any:
    store = dist.group.WORLD.get_group_store()
    alone, totals = 0, []
    for i in range(times):
        communicator = open_one()
        busy = communicator.duplicate()
        last = [communicator.sum(torch.full((30_000,), 1.0 + rank), what="a sum") for _ in range(3)]
        gathered = busy.gather(torch.full((30_000,), float(rank)), what="a gather")
        if rank == i % size:  # a different worker each time, which has not seen its results
            time.sleep(0.02)
        totals.append([future.wait().unique().tolist() for future in last])
        totals[-1] += [part.unique().tolist() for part in gathered.wait()]
        store.set(f"closing {i}/{rank}", "")
        store.check([f"closing {i}/{rank}"])  # set() does not wait for the store: this does
        communicator.close(together=True)
        alone += not store.check([f"closing {i}/{other}" for other in range(size)])
    dist.barrier()
    return alone, totals


def test_closing_together_waits_for_all_and_loses_no_result() -> None:
    """This holds whichever worker closes last. None waits for the liveness check."""
    results = [1.0 + 2.0 + 3.0] * 3 + [0.0, 1.0, 2.0]
    for alone, totals in run(end_together, 6, workers=3):
        assert alone == 0
        assert totals == [[[value] for value in results]] * 6


def end_together_without_one(rank: int, size: int) -> None:
    communicator = open_one()
    dist.barrier()  # else it may be gone while others still connect to it
    communicator.close(together=rank > 0)  # rank 0 closes as after a failure


def test_closing_together_does_not_wait_for_a_lost_peer() -> None:
    """It raises nothing, because training is over."""
    run(end_together_without_one, workers=3)


# -- again ----------------------------------------------------------------------------------------


def total(communicator: Communicator) -> float:
    return communicator.sum(torch.full((1,), 1.0 + communicator.rank), what="a sum").wait().item()


def open_again(rank: int, size: int) -> Any:
    """Open and close communicators and torch's groups in turn."""
    totals: list[float] = []
    kept = dist.new_group([0, 1])
    for i in range(4):
        communicator = open_one()
        before = dist.new_group([0, 1]) if i % 2 else None
        second = open_one()
        totals += [total(one) for one in (communicator, second, communicator.duplicate())]
        if before is not None:
            dist.destroy_process_group(before)
        communicator.close(together=True)
        third = open_one()  # while the second one is open
        totals += [total(one) for one in (third, second)]
        x = torch.full((1,), 10.0 + rank)
        for group in (kept, None):
            dist.all_reduce(x, group=group)
        totals.append(x.item())
        second.close(together=True)
        third.close(together=True)
    dist.barrier()
    return totals


def test_communicators_can_be_opened_repeatedly() -> None:
    """Torch would give the name of a destroyed group to the next one."""
    for totals in run(open_again, workers=2):
        assert totals == [*[3.0] * 5, 42.0] * 4
