"""Leases: chunks and their plan, exactly once without deaths, none lost with deaths."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler
from typing_extensions import override

from data.leasing import Turns
from offbeat.data.leasing.leases import Lease, Leases
from offbeat.data.leasing.plan import Plan, Settings, chunk_bounds, merged
from offbeat.errors import MismatchError
from offbeat.transport.board import Board, LocalBoard


def settings_of(samples: int, batch_size: int, **options: Any) -> Settings:
    values = {"shuffle": True, "seed": 0, "drop_last": False, **options}
    return Settings(samples, batch_size, **values)


def plan_of(samples: int, batch_size: int, workers: int, epoch: int = 0, **options: Any) -> Plan:
    one = settings_of(samples, batch_size, **options)
    return Plan(one, epoch, workers, tuple(one.range_of(one.batches)))


def samples_of(lease: Lease) -> list[int]:
    return [i for number in range(lease.batches) for i in lease.batch(number)]


# -- the plan ----------------------------------------------------------------------------------


def test_chunks_shrink_to_one_batch() -> None:
    """Written out: a chunk has 1/(16 · 2) of what is left, and at least one batch."""
    bounds = chunk_bounds(100, 2)
    lengths = [b - a for a, b in pairwise(bounds)]
    assert lengths[:5] == [3, 3, 2, 2, 2]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-60:] == [1] * 60
    assert sum(lengths) == 100
    assert chunk_bounds(0, 2) == [0]


def test_the_order_is_that_of_torch() -> None:
    torch_order = DistributedSampler(range(50), 1, 0, seed=3)  # type: ignore[arg-type]
    torch_order.set_epoch(4)
    plan = plan_of(50, 8, 1, epoch=4, seed=3)
    assert plan.samples.tolist() == list(torch_order)
    assert plan_of(5, 8, 1, shuffle=False).batch(0, 0) == [0, 1, 2, 3, 4]


@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 9), st.booleans())
def test_the_batches_of_all_chunks_are_those_of_the_epoch(
    samples: int, batch_size: int, workers: int, drop: bool
) -> None:
    plan = plan_of(samples, batch_size, workers, drop_last=drop)
    batches = [
        plan.batch(chunk, number)
        for chunk in range(plan.chunks)
        for number in range(plan.chunk_batches(chunk))
    ]
    order = plan.settings.order(0).tolist()
    expected = [order[i : i + batch_size] for i in range(0, samples, batch_size)]
    if drop and samples % batch_size:
        expected.pop()
    assert batches == expected
    assert plan.batches == plan.settings.batches == len(expected)
    numbers = [plan.chunk_samples(chunk) for chunk in range(plan.chunks)]
    assert sum(numbers) == sum(map(len, expected))
    assert Plan.from_text(plan.to_text()) == plan


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 4), st.randoms())
def test_what_is_left_of_a_plan_is_what_was_not_done(
    samples: int, batch_size: int, workers: int, random: Any
) -> None:
    """Also for a plan that is the rest of another one."""
    plan = plan_of(samples, batch_size, workers)
    expected = list(plan.samples)
    for _ in range(3):
        done = [random.randint(0, plan.chunk_batches(chunk)) for chunk in range(plan.chunks)]
        expected = [
            sample
            for chunk, count in enumerate(done)
            for number in range(count, plan.chunk_batches(chunk))
            for sample in plan.batch(chunk, number)
        ]
        plan = Plan(plan.settings, 0, random.randint(1, 4), tuple(plan.left(done)))
        assert list(plan.samples) == expected


def test_ranges_are_merged() -> None:
    assert merged([(5, 7), (0, 2), (2, 3)]) == [(0, 3), (5, 7)]


def test_progress_is_the_share_of_all_workers() -> None:
    """With equal speeds: after each batch of a chunk, all have done as many batches."""
    plan = plan_of(100, 1, 2)
    assert plan.progress(0, 0, 100) == 0.02
    assert plan.progress(1, 0, 100) == 0.05  # after the 3 batches of chunk 0
    assert plan.progress(plan.chunks - 1, 0, 100) == 1.0
    rest = Plan(plan.settings, 0, 2, ((40, 100),))
    assert rest.progress(0, 0, 100) == 0.42


def test_an_epoch_that_ends_early_progresses_like_a_whole_one() -> None:
    """The training ends after 30 of 100 batches."""
    part = Plan(settings_of(100, 1), 0, 2, ((0, 30),))
    assert part.progress(0, 0, 30) == 0.02
    assert part.progress(part.chunks - 1, 0, 30) == 0.3
    rest = Plan(part.settings, 0, 2, ((10, 30),))
    assert rest.progress(0, 0, 30) == 0.12


def test_workers_with_other_settings_are_found() -> None:
    board = LocalBoard()
    Leases(board, 0, lambda epoch: plan_of(10, 2, 2, epoch)).plan(0)
    with pytest.raises(MismatchError, match="batch_size=3"):
        Leases(board, 1, lambda epoch: plan_of(10, 3, 2, epoch)).lease(0)


# -- exactly once ------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(1, 200),
    st.integers(1, 16),
    st.lists(st.floats(0.1, 10), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_every_sample_is_used_once_whatever_the_speeds(
    samples: int, batch_size: int, speeds: list[float], epochs: int
) -> None:
    """Workers lease when they are free, in the order of a clock. No epoch waits for another."""
    board, used = LocalBoard(), Counter[tuple[int, int]]()
    workers = [
        Leases(board, w, lambda epoch: plan_of(samples, batch_size, len(speeds), epoch))
        for w in range(len(speeds))
    ]
    clocks = [(0.0, w, 0) for w in range(len(speeds))]  # time, worker, epoch
    while clocks:
        now, w, epoch = clocks.pop(clocks.index(min(clocks)))
        lease = workers[w].lease(epoch)
        if lease is not None:
            used.update((epoch, sample) for sample in samples_of(lease))
            workers[w].acknowledge(lease)
            clocks.append((now + lease.batches / speeds[w], w, epoch))
        elif epoch + 1 < epochs:
            clocks.append((now, w, epoch + 1))
    assert used == Counter((e, i) for e in range(epochs) for i in range(samples))
    assert all(all(workers[0].done(epoch)) for epoch in range(epochs))
    assert sum(worker.repeated for worker in workers) == 0


def test_faster_workers_take_more() -> None:
    """Half the speed gives half the share, and all end within a batch of the slowest."""
    speeds, ends, taken = [1.0, 1.0, 1.0, 0.5], [0.0] * 4, [0] * 4
    board = LocalBoard()
    workers = [Leases(board, w, lambda epoch: plan_of(350, 1, 4, epoch)) for w in range(4)]
    while True:
        w = int(np.argmin(ends))
        if (lease := workers[w].lease(0)) is None:
            break
        taken[w] += lease.batches
        ends[w] += lease.batches / speeds[w]
    assert sum(taken) == 350
    assert taken[3] == pytest.approx(50, abs=3)
    assert max(ends) - min(ends) <= 2.0
    assert max(ends) == pytest.approx(100, abs=2)


# -- deaths ------------------------------------------------------------------------------------


class Fleet:
    """Workers that train on chunks, may be killed, and are replaced.

    ``departures`` workers leave as planned, in the middle of a chunk. A chunk has at least
    ``least`` batches.
    """

    def __init__(self, seed: int, kills: int, *, departures: int = 0, least: int = 1) -> None:
        self.turns = Turns(seed, kills)
        self.departures, self.least = departures, least
        self.epochs, self.number = 3, 3
        self.samples = self.turns.random.randint(1, 60)
        self.used: dict[int, Counter[tuple[int, int]]] = {}
        self.repeated = 0
        for worker in range(3):
            self.start(worker)

    def start(self, worker: int) -> None:
        self.used[worker] = Counter()
        self.turns.start(worker, lambda board: self.work(worker, board))

    def restart(self, lost: int) -> None:
        if self.turns.random.random() < 0.7:
            self.number += 1
            self.start(self.number - 1)

    def leases(self, worker: int, board: Board) -> Leases:
        def propose(epoch: int) -> Plan:
            return replace(plan_of(self.samples, 2, 3, epoch), least=self.least)

        return Leases(board, worker, propose)

    def work(self, worker: int, board: Board) -> None:
        random = self.turns.random
        leases, held = self.leases(worker, board), list[Lease]()
        for epoch in range(self.epochs):
            while True:
                leases.lose(set(self.turns.lost))
                lease = leases.reclaim() or leases.lease(epoch)
                if lease is None:
                    leases.look_again()
                    lease = leases.reclaim()
                if lease is None:
                    break
                if self.departures and random.random() < 0.1:
                    self.departures -= 1
                    self.leave(worker, leases, held, lease)
                    return
                self.used[worker].update((lease.epoch, s) for s in samples_of(lease))
                held.append(lease)
                while len(held) > random.randint(0, 3):  # a mean takes in the oldest ones
                    leases.acknowledge(held.pop(0))
        for lease in held:
            leases.acknowledge(lease)
        self.repeated += leases.repeated

    def leave(self, worker: int, leases: Leases, held: list[Lease], lease: Lease) -> None:
        """Give the rest of ``lease`` back. All models contain the steps on ``held``."""
        for each in held:
            leases.acknowledge(each)
        count = self.turns.random.randint(0, lease.batches - 1)
        part = (sample for number in range(count) for sample in lease.batch(number))
        self.used[worker].update((lease.epoch, sample) for sample in part)
        leases.give_back({(lease.epoch, lease.chunk): lease.first + count} if count else {})
        self.repeated += leases.repeated
        self.turns.lost.add(worker)

    def finish(self) -> None:
        """The survivors look for what deaths near the end have left."""
        self.turns.kills = 0
        last = self.number
        leases = self.leases(last, self.turns.values)
        leases.lose(set(self.turns.lost))
        leases.look_again()
        self.used[last] = Counter()
        for epoch in range(self.epochs):  # all workers may have left in the middle of an epoch
            while lease := leases.reclaim(self.epochs - 1) or leases.lease(epoch):
                self.used[last].update((lease.epoch, s) for s in samples_of(lease))
                leases.acknowledge(lease)
        self.repeated += leases.repeated
        assert all(all(leases.done(epoch)) for epoch in range(self.epochs))


@pytest.mark.parametrize("kills", [0, 1, 6])
def test_no_sample_is_lost_by_deaths_at_any_operation(kills: int) -> None:
    """Deaths before and after each kind of operation, of replacements, too, and late writes."""
    died = 0
    for seed in range(60):
        fleet = Fleet(seed, kills)
        fleet.turns.run(fleet.restart)
        died += len(fleet.turns.lost)
        fleet.finish()
        all_used = sum(fleet.used.values(), Counter())
        expected = Counter((e, s) for e in range(3) for s in range(fleet.samples))
        assert expected.keys() <= all_used.keys()
        if not fleet.turns.lost:
            assert all_used == expected
            assert fleet.repeated == 0
    assert died >= 30 * (kills > 0) * min(kills, 3)


@pytest.mark.parametrize("kills", [0, 2])
def test_a_planned_departure_repeats_no_sample(kills: int) -> None:
    """Without deaths every sample is used once, also those of chunks that are given back twice."""
    again, left = 0, 0
    for seed in range(60):
        fleet = Fleet(seed, kills, departures=2, least=4)
        fleet.turns.run(fleet.restart)
        left += 2 - fleet.departures
        fleet.finish()
        all_used = sum(fleet.used.values(), Counter())
        expected = Counter((e, s) for e in range(3) for s in range(fleet.samples))
        assert expected.keys() <= all_used.keys()
        again += fleet.repeated
        if not kills:
            assert all_used == expected
            assert fleet.repeated == 0
    assert left >= 60
    assert (again > 0) == (kills > 0)


def test_what_was_used_of_a_returned_chunk_is_done() -> None:
    """Before and after another worker leases the rest, which it may also lose."""
    board = LocalBoard()

    def propose(epoch: int) -> Plan:
        return replace(plan_of(20, 2, 1, epoch), least=5)

    workers = [Leases(board, number, propose) for number in range(3)]
    lease = workers[0].lease(0)
    assert lease is not None
    workers[0].give_back({(0, 0): 2})
    assert workers[1].done(0) == [2, 0]
    workers[1].lose([0])
    rest = workers[1].reclaim()
    assert rest is not None
    assert samples_of(rest) == samples_of(lease)[4:]
    assert workers[1].repeated == 0
    assert workers[1].done(0) == [2, 0]
    workers[2].lose([0, 1])
    last = workers[2].reclaim()
    assert last is not None
    assert samples_of(last) == samples_of(rest)
    assert workers[2].repeated > 0
    workers[2].acknowledge(last)
    assert workers[1].done(0) == [5, 0]


def test_only_chunks_that_were_pointed_at_are_read() -> None:
    """Two of them, and two workers share the reading."""
    reads: list[str] = []

    class Counting(LocalBoard):
        @override
        def get(self, key: str) -> str:
            reads.append(key)
            return super().get(key)

    leases = Leases(Counting(), 0, lambda epoch: plan_of(100, 1, 2, epoch))
    for _ in range(2):
        lease = leases.lease(0)
        assert lease is not None
        leases.acknowledge(lease)
    reads.clear()
    done = leases.done(0)
    assert done == [3, 3] + [0] * (leases.plan(0).chunks - 2)
    assert reads == ["cursor/0", "lease/0/0", "lease/0/1"]
    reads.clear()
    assert leases.done(0, 1, 2) == done[1::2]
    assert reads == ["cursor/0", "lease/0/1"]


def test_a_worker_taken_for_lost_cannot_acknowledge() -> None:
    """Its chunk has another owner by then, and stays that owner's."""
    board = LocalBoard()
    make = lambda worker: Leases(board, worker, lambda epoch: plan_of(4, 2, 2, epoch))  # noqa: E731
    slow, other = make(0), make(1)
    lease = slow.lease(0)
    assert lease is not None
    other.lose([0])
    taken = other.reclaim()
    assert taken is not None
    assert (taken.chunk, taken.state) == (lease.chunk, "1#2")
    assert other.repeated == 2
    slow.acknowledge(lease)
    assert board.get(f"lease/0/{lease.chunk}") == "1#2"
    other.acknowledge(taken)
    assert board.get(f"lease/0/{lease.chunk}") == "done#2"


def test_a_worker_that_is_lost_right_after_a_takeover_leaves_the_chunk() -> None:
    """It wrote that it may hold the chunk before it leased it. Worker 2 takes it over once more."""
    board = LocalBoard()
    workers = [Leases(board, number, lambda epoch: plan_of(4, 2, 1, epoch)) for number in range(3)]
    first = workers[0].lease(0)
    workers[1].lose([0])
    second = workers[1].reclaim()
    workers[2].lose([0])
    assert workers[2].reclaim() is None  # worker 1 owns it
    workers[2].lose([0, 1])
    third = workers[2].reclaim()
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.chunk == second.chunk == third.chunk
    assert [lease.state for lease in (first, second, third)] == ["0#1", "1#2", "2#3"]
