"""A mean under way: launched, arrived, landed, whatever the workers do meanwhile."""

import copy
import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loops import bits
from offbeat.checkpoint import load, save
from offbeat.fabric import Completed, Team, Wire, open_communicator
from offbeat.averaging import InFlight, Outer
from offbeat.averaging.in_flight import cut
from problems import OPTIMIZERS, flat, make_batch, make_model, train_step
from worlds import run

SHAPES = [(40, 30), (7,), (1200,)]


def numbers(*seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Another list of tensors for each seed."""
    generator = torch.Generator().manual_seed(sum(1000**i * n for i, n in enumerate(seed, 1)))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def vector(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).clone()


class Worker:
    """A worker who starts from what all hold, and takes steps of its own."""

    def __init__(
        self, rank: int, wire: Any = "float32", dtype: torch.dtype = torch.float64
    ) -> None:
        self.rank, self.dtype, self.steps = rank, dtype, 0
        self.team = Team(open_communicator(None, 20, what="a test"))
        self.wire = Wire(self.team, wire)
        self.x = numbers(0, dtype=dtype)

    def part(self, tensors: list[Tensor] | None = None, **options: Any) -> InFlight:
        tensors = self.x if tensors is None else tensors
        return InFlight(self.team, self.wire, tensors, **{"name": "all", **options})

    def step(self) -> None:
        """x ← x + an update of its own."""
        self.steps += 1
        for x, update in zip(
            self.x, numbers(1 + self.rank, self.steps, dtype=self.dtype), strict=True
        ):
            x.add_(update)

    def launch(self, part: InFlight, weight: float = 1.0, total: float | None = None) -> None:
        total = float(self.team.size) if total is None else total
        part.launch(Completed(total), contribute=weight > 0, step=self.steps, what="a test")


# -- without an outer step ------------------------------------------------------------------------


def land_late(rank: int, size: int, rounds: int, anchored: bool) -> list[tuple[Tensor, ...]]:
    """Of each round: the snapshot, x before the landing, x after it."""
    worker = Worker(rank)
    part = worker.part(anchored=anchored)
    seen = []
    for _ in range(rounds):
        worker.step()
        snapshot = vector(worker.x)
        worker.launch(part)
        for _ in range(rank + 1):
            worker.step()
        before = vector(worker.x)
        assert part.land(worker.steps)
        seen.append((snapshot, before, vector(worker.x)))
    return seen


@pytest.mark.parametrize("anchored", [False, True])
def test_a_landing_keeps_own_steps_and_the_mean_of_the_workers(anchored: bool) -> None:
    """x ← x + (mean(s) − s), whoever has taken how many steps since; mean(x) does not move."""
    for each in zip(*run(land_late, 3, anchored, workers=3), strict=True):
        mean = sum(snapshot for snapshot, _, _ in each) / 3
        for snapshot, before, after in each:
            torch.testing.assert_close(after, before + mean - snapshot, rtol=0, atol=1e-13)
            assert not torch.equal(after, before)
        means = [sum(one[i] for one in each) / 3 for i in (1, 2)]
        torch.testing.assert_close(*means, rtol=0, atol=1e-13)


def restore_under_way(rank: int, size: int, keeps_residual: bool) -> tuple[Tensor, ...]:
    """Rank 1 loses its model while its steps are on their way."""
    worker = Worker(rank)
    part = worker.part(anchored=True, keeps_residual=keeps_residual)
    start = torch.cat(part.base).clone()
    worker.step()
    sent = vector(worker.x) - start
    worker.launch(part)
    worker.step()
    if rank == 1:
        for x in worker.x:
            x.fill_(torch.nan)
        part.restore()
    part.land(worker.steps)
    return vector(worker.x), torch.cat(part.base), start, sent


@pytest.mark.parametrize("keeps_residual", [False, True])
def test_who_is_restored_under_way_lands_on_what_all_hold(keeps_residual: bool) -> None:
    """x = P; and P has what it had sent before."""
    results = run(restore_under_way, keeps_residual, workers=3)
    want = results[0][2] + sum(sent for *_, sent in results) / 3
    for rank, (x, base, _, _) in enumerate(results):
        torch.testing.assert_close(base, want, rtol=0, atol=1e-13)
        assert torch.allclose(x, base, rtol=0, atol=1e-13) == (rank == 1)


def land_at_once(rank: int, size: int, wire: str, outer: Outer) -> list[Tensor]:
    worker = Worker(rank, wire, torch.float32)
    part = worker.part(outer=outer)
    seen = []
    for _ in range(3):
        worker.step()
        worker.launch(part)
        part.land(worker.steps)
        seen += [vector(worker.x), torch.cat(part.base) if part.base else vector(worker.x)]
    return seen


@pytest.mark.parametrize("wire", ["float32", "int8"])
@pytest.mark.parametrize("outer", [Outer(), Outer(0.7, 0.9)], ids=str)
def test_without_a_step_since_the_launch_x_is_exactly_what_all_hold(
    wire: str, outer: Outer
) -> None:
    """The same bits on all workers, those of P where it is kept."""
    results = run(land_at_once, wire, outer, workers=3)
    for seen in results:
        for got, want in zip(seen, results[0], strict=True):
            assert torch.equal(bits(got), bits(want))
        for x, common in zip(seen[::2], seen[1::2], strict=True):
            assert torch.equal(x, common)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["momentum", "adamw"])
def test_a_lone_worker_does_not_notice(kind: str, dtype: torch.dtype) -> None:
    """Training with a mean under way all the time equals training without, bit for bit."""

    def train(rank: int, size: int, fly: bool) -> Tensor:
        team = Team(open_communicator(None, 20, what="a test"))
        model = make_model(dtype=dtype)
        optimizer = OPTIMIZERS[kind](model.parameters())
        part = InFlight(team, Wire(team), list(model.parameters()), name="all")
        for step in range(12):
            train_step(model, optimizer, make_batch(0, step, dtype=dtype))
            if fly and step % 3 == 1:
                part.land(step)
                part.launch(Completed(1.0), contribute=True, step=step, what="a test")
        part.land(12)
        return flat(model)

    assert torch.equal(run(train, True, workers=1)[0], run(train, False, workers=1)[0])


# -- the outer step -------------------------------------------------------------------------------

WEIGHTS = [[1, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 0]]  # of each worker, in each round


def nesterov(rank: int, size: int, outer: Outer) -> list[Tensor]:
    """x after each landing, of workers who take a step while their mean is under way."""
    worker = Worker(rank)
    part = worker.part(outer=outer, anchored=True)
    seen = []
    for weights in WEIGHTS:
        worker.step()
        worker.launch(part, weights[rank], sum(weights))
        worker.step()
        part.land(worker.steps)
        seen.append(vector(worker.x))
    return seen


@pytest.mark.parametrize("outer", [Outer(), Outer(0.5, 0.8), Outer(0.7, 0.0), Outer(1.0, 0.5)])
def test_the_outer_step_is_nesterovs(outer: Outer) -> None:
    """v ← μ·v + D; P ← P + η·(D + μ·v); x ← x + (P − s), by hand; of those who contribute."""
    common = vector(numbers(0))
    velocity = torch.zeros_like(common)
    x = [common.clone() for _ in range(3)]
    steps = [0] * 3
    results = run(nesterov, outer, workers=3)

    def step() -> None:
        for rank in range(3):
            steps[rank] += 1
            x[rank] = x[rank] + vector(numbers(1 + rank, steps[rank]))

    for i, weights in enumerate(WEIGHTS):
        step()
        snapshots = list(x)
        step()
        if any(weights):  # if nobody contributes nothing lands
            total = sum(w * (s - common) for w, s in zip(weights, snapshots, strict=True))
            mean = total / sum(weights)
            velocity = outer.momentum * velocity + mean
            common = common + outer.lr * (mean + outer.momentum * velocity)
            x = [own + (common - s) for own, s in zip(x, snapshots, strict=True)]
        for rank in range(3):
            torch.testing.assert_close(results[rank][i], x[rank], rtol=0, atol=1e-12)


# -- several at once ------------------------------------------------------------------------------


def two_parts(rank: int, size: int, wire: str, together: bool) -> tuple[Tensor, Tensor]:
    """Two parts, launched and landed crosswise, or one after the other on workers of their own."""

    def fly(chosen: tuple[int, ...]) -> list[Tensor]:
        worker = Worker(rank, wire, torch.float32)
        outer = Outer(0.7, 0.9)
        parts = [worker.part(worker.x[:1], name="a", outer=outer)]
        parts += [worker.part(worker.x[1:], name="b", outer=outer)]
        for event, which in [(0, 0), (0, 1), (1, 0), (0, 0), (1, 1), (0, 1), (1, 1), (1, 0)] * 3:
            worker.step()
            if which in chosen and event == 0:
                worker.launch(parts[which])
            elif which in chosen:
                parts[which].land(worker.steps)
        return worker.x

    if together:
        x = fly((0, 1))
        return x[0], vector(x[1:])
    return fly((0,))[0], vector(fly((1,))[1:])


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_parts_that_fly_at_once_are_independent(wire: str) -> None:
    """Each is bit for bit what it is when the other stays at home, rounding errors included."""
    together, apart = (run(two_parts, wire, how, workers=2) for how in (True, False))
    for both, single in zip(together, apart, strict=True):
        for got, want in zip(both, single, strict=True):
            assert torch.equal(bits(got), bits(want))


FLIGHTS: list[Any] = ["int8", "int2", None, "float32", "int4"]


def fly_at_another_precision(rank: int, size: int, outer: Outer) -> Any:
    """P and x − P after each landing, with a step under way, and the payload of each flight."""
    worker = Worker(rank, "bfloat16", torch.float32)
    part = worker.part(keeps_residual=True, outer=outer)
    seen = []
    for precision in FLIGHTS:
        worker.step()
        before = worker.team.account.payload_bytes
        part.launch(
            Completed(3.0), contribute=True, step=worker.steps, what="a test", precision=precision
        )
        sent = worker.team.account.payload_bytes - before
        worker.step()
        part.land(worker.steps)
        base = torch.cat(part.base)
        seen.append((base, vector(worker.x) - base, sent))
    return seen, worker.wire.state_dict()["all, bucket 0"]["summed"]


def test_flights_of_changing_precision_lose_nothing() -> None:
    """P has moved by the mean of all steps, but for what is in the models and with the owners."""
    results = run(fly_at_another_precision, Outer(), workers=3)
    # 2 407 numbers are 6 blocks in 3 chunks; the 5 of int2 are gathered whole.
    sent_bytes = {"int8": 8 * 516, "int2": 5 * 132, None: 8 * 1024, "int4": 8 * 260}
    for i, precision in enumerate(FLIGHTS):
        (base, _, sent), *others = (seen[i] for seen, _ in results)
        assert all(torch.equal(base, same) for same, *_ in others)
        assert sent == sent_bytes.get(precision, 4 * base.numel())
    left = sum(seen[-1][1] for seen, _ in results)
    owed = torch.cat([summed for _, summed in results])[: base.numel()]
    steps = [vector(numbers(r, i, dtype=torch.float32)) for r in (1, 2, 3) for i in range(1, 11)]
    start = vector(numbers(0, dtype=torch.float32))
    moved = base - start + (left + owed) / 3
    torch.testing.assert_close(moved, sum(steps) / 3, rtol=0, atol=2e-5)
    assert float(owed.abs().max()) > 1e-3


@pytest.mark.parametrize("outer", [Outer(), Outer(0.7, 0.9)], ids=["plain", "outer"])
def test_pieces_do_not_change_a_flight(outer: Outer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worked on a block at a time or all at once: the same bits in P, in x and with the owners."""
    whole = run(fly_at_another_precision, outer, workers=3)
    monkeypatch.setattr("offbeat.fabric.codec._PIECE_BLOCKS", 1)
    for (cut_up, owed), (at_once, same) in zip(
        run(fly_at_another_precision, outer, workers=3), whole, strict=True
    ):
        assert torch.equal(owed, same)
        for one, other in zip(cut_up, at_once, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


def test_a_part_under_way_is_its_payloads() -> None:
    """No snapshot, no sum, no difference is kept, before the landing or after it."""

    def fly(rank: int, size: int) -> Any:
        worker = Worker(rank, "int4", torch.float32)
        part = worker.part(keeps_residual=True)
        kept = []
        for _ in range(2):
            worker.step()
            worker.launch(part)
            part.wait()
            kept.append([one._flat is None for one in part.buckets] + [not part.own, not part.sums])
            part.land(worker.steps)
            kept.append([one._flat is None for one in part.buckets] + [not part._updates])
        return kept

    for kept in run(fly, workers=2):
        assert all(itertools.chain(*kept))


# -- looking, saving ------------------------------------------------------------------------------


class Counted(Worker):
    """With statistics, which are merged as well, and counters."""

    def __init__(self, rank: int, wire: Any) -> None:
        super().__init__(rank, wire, torch.float32)
        self.statistic = torch.tensor([1.0, 2.0 + rank])
        self.count = torch.tensor([5 * (1 - rank), 5])

    def all(self, outer: Outer) -> InFlight:
        return self.part(
            outer=outer,
            buffers=lambda: [self.statistic],
            integers=lambda: [self.count],
        )

    def tensors(self) -> list[Tensor]:
        return [*self.x, self.statistic, self.count]

    def step(self) -> None:
        super().step()
        self.statistic.mul_(0.9).add_(0.1 * self.rank)
        self.count.add_(1)


def all_bits(value: Any) -> list[Any]:
    """All that is in a saved state, to be compared."""
    if isinstance(value, dict):
        return [(key, all_bits(one)) for key, one in sorted(value.items())]
    if isinstance(value, list):
        return [all_bits(one) for one in value]
    return bits(value).tolist() if isinstance(value, Tensor) else [value]


def look(rank: int, size: int, wire: str, outer: Outer, moved: bool) -> Any:
    """A landing with a look before it, and one without, from the same launch."""
    ends = []
    unchanged = True
    seen: list[Tensor] = []
    for looks in (0, 2):
        worker = Counted(rank, wire)
        part = worker.all(outer)
        for _ in range(2):
            worker.step()
            part.land(worker.steps)
            worker.launch(part)
        if moved:
            worker.step()
        part.wait()
        for _ in range(looks):
            own, before = [t.clone() for t in worker.tensors()], all_bits(save(part))
            part.show(worker.steps)
            unchanged = unchanged and all_bits(save(part)) == before
            seen = [t.clone() for t in worker.tensors()]
            for tensor, value in zip(worker.tensors(), own, strict=True):
                tensor.copy_(value)
        part.land(worker.steps)
        ends.append([t.clone() for t in worker.tensors()])
    return ends, seen, unchanged


OUTERS = pytest.mark.parametrize("outer", [Outer(), Outer(0.7, 0.9)], ids=["plain", "outer"])


@OUTERS
@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_a_look_shows_the_landing_and_changes_nothing(wire: str, outer: Outer, moved: bool) -> None:
    """Inside: x as it would be; afterwards P, v and what is under way have the bits they had."""
    for (plain, looked), seen, unchanged in run(look, wire, outer, moved, workers=2):
        assert unchanged
        for one, other, shown in zip(plain, looked, seen, strict=True):
            assert torch.equal(bits(one), bits(other))
            assert torch.equal(bits(one), bits(shown))


def resume(rank: int, size: int, wire: str, outer: Outer, saved: bool) -> list[Tensor]:
    worker = Counted(rank, wire)
    part = worker.all(outer)
    for round in range(4):
        worker.step()
        part.land(worker.steps)
        worker.launch(part)
        if saved and round == 2:  # another process goes on
            part.wait()
            state = copy.deepcopy([save(part), worker.wire.state_dict(), worker.tensors()])
            steps, worker = worker.steps, Counted(rank, wire)
            part = worker.all(outer)
            worker.steps = steps
            for tensor, value in zip(worker.tensors(), state[2], strict=True):
                tensor.copy_(value)
            worker.wire.load_state_dict(state[1])
            load(part, state[0])
            assert part.flying
        worker.step()
    part.land(worker.steps)
    return worker.tensors()


@OUTERS
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_what_flies_survives_a_checkpoint(wire: str, outer: Outer) -> None:
    """Saved while under way, loaded by another worker, and landed: the same bits."""
    whole, parts = (run(resume, wire, outer, saved, workers=2) for saved in (False, True))
    for one, other in zip(whole, parts, strict=True):
        for got, want in zip(other, one, strict=True):
            assert torch.equal(bits(got), bits(want))


def count(rank: int, size: int, weights: list[int]) -> Any:
    worker = Counted(rank, "float32")
    part = worker.all(Outer())
    snapshot = worker.statistic.clone()
    worker.launch(part, weights[rank], sum(weights))
    for _ in range(1 + rank):
        worker.step()
    now = worker.statistic.clone()
    part.land(worker.steps)
    return snapshot, now, worker.statistic, worker.count


@pytest.mark.parametrize("weights", [[1, 1], [1, 0]])
def test_statistics_stay_between_their_value_and_the_mean_and_counters_grow(
    weights: list[int],
) -> None:
    """The mean is that of those who contribute; of counters the maximum at the launch or now."""
    results = run(count, weights, workers=2)
    snapshots = [snapshot for snapshot, *_ in results]
    mean = sum(w * s for w, s in zip(weights, snapshots, strict=True)) / sum(weights)
    for rank, (snapshot, now, landed, counts) in enumerate(results):
        low, high = torch.minimum(now, mean), torch.maximum(now, mean)
        want = torch.minimum(torch.maximum(now + (mean - snapshot), low), high)
        torch.testing.assert_close(landed, want, rtol=0, atol=1e-6)
        assert counts.tolist() == [[6, 6], [5, 7]][rank]


def test_it_must_land_before_it_is_launched_again() -> None:
    """Two payloads over the same entries would put disagreement back with the opposite sign."""

    def twice(rank: int, size: int) -> None:
        worker = Worker(rank)
        part = worker.part()
        worker.launch(part)
        with pytest.raises(AssertionError, match="it must land before"):
            worker.launch(part)
        assert part.land(worker.steps)
        assert not part.land(worker.steps), "there is nothing to land any more"

    run(twice, workers=1)


# -- parts of a model -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.data())
def test_cuts_are_nearest_to_equal_bytes(sizes: list[int], data: Any) -> None:
    """Of all ways to cut, the one whose cuts are nearest to their places, the first ones first."""
    parts = data.draw(st.integers(1, len(sizes)))
    tensors = [torch.zeros(size) for size in sizes]
    found = cut(tensors, parts)
    assert [id(t) for part in found for t in part] == [id(t) for t in tensors]
    before = [0, *itertools.accumulate(sizes)]

    def distances(places: tuple[int, ...]) -> list[tuple[Fraction, int]]:
        wanted = [Fraction(before[-1] * i, parts) for i in range(1, parts)]
        return [(abs(before[at] - want), at) for at, want in zip(places, wanted, strict=True)]

    ways = itertools.combinations(range(1, len(sizes)), parts - 1)
    best = min(ways, key=distances)
    assert list(itertools.accumulate(len(part) for part in found)) == [*best, len(sizes)]


def test_bytes_count_in_cuts_and_there_are_not_more_parts_than_tensors() -> None:
    """Half types are summed in float32, complex numbers are two; a tensor is not divided."""
    kinds = [torch.bfloat16, torch.float32, torch.float64, torch.complex128]
    tensors = [torch.zeros(n, dtype=kind) for n, kind in zip([8, 8, 4, 2], kinds, strict=True)]
    assert [len(part) for part in cut(tensors, 4)] == [1, 1, 1, 1]
    assert [len(part) for part in cut(tensors, 2)] == [2, 2], "32 bytes each"
    with pytest.raises(ValueError, match="4 tensors cannot be cut into 5 parts"):
        cut(tensors, 5)
