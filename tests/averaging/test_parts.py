"""A part of the shared model: launch, arrival and landing, with local steps in between."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from loops import Recorded
from offbeat.averaging.parts.part import Part
from offbeat.averaging.parts.snapshot_part import SnapshotPart
from offbeat.averaging.parts.update_part import UpdatePart
from offbeat.quantization.wire import Wire
from offbeat.strategies.base import Outer
from offbeat.transport.handle import Completed
from offbeat.transport.team import Team
from worlds import run

SHAPES = [(40, 30), (7,), (1200,)]
PLAIN, NESTEROV = Outer(), Outer(0.7, 0.9)
OUTERS = pytest.mark.parametrize("outer", [PLAIN, NESTEROV], ids=["plain", "nesterov"])
# P not kept, P kept, and error feedback: over an exact wire they compute the same.
KINDS: dict[str, Any] = {
    "snapshot": SnapshotPart,
    "anchored": lambda *args, **options: SnapshotPart(*args, **{"anchored": True, **options}),
    "update": UpdatePart,
}
EVERY_KIND = pytest.mark.parametrize("kind", list(KINDS))


def numbers(*seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Other tensors for each seed."""
    generator = torch.Generator().manual_seed(sum(1000**i * n for i, n in enumerate(seed, 1)))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def vector(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).clone()


class Worker:
    """A worker that starts from the common model and takes local steps."""

    def __init__(
        self, rank: int, wire: Any = "float32", dtype: torch.dtype = torch.float64
    ) -> None:
        self.rank, self.dtype, self.steps = rank, dtype, 0
        self.recorded = Recorded()
        self.team = Team(self.recorded.make_communicator(20))
        self.wire = Wire(self.team, wire)
        self.x = numbers(0, dtype=dtype)

    def part(self, kind: str, tensors: Sequence[Tensor] | None = None, **options: Any) -> Part:
        held = self.x if tensors is None else tensors
        made = KINDS[kind](self.team, self.wire, lambda: held, **{"name": "all", **options})
        assert isinstance(made, Part)
        return made

    def step(self) -> None:
        """x ← x + an update of its own."""
        self.steps += 1
        updates = numbers(1 + self.rank, self.steps, dtype=self.dtype)
        for x, update in zip(self.x, updates, strict=True):
            x.add_(update)

    def launch(
        self, part: Part, weight: float = 1.0, total: float | None = None, **options: Any
    ) -> None:
        total = float(self.team.size) if total is None else total
        part.launch(Completed(total), weight=weight, step=self.steps, what="a test", **options)


# -- landing --------------------------------------------------------------------------------------


WEIGHTS = [[1, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 0]]  # of each worker, in each round


def nesterov(rank: int, size: int, kind: str, outer: Outer) -> list[Tensor]:
    """x after each landing, of workers that take a step while the mean is in flight."""
    worker = Worker(rank)
    part = worker.part(kind, outer=outer)
    seen = []
    for weights in WEIGHTS:
        worker.step()
        worker.launch(part, weights[rank], sum(weights))
        worker.step()
        part.land(worker.steps)
        seen.append(vector(worker.x))
    return seen


@pytest.mark.parametrize(
    ("kind", "outer"),
    [
        *(("anchored", outer) for outer in (PLAIN, Outer(0.5, 0.8), Outer(0.7, 0.0))),
        *(("update", outer) for outer in (PLAIN, Outer(1.0, 0.8), Outer(1.0, 0.5))),
    ],
)
def test_the_outer_step_is_nesterovs(kind: str, outer: Outer) -> None:
    """v ← μ·v + D; P ← P + η·(D + μ·v); x ← x + (P − s), over the workers that contribute.

    Steps of a worker with weight 0 are dropped; with error feedback they stay in its model.
    """
    common = vector(numbers(0))
    velocity = torch.zeros_like(common)
    x = [common.clone() for _ in range(3)]
    steps = [0] * 3
    results = run(nesterov, kind, outer, workers=3)

    def step() -> None:
        for rank in range(3):
            steps[rank] += 1
            x[rank] = x[rank] + vector(numbers(1 + rank, steps[rank]))

    for i, weights in enumerate(WEIGHTS):
        step()
        snapshots = list(x)
        step()
        if any(weights):  # if no worker contributes nothing lands
            total = sum(w * (s - common) for w, s in zip(weights, snapshots, strict=True))
            mean = total / sum(weights)
            velocity = outer.momentum * velocity + mean
            before, common = common, common + outer.lr * (mean + outer.momentum * velocity)
            sent = [
                s - before if w or kind == "anchored" else torch.zeros_like(s)
                for w, s in zip(weights, snapshots, strict=True)
            ]
            x = [own + (common - before) - u for own, u in zip(x, sent, strict=True)]
        for rank in range(3):
            torch.testing.assert_close(results[rank][i], x[rank], rtol=0, atol=1e-12)


