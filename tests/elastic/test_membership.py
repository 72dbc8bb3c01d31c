"""Membership changes of real processes that die, are stopped, or join.

Each worker contributes 2 to the power of its identity, so that a sum tells who took part.
"""

import logging
import math
import os
import re
import signal
import threading
import time
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from cells import some
from gathered import PLACES, die, gather_in_order, kill_at, meet, store
from loops import error_of
from offbeat.elastic import agreement, heartbeats, membership
from offbeat.elastic.gathering import gathering_from_environment
from offbeat.elastic.silence import SilenceLimits, machines_are_down
from offbeat.elastic.store import SharedStore
from offbeat.errors import CommunicationError
from workers import run

TIMEOUT_SECONDS = 100.0  # more than a test may take, so that none ends by a time-out
SUMS = 3  # of the last generation


def mask(*numbers: int) -> float:
    return float(sum(2**number for number in numbers))


class Worker:
    """A worker that computes sums through all generations."""

    def __init__(
        self,
        number: int,
        size: int,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silence_seconds: float = 30.0,
    ) -> None:
        gather_in_order(number, size, silence_seconds=silence_seconds)
        transport = gathering_from_environment()
        assert transport is not None
        self.communicator: Any = transport.make_communicator(timeout_seconds)
        self.number, self.steps, self.totals = number, 0, []
        self.generations: list[Any] = []
        self._enter(self.membership.generation)

    @property
    def membership(self) -> Any:
        return self.communicator.membership

    def _enter(self, generation: Any) -> None:
        self.communicator, self.generation = generation.communicator, generation
        self.generations.append((generation.number, generation.members))
        self.totals.append([])

    def change(self) -> None:
        """Start or join a membership change."""
        self.communicator.close()
        self._enter(self.membership.next_generation(step=self.steps))

    def step(self, ready: bool = True) -> None:
        """Compute a sum, or enter the next generation."""
        try:
            if self.membership.change_requested():
                raise CommunicationError("wanted")
            x = torch.tensor([mask(self.number), ready])
            total = self.communicator.sum(x, what="a sum").wait().tolist()
        except CommunicationError:
            self.change()
        else:
            self.steps += 1
            self.totals[-1].append(total)

    def until(self, *numbers: int, key: str | None = None) -> "Worker":
        """Compute sums until exactly these are in the generation and all see ``key`` in the store.

        All of them stop after the same sum.
        """
        deadline, kept = time.monotonic() + 40, key and store()
        while True:
            assert time.monotonic() < deadline, (self.generations, numbers)
            self.step(len(self.totals[-1]) >= SUMS and (not kept or kept.check([key])))
            if (
                self.generation.members == numbers
                and [mask(*numbers), len(numbers)] in self.totals[-1]
            ):
                self.totals[-1][-1][1] = 0.0  # a later call needs another sum
                return self

    def finish(self) -> Any:
        """End the training, check the sums of each generation, and return the generations."""
        self.membership.leave(ended=True)
        self.communicator.close(together=True)
        for (_, members), totals in zip(self.generations, self.totals, strict=True):
            assert {total for total, _ in totals} <= {mask(*members)}
        return self.generations