KEPT = [
    (torch.bfloat16, None, torch.float32),
    (torch.float16, "float64", torch.float64),
    (torch.float32, "bfloat16", torch.bfloat16),
    (torch.float32, "float64", torch.float64),
    (torch.float64, "float32", torch.float32),
]


def half(rank: int, size: int, dtype: torch.dtype, outer_dtype: Any, moved: bool) -> Any:
    """Of each round: the snapshot, x before the landing, x after it, and P."""
    worker = Worker(rank, dtype=dtype)
    worker.x = [torch.linspace(0.5, 2, 9).to(dtype)]
    part = worker.part("snapshot", outer=Outer(0.75, 0.9, outer_dtype), keeps_steps=moved)
    seen = []
    for round in range(4):
        generator = torch.Generator().manual_seed(100 * rank + round)
        snapshot = worker.x[0].add_(torch.randn(9, generator=generator).to(dtype) / 512).clone()
        worker.launch(part)
        if moved:
            worker.steps += 1
            worker.x[0].add_(torch.tensor(2.0**-7, dtype=dtype))
        before = worker.x[0].clone()
        part.land(worker.steps)
        seen.append((snapshot, before, worker.x[0].clone(), part.base[0].clone()))
    return seen


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(("dtype", "outer_dtype", "kept"), KEPT, ids=str)
def test_p_is_kept_in_its_own_precision(
    dtype: torch.dtype, outer_dtype: Any, kept: torch.dtype, moved: bool
) -> None:
    """P has more precision than x: float32 for half types, otherwise the given dtype."""
    results = run(half, dtype, outer_dtype, moved, workers=2)
    sent = torch.float64 if dtype == torch.float64 else torch.float32
    work = torch.promote_types(kept, sent)
    p = torch.linspace(0.5, 2, 9).to(dtype).to(kept)
    v = torch.zeros_like(p)
    for rounds in zip(*results, strict=True):
        delta = (sum((s.to(sent) - p).to(sent) for s, *_ in rounds) / 2).to(work)
        new = 0.9 * v.to(work) + delta
        p = (p.to(work) + 0.75 * (delta + 0.9 * new)).to(kept)
        v = new.to(kept)
        for snapshot, before, after, base in rounds:
            assert base.dtype == kept
            eps = torch.finfo(kept).eps
            torch.testing.assert_close(base, p, rtol=2 * eps, atol=0)
            want = (p.to(work) + (before.to(sent) - snapshot.to(sent))).to(dtype)
            eps = max(torch.finfo(dtype).eps, 1e-7)
            torch.testing.assert_close(after, want, rtol=2 * eps, atol=1e-7)


def stuck(rank: int, size: int, outer_dtype: Any) -> list[float]:
    worker = Worker(rank)
    worker.x = [torch.ones(1, dtype=torch.bfloat16)]
    part = worker.part("snapshot", outer=Outer(0.125, 0.0, outer_dtype), keeps_steps=False)
    seen = []
    for _ in range(6):
        worker.x[0] -= 2.0**-8  # a unit in the last place below 1
        worker.launch(part)
        part.land(0)
        seen.append(float(worker.x[0]))
    return seen


def test_small_outer_steps_add_up_in_p() -> None:
    """An eighth of a unit in the last place of bfloat16 is lost in bfloat16, not in float32."""
    # P = 1 − d·2⁻⁸ and x is P rounded, 1: D = 1 − 2⁻⁸ − P, so d ← d + (1 − d)/8.
    d = [1 - (7 / 8) ** n for n in (5, 6)]
    assert d[0] < 0.5 < d[1], "x is rounded to 1 until the last step"
    assert run(stuck, None, workers=1)[0] == [1.0] * 5 + [1 - 2.0**-8]
    assert run(stuck, "bfloat16", workers=1)[0] == [1.0] * 6


# -- several parts, several precisions ------------------------------------------------------------


FLIGHTS: list[Any] = ["int8", "int2", None, "float32", "int4"]


def fly_at_another_precision(rank: int, size: int, outer: Outer) -> Any:
    """P and x − P after each landing, with a step in flight, and the payload of each flight."""
    worker = Worker(rank, "bfloat16", torch.float32)
    part = worker.part("update", outer=outer)
    seen = []
    for precision in FLIGHTS:
        worker.step()
        before = worker.team.account.payload_bytes
        worker.launch(part, precision=precision)
        sent = worker.team.account.payload_bytes - before
        worker.step()
        part.land(worker.steps)
        base = torch.cat(part.base)
        seen.append((base, vector(worker.x) - base, sent))
    return seen, worker.wire.state_dict()["all, bucket 0"]["summed"]