def stop(*args: Any) -> None:
    """Stop this process as the kernel does, and tell the others its id."""
    store().set("stopped", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


# -- deaths ---------------------------------------------------------------------------------------


def lose(rank: int, size: int, victims: list[int]) -> Any:
    worker = Worker(rank, size).until(*range(size))
    if rank in victims:
        die()
    survivors = [other for other in range(size) if other not in victims]
    return worker.until(*survivors).finish()


@pytest.mark.parametrize("victims", some([[0], [1], [2], [3], [0, 2], [1, 2, 3]], 0, 3, 5), ids=str)
def test_the_others_continue_after_deaths(victims: list[int]) -> None:
    """Any worker may die, also rank 0, two at once, or all but one."""
    results = run(lose, victims, workers=4, newcomers=0, may_die=tuple(victims))
    survivors = [rank for rank in range(4) if rank not in victims]
    for rank in survivors:
        assert results[rank][0] == (0, (0, 1, 2, 3))
        assert results[rank][-1][1] == tuple(survivors)


def die_while_opening(rank: int, size: int, place: str) -> Any:
    if rank == 1:
        kill_at(place if place in PLACES else "before it opens")
    elif place == "before the others connect to it":
        connect = agreement.Agreement.connect_heartbeats

        def connect_later(self: Any, members: Any) -> Any:
            store().wait(["died"])
            time.sleep(0.2)  # until its process has ended
            return connect(self, members)

        agreement.Agreement.connect_heartbeats = connect_later  # type: ignore[method-assign]
    return error_of(lambda: Worker(rank, size).step())[1]


@pytest.mark.parametrize(
    "place", ["before the others connect to it", "before it opens", "while all connect"]
)
def test_a_death_in_the_first_generation_is_named(place: str) -> None:
    """Not that of another worker which ends because of it."""
    results = run(die_while_opening, place, workers=4, newcomers=0, may_die=(1,))
    for text in (results[0], *results[2:]):
        assert re.search(r": (rank [023] has given up: )?rank 1 died$", text), text


DURING = ["before it is here", "before it proposes", "before it opens", "while all connect"]


def lose_another(rank: int, size: int, place: str) -> Any:
    worker = Worker(rank, size).until(*range(size))
    if rank == 0:  # the lowest, which proposes
        kill_at(place)
    if rank == 2:
        die()
    return worker.until(1, 3).finish()


@pytest.mark.parametrize("place", DURING)
def test_a_member_may_die_during_a_membership_change(place: str) -> None:
    """At any step of it: the next lowest proposes, or another generation follows, at once."""
    results = run(lose_another, place, workers=4, newcomers=0, may_die=(0, 2))
    for rank in (1, 3):
        assert results[rank][-1] == (1 if place in DURING[:2] else 2, (1, 3))


def leave_a_child(rank: int, size: int) -> Any:
    worker = Worker(rank, size).until(*range(size))
    if rank == 1:
        child = os.fork()  # such as a data loader
        if child == 0:
            time.sleep(60)
            os._exit(0)
        store().set("child", str(child))
        die()
    worker.until(0, 2)
    if rank == 0:
        os.kill(int(store().get("child")), signal.SIGKILL)
    return worker.finish()


def test_a_surviving_child_process_hides_no_death() -> None:
    """It has inherited the connections of gloo and keeps them open for a while."""
    results = run(leave_a_child, workers=3, newcomers=0, may_die=(1,))
    for rank in (0, 2):
        assert results[rank][-1][1] == (0, 2)


def lose_the_store(rank: int, size: int) -> Any:
    worker = Worker(rank, size).until(*range(size))
    if rank == 0:
        os.kill(int(store().get("store")), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(lambda: worker.until(1, 2))[1]


def test_without_the_store_no_worker_continues() -> None:
    """The error names the store and the remedy."""
    for rank, text in enumerate(run(lose_the_store, workers=3, newcomers=0, may_die=(0,))[1:], 1):
        assert re.match(
            rf"rank {rank}: agreeing on the next generation failed: the store at 127\.0\.0\.1:\d+ "
            "cannot be reached",
            text,
        ), text
        assert "keep it in a process that outlives the workers, with offbeat store" in text


# -- silence --------------------------------------------------------------------------------------


def be_stopped(rank: int, size: int) -> Any:
    warnings = log_of_this_process()
    worker = Worker(rank, size, timeout_seconds=1.0, silence_seconds=0.5).until(*range(size))
    if rank == 2:
        stop()
        with pytest.raises(CommunicationError) as caught:
            worker.until(0, 1)
        worker.communicator.close()
        store().set("told", "")
        store().wait(["0 saw it", "1 saw it"])  # else a membership change could end their last sum
        again = Worker(size, size)  # this process, as a newcomer
        return str(caught.value), again.until(0, 1, size).finish()
    worker.until(0, 1)
    if rank == 0:
        os.kill(int(store().get("stopped")), signal.SIGCONT)
    before = list(worker.until(0, 1, key="told").generations)
    store().set(f"{rank} saw it", "")
    return before, worker.until(0, 1, size).finish(), warnings


def test_a_stopped_worker_is_left_behind() -> None:
    """It raises when it resumes, does not disturb the others, and may join as a newcomer.

    One of the others logs a warning.
    """
    *others, (text, generations) = run(be_stopped, workers=3, newcomers=0)
    assert [warnings for _, _, warnings in others] == [
        [
            "rank 0: generation 1 continues without rank 2, which ended or did not answer "
            "within 0.5 s"
        ],
        [],
    ]
    for before, after, _ in others:
        assert before == [(0, (0, 1, 2)), (1, (0, 1))]
        assert after == [*before, (2, (0, 1, 3))]
    assert re.match(r"rank 2 was left behind at step \d+: ranks 0, 1 are in generation 1", text), (
        text
    )
    assert "The others wait 0.5 s for a silent worker" in text
    assert "Attach again to join them" in text
    assert generations == [(2, (0, 1, 3))]


def be_late(rank: int, size: int, why: str) -> Any:
    worker = Worker(rank, size, silence_seconds=1.0 if why == "a stuck thread" else 30.0)
    worker.until(*range(size))
    if rank == 1:
        die()
    if rank == 2 and why == "computing":
        time.sleep(0.7)
    elif rank == 2:  # such as one blocked in gloo on half of a message
        worker.communicator.host.spawn(lambda: time.sleep(4), what=why)
    return worker.until(0, 2).finish()


@pytest.mark.parametrize("why", ["computing", "a stuck thread"])
def test_a_late_member_is_not_left_behind(why: str) -> None:
    """A busy one is awaited while it may be silent. A stuck thread delays its arrival little."""
    results = run(be_late, why, workers=3, newcomers=0, may_die=(1,))
    assert results[0] == results[2] == [(0, (0, 1, 2)), (1, (0, 2))]


def stop_before_proposing(rank: int, size: int) -> Any:
    worker = Worker(rank, size, timeout_seconds=0.6).until(*range(size))
    if rank == 0:
        agreement.Agreement._propose = stop  # type: ignore[method-assign, assignment]
    if rank == 1:
        die()
    worker.until(2, 3)
    if rank == 2:
        os.kill(int(store().get("stopped")), signal.SIGKILL)
    return worker.finish()


def test_a_member_that_falls_silent_before_it_proposes_is_left_behind() -> None:
    """It has arrived, so it is in the next generation; the one after excludes it."""
    results = run(stop_before_proposing, workers=4, newcomers=0, may_die=(0, 1))
    for generations in results[2:]:
        assert generations == [(0, (0, 1, 2, 3)), (2, (2, 3))]


def be_stopped_before_opening(rank: int, size: int) -> Any:
    worker = Worker(rank, size, timeout_seconds=1.5, silence_seconds=0.2).until(*range(size))
    if rank == 0:
        die()
    if rank == 2:
        enter = membership.StoreMembership.enter

        def stop_and_enter(*args: Any) -> Any:
            membership.StoreMembership.enter = enter  # type: ignore[method-assign]
            stop()
            return enter(*args)

        membership.StoreMembership.enter = stop_and_enter  # type: ignore[assignment, method-assign]
        with pytest.raises(CommunicationError) as caught:
            worker.until(1, 3)
        worker.communicator.close()
        store().set("told", "")
        return str(caught.value)
    worker.until(1, 3)
    if rank == 1:  # later than agreeing may take
        threading.Timer(2.0, os.kill, (int(store().get("stopped")), signal.SIGCONT)).start()
    return worker.until(1, 3, key="told").finish()


def test_a_member_that_was_stopped_during_the_opening_is_left_behind() -> None:
    """However long it was stopped, its error says so, and not that its own time is up."""
    _, first, text, last = run(be_stopped_before_opening, workers=4, newcomers=0, may_die=(0,))
    assert re.match(r"rank 2 was left behind at step \d+: ranks 1, 3 are in generation 2", text), (
        text
    )
    assert first == last == [(0, (0, 1, 2, 3)), (2, (1, 3))]


def be_stopped_at_the_store(rank: int, size: int) -> int:
    if rank == 0:
        time.sleep(0.1)
        os.kill(int(store().get("pid")), signal.SIGSTOP)
        time.sleep(0.6)
        os.kill(int(store().get("pid")), signal.SIGCONT)
        return 0

    def ask() -> int:
        for _ in range(20):
            time.sleep(0.01)
        return 1

    store().set("pid", str(os.getpid()))
    shared = SharedStore(store(), "here")
    return shared.call(ask, "this worker", seconds=0.5)


def test_the_time_limit_of_the_store_excludes_a_stop() -> None:
    assert run(be_stopped_at_the_store, workers=2, newcomers=0) == [0, 1]


def be_hasty(rank: int, size: int, silent: set[int]) -> Any:
    worker = Worker(rank, size, silence_seconds=0.6).until(*range(size))
    if rank == 0:
        worker.membership._agreement.heartbeats.silent |= silent
        worker.change()  # by itself, as if its link had failed for a moment
    else:
        time.sleep(1.0 + 0.3 * rank)  # computing
    return worker.until(*range(size)).finish()


@pytest.mark.parametrize("silent", [set(), {1, 2}], ids=str)
def test_a_minority_does_not_exclude_the_others(silent: set[int]) -> None:
    """It waits for timeout_seconds; a majority waits for a while since the last arrival.

    The second worker comes 0.3 s after the first, which came after 1.3 s. To a worker whose network
    is down, all others are ``silent``.
    """
    for generations in run(be_hasty, silent, workers=3, newcomers=0):
        assert generations == [(0, (0, 1, 2)), (1, (0, 1, 2))]


def lose_power(rank: int, size: int) -> Any:
    worker = Worker(rank, size, silence_seconds=TIMEOUT_SECONDS).until(*range(size))
    meet("all are in generation 0", rank, range(size))
    if rank == 3:
        meet("the others have gone on", rank, range(size))
        worker.communicator.close()
        return None
    worker.membership._agreement.heartbeats.silent.add(3)
    worker.change()
    worker.until(0, 1, 2)
    meet("the others have gone on", rank, range(size))
    return worker.finish()


def test_a_machine_without_power_is_not_awaited_for_long() -> None:
    """Its connections have failed in the kernel."""
    *generations, _ = run(lose_power, workers=4, newcomers=0)
    assert generations == [[(0, (0, 1, 2, 3)), (1, (0, 1, 2))]] * 3


def go_away(rank: int, size: int) -> Any:
    worker = Worker(rank, size).until(*range(size))
    if rank == 1:
        worker.membership.leave(ended=False)
        worker.communicator.close()
        meet("the others have gone on", rank, range(3))
        return None
    worker.until(0, 2)
    meet("the others have gone on", rank, range(3))
    return worker.finish()


def test_a_worker_that_has_left_is_not_awaited() -> None:
    """Its process lives."""
    results = run(go_away, workers=3, newcomers=0)
    assert results[0] == results[2] == [(0, (0, 1, 2)), (1, (0, 2))]


def come_too_late(rank: int, size: int) -> Any:
    worker = Worker(rank, size).until(*range(size))
    if rank < 2:
        worker.membership.leave(ended=True)
        worker.communicator.close()
        return None
    return error_of(lambda: worker.until(2))[1]


def test_no_generation_begins_once_training_has_ended() -> None:
    """A late worker raises EndedError."""
    text = run(come_too_late, workers=3, newcomers=0)[2]
    assert text == "rank 2: the others have ended the training"


# -- divided networks -----------------------------------------------------------------------------


Cut = list[tuple[int, int]]


@pytest.mark.parametrize(
    ("workers", "cut", "expected"),
    [
        ([0, 1, 2], [], [0, 1, 2]),
        ([0, 1, 2, 3], [(0, 1), (0, 2), (0, 3)], [1, 2, 3]),
        ([0, 1, 2, 3], [(0, 2), (0, 3), (1, 2), (1, 3)], [0, 1]),
        ([0, 1, 2, 3], [(0, 1), (0, 2), (1, 3), (2, 3)], [0, 3]),
        ([1, 3, 4, 6, 7], [(1, 4), (1, 7), (3, 4), (3, 7), (4, 6), (6, 7)], [1, 3, 6]),
        ([0, 1, 2, 3], [(1, 2)], [0, 1, 3]),
        ([0, 1], [(0, 4)], [0, 1]),  # worker 4 has not arrived
        ([5], [], [5]),
    ],
)
def test_the_largest_connected_part_continues(
    workers: list[int], cut: Cut, expected: list[int]
) -> None:
    """Of equally large parts it is the one with the lowest identity. One side may report a cut."""
    for both in (False, True):
        pairs = [*cut, *((b, a) for a, b in cut if both)]
        unreachable = {worker: [b for a, b in pairs if a == worker] for worker in workers}
        assert agreement.connected(unreachable) == expected


@pytest.mark.parametrize(
    ("old", "new", "cut", "expected"),
    [
        ([0], [1, 2], [(0, 1), (0, 2)], [0]),
        ([0, 1, 2, 3], [4, 5, 6, 7, 8], list(product(range(4), range(4, 9))), [0, 1, 2, 3]),
        ([0, 1, 2], [3, 4], [(0, 1), (0, 2), (1, 3), (1, 4), (2, 3), (2, 4)], [1, 2]),
        ([0, 1, 2], [3, 4], [(0, 1), (0, 2), (0, 3), (1, 4)], [1, 2, 3]),
        ([0], [1, 2, 3], [(0, 2), (1, 2)], [0, 1, 3]),
        ([0], [1, 2, 3], [(1, 2), (1, 3)], [0, 2, 3]),
        ([], [0, 1, 2, 3], [(0, 1), (0, 2), (0, 3)], [1, 2, 3]),
        ([], [0, 1, 2, 3], list(product([0, 1], [2, 3])), [0, 1]),
    ],
)
def test_newcomers_cannot_exclude_a_worker_that_has_the_model(
    old: list[int], new: list[int], cut: Cut, expected: list[int]
) -> None:
    """A newcomer joins only if it can connect to all workers that continue."""
    unreachable = {worker: [b for a, b in cut if a == worker] for worker in [*old, *new]}
    assert agreement.connected(unreachable, new) == expected


def log_of_this_process() -> list[str]:
    """Return a list to which the warnings from now on are appended."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offbeat").addHandler(handler)
    return warnings


def be_divided(rank: int, size: int, cut: list[set[int]]) -> Any:
    """Change the generation while pairs in ``cut`` cannot connect, although all reach the store."""
    worker = Worker(rank, size, silence_seconds=2.0).until(*range(size))
    lacking = {other for other in range(size) if {rank, other} in cut}
    connect, opened = membership.StoreMembership._communicator, heartbeats._open

    def fail(self: Any, number: int, members: Any) -> Any:
        if lacking.intersection(members):
            time.sleep(2.0)
            raise CommunicationError("not connected")
        return connect(self, number, members)

    membership.StoreMembership._communicator = fail  # type: ignore[method-assign]
    heartbeats._open = lambda addresses: opened(
        {other: address for other, address in addresses.items() if other not in lacking}
    )
    warnings = log_of_this_process()
    meet("the network is cut", rank, range(size))
    try:
        worker.change()
    except CommunicationError as error:
        worker.communicator.close()
        return str(error)
    return worker.until(0, 1).finish(), warnings[0]


def test_an_even_division_continues_on_the_side_of_the_lowest_worker() -> None:
    """The others raise the reason, and the remaining workers log a warning."""
    cut = [{0, 2}, {0, 3}, {1, 2}, {1, 3}]
    *left, third, fourth = run(be_divided, cut, workers=4, newcomers=0)
    for rank, (generations, warning) in enumerate(left):
        assert generations == [(0, (0, 1, 2, 3)), (2, (0, 1))]
        assert warning == (
            f"rank {rank}: generation 2 continues without ranks 2, 3, "
            "which cannot connect to all of ranks 0, 1"
        )
    for rank, text in enumerate((third, fourth), start=2):
        assert text.startswith(f"rank {rank} was left behind at step "), text
        assert (
            "ranks 0, 1 are in generation 2. It and they cannot all connect to each other" in text
        )


# -- newcomers ------------------------------------------------------------------------------------


def come(rank: int, size: int, deaths: bool) -> Any:
    if rank == size:
        store().wait(["come"])
    worker = Worker(rank, size)
    if rank < size:
        worker.until(*range(size))
        store().set("come", "")
    if rank == 1 and deaths:
        die()
    return worker.until(*(n for n in range(size + 1) if n != 1 or not deaths)).finish()


@pytest.mark.parametrize("deaths", [False, True])
def test_a_newcomer_is_admitted(deaths: bool) -> None:
    """It enters by a membership change, with a new identity, also while another worker dies."""
    results = run(come, deaths, workers=3, newcomers=1, may_die=(1,) if deaths else ())
    members = (0, 2, 3) if deaths else (0, 1, 2, 3)
    for rank in members:
        assert results[rank][-1][1] == members
        assert results[rank][-1] == results[0][-1]
    (entry, *_) = results[3]
    assert 3 in entry[1]
    assert entry in results[0]


def come_and_die(rank: int, size: int, place: str) -> Any:
    if rank >= size:
        store().wait(["come"])
        kill_at(place)
        Worker(rank, size)
    worker = Worker(rank, size).until(*range(size))
    if rank == 0:
        store().set("come", "")
    worker.until(*range(size), key="died")
    return worker.finish()


@pytest.mark.parametrize("place", ["having asked", *DURING[2:]])
def test_a_newcomer_may_die_while_it_joins(place: str) -> None:
    """At any step of it; the others continue."""
    results = run(come_and_die, place, workers=2, newcomers=1, may_die=(2,))
    for generations in results[:2]:
        assert generations[0] == (0, (0, 1))
        assert generations[-1][1] == (0, 1)


# -- stores and messages --------------------------------------------------------------------------


def send_late(rank: int, size: int) -> Any:
    worker = Worker(rank, size, silence_seconds=0.7).until(*range(size))
    if rank == 0:
        worker.change()
    worker.until(*range(size))
    communicator, late, total = worker.communicator, torch.zeros(1), torch.ones(1)
    if rank == 0:
        time.sleep(1.0)
        communicator.send(torch.ones(1), destination=1, what="a message").wait()
        time.sleep(1.0)
    else:
        communicator.receive(late, source=0, what="a message").wait()
    communicator.sum(total, what="a sum").wait()
    worker.finish()
    return late.item(), total.item(), len(worker.generations)


def test_operations_of_a_later_generation_have_the_full_time_limit() -> None:
    """The opening of the generation has less."""
    assert run(send_late, workers=2, newcomers=0) == [(0.0, 2.0, 2), (1.0, 2.0, 2)]


def be_asked_too_early(rank: int, size: int) -> Any:
    """Rank 3 asks to join in the pause after the change that the death of rank 2 has caused."""
    if rank == 3:
        store().wait(["they pause"])
        worker = Worker(rank, size)
    else:
        worker = Worker(rank, size).until(0, 1, 2)
        if rank == 2:
            die()
        members = worker.until(0, 1).membership
        pause = members._pause_end - time.monotonic()
        members._pause_end = math.inf
        store().set("they pause", "1")
        while [mask(0, 1), 2] not in worker.totals[-1]:  # both have found the request
            worker.step(ready=members._poll.found())
        assert worker.generation.members == (0, 1)
        assert pause <= 7.5, "a quarter of 30 s"
        members._pause_end = 0.0
    return worker.until(0, 1, 3).finish()


def test_a_newcomer_waits_for_the_pause_after_a_change() -> None:
    """So newcomers that join and vanish again and again do not stop training."""
    results = run(be_asked_too_early, workers=3, newcomers=1, may_die=(2,))
    for generations in (*results[:2], results[3]):
        assert generations[-1][1] == (0, 1, 3)


@pytest.mark.parametrize(
    ("present", "awaited", "limit"),
    [({0, 1}, {2}, 30.0), ({0}, {1}, 30.0), ({0}, {1, 2}, 100.0), ({0, 1}, {2, 3, 4}, 100.0)],
)
def test_silent_members_are_given_up_after_a_limit(
    present: set[int], awaited: set[int], limit: float
) -> None:
    """By at least half of the members 30 s after the newest arrival, by others at the time-out."""
    limits = SilenceLimits(timeout_seconds=100.0)
    for seconds in (limit - 1, limit + 1):
        # The newest member arrived 40 s after this worker, or there was none.
        for waited in (seconds + 40, seconds) if limit == 30.0 else (seconds,):
            given_up = limits.passed(present, awaited, waited, seconds, limits.usual)
            assert given_up == (seconds > limit)
    assert limits.retry == 3.0
    assert SilenceLimits(2.0).usual == SilenceLimits(2.0).retry == 2.0


def test_a_majority_does_not_wait_for_machines_that_are_down() -> None:
    assert machines_are_down({0, 1}, {2}, {2})
    assert not machines_are_down({0, 1}, {2, 3}, {2})
    assert not machines_are_down({0}, {1, 2}, {1, 2}), "the network of this worker may be down"
    assert not machines_are_down({0, 1}, {2}, {1, 2}), "rank 1 has arrived nevertheless"


def test_the_pause_is_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as long as the change took, at most a quarter of the patience with the others.

    It begins with the first attempt to open a generation, so further attempts admit no newcomer.
    """
    now, attempts = [10.0], iter(((1.0, "a newcomer died"), (0.5, ""), (3.0, "")))

    def enter(number: int, decision: agreement.Decision) -> None:
        seconds, error = next(attempts)
        now[0] += seconds
        if error:
            raise CommunicationError(error)

    monkeypatch.setattr(membership.time, "monotonic", lambda: now[0])
    one: Any = object.__new__(membership.StoreMembership)
    one._limits, one._pause_end, one._opened = SilenceLimits(100.0), 0.0, math.inf
    one._worker, one._decision = 0, agreement.Decision([0], 1)
    one._agreement, one._poll, one.generation, one.enter = Mock(), Mock(), Mock(number=0), enter
    one._agreement.decide.return_value, one._agreement.timeout_seconds = one._decision, 100.0
    for begin, end in ((10.0, 11.5 + 6), (50.0, 53 + 7.5)):
        now[0] = begin
        one.next_generation(step=1)
        assert one._pause_end == end
    admits = [call.kwargs["admits"] for call in one._agreement.decide.call_args_list]
    assert admits == [True, False, True]