def test_launches_of_changing_precision_lose_nothing() -> None:
    """P moves by the mean of all steps, up to the residuals and the owners' errors."""
    results = run(fly_at_another_precision, PLAIN, workers=3)
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


@OUTERS
def test_pieces_do_not_change_a_launch(outer: Outer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block at a time and all at once give the same bits in P, in x and on the owners."""
    whole = run(fly_at_another_precision, outer, workers=3)
    monkeypatch.setattr("offbeat.quantization.base.PIECE_BLOCKS", 1)
    for (cut_up, owed), (at_once, same) in zip(
        run(fly_at_another_precision, outer, workers=3), whole, strict=True
    ):
        assert torch.equal(owed, same)
        for one, other in zip(cut_up, at_once, strict=True):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])


# -- buffers --------------------------------------------------------------------------------------


class Buffered(Worker):
    """A model with statistics, which are averaged, and are replaced in every step."""

    def __init__(self, rank: int, wire: Any = "float32") -> None:
        super().__init__(rank, wire, torch.float32)
        self.statistic = torch.tensor([1.0, 2.0 + rank])

    def whole(self, kind: str, outer: Outer = PLAIN, **options: Any) -> Part:
        return self.part(kind, outer=outer, buffers=lambda: [self.statistic], **options)

    def tensors(self) -> list[Tensor]:
        return [*self.x, self.statistic]

    def step(self) -> None:
        super().step()
        self.statistic = 0.9 * self.statistic + 0.1 * self.rank


def land_buffers(rank: int, size: int, kind: str, wire: str, weights: list[int]) -> Any:
    worker = Buffered(rank, wire)
    part = worker.whole(kind)
    snapshot = worker.statistic.clone()
    worker.launch(part, weights[rank], sum(weights))
    for _ in range(1 + rank):
        worker.step()
    now = worker.statistic.clone()
    part.land(worker.steps)
    return snapshot, now, worker.statistic


@EVERY_KIND
@pytest.mark.parametrize("wire", ["float32", "int8"])
@pytest.mark.parametrize("weights", [[1, 1], [1, 0]])
def test_buffers_stay_between_their_value_and_the_mean(
    weights: list[int], wire: str, kind: str
) -> None:
    """They take the exact mean of the contributing workers, or are shifted within the range."""
    results = run(land_buffers, kind, wire, weights, workers=2)
    snapshots = [snapshot for snapshot, *_ in results]
    mean = sum(w * s for w, s in zip(weights, snapshots, strict=True)) / sum(weights)
    for snapshot, now, landed in results:
        low, high = torch.minimum(now, mean), torch.maximum(now, mean)
        want = torch.minimum(torch.maximum(now + (mean - snapshot), low), high)
        torch.testing.assert_close(landed, want, rtol=0, atol=1e-6)


RIDING = {
    # (bytes of the sums of a launch, bytes of the buffers)
    "float32": ([4 * (2407 + 2)], 2),
    "other dtype": ([4 * 2407, 8 * 2], 2),
    "large": ([4 * 2407, 4 * 2**18 + 4], 2**18 + 1),
    "largest that rides": ([4 * (2407 + 2**18)], 2**18),
}


@pytest.mark.parametrize("case", list(RIDING))
def test_buffers_share_a_message_with_parameters(case: str) -> None:
    """One message has both, unless buffers are large or of another dtype, or the wire is lossy."""
    want, elements = RIDING[case]
    dtype = torch.float64 if case == "other dtype" else torch.float32

    def launched(rank: int, size: int, kind: str, wire: str) -> list[int]:
        worker = Worker(rank, wire, torch.float32)
        buffer = torch.full((elements,), float(rank), dtype=dtype)
        part = worker.part(kind, buffers=lambda: [buffer])
        worker.launch(part)
        part.land(0)
        assert (buffer == 0.5).all()
        return worker.recorded.sums("a test")

    assert run(launched, "snapshot", "float32", workers=2) == [want] * 2
    apart = elements * dtype.itemsize
    for kind, wire in (("snapshot", "int8"), ("update", "float32")):
        for sums in run(launched, kind, wire, workers=2):
            assert sums[-1] == apart, "the buffers travel alone, exactly"


# -- the life of a launch -------------------------------------------------------------------------


@EVERY_KIND
def test_an_empty_part_lands_at_once_and_sends_nothing(kind: str) -> None:
    """A worker whose shard has fewer tensors still takes part in every round."""

    def fly(rank: int, size: int) -> Any:
        worker = Worker(rank)
        part = worker.part(kind, [], outer=NESTEROV)
        worker.launch(part)
        arrived = part.arrived()
        part.land(worker.steps)
        return arrived, worker.recorded.operations, part.squared_norm()

    assert run(fly, workers=2) == [(True, [], 0.0)] * 2
