"""Conformance: rules that hold for every communicator."""

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from offbeat.transport.communicator import Communicator, Kind
from offbeat.transport.future import Future
from offbeat.transport.host import Promise
from transport.communicators import World, every_world, gloo, simulated, single

DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8]


def numbers(rank: int) -> Tensor:
    """A different vector on each rank. Small integers, so that sums are exact."""
    return torch.tensor([rank + 1, 10 * (rank + 1), (rank * 7 + 3) % 5]).double()


def size_of(results: list[Any]) -> range:
    return range(len(results))


COLLECTIVES: dict[str, Callable[[list[Tensor], int], Tensor]] = {
    "sum": lambda rows, rank: torch.stack(rows).sum(0, dtype=rows[0].dtype),
    "maximum": lambda rows, rank: torch.stack(rows).amax(0),
    "broadcast": lambda rows, rank: rows[-1],
    "gather": lambda rows, rank: torch.stack(rows),
    "exchange": lambda rows, rank: torch.cat([row[3 * rank : 3 * rank + 3] for row in rows]),
}
"""The result on worker ``rank``, given the tensors of all workers."""

# -- operations -----------------------------------------------------------------------------------


@every_world
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_keep_the_dtype(world: World, kind: str) -> None:
    """Reductions and broadcasts replace the tensor. The others return new ones, and leave it."""
    assert {*COLLECTIVES, "send", "receive"} == {*get_args(Kind)}

    def own(rank: int, size: int, dtype: torch.dtype) -> Tensor:
        return (torch.arange(3 * size) * (rank + 1) + rank).to(dtype)

    def work(communicator: Communicator) -> Any:
        rank, size, out = communicator.rank, communicator.size, []
        for dtype in DTYPES:
            tensor = own(rank, size, dtype)
            options = {"source": size - 1} if kind == "broadcast" else {}
            result = getattr(communicator, kind)(tensor, what="test", **options).wait()
            result = torch.stack(result) if kind == "gather" else result
            out.append((result.data_ptr() == tensor.data_ptr(), tensor, result))
        return rank, size, out

    results = world(work)
    for rank, (*place, out) in enumerate(results):
        assert place == [rank, len(results)]
        for dtype, (in_place, tensor, result) in zip(DTYPES, out, strict=True):
            rows = [own(r, len(results), dtype) for r in size_of(results)]
            assert in_place == (kind in ("sum", "maximum", "broadcast"))
            assert result.dtype == dtype
            assert torch.equal(result, COLLECTIVES[kind](rows, rank))
            assert in_place or torch.equal(tensor, rows[rank])


@every_world
def test_all_workers_receive_the_same_bits(world: World) -> None:
    """A sum that rounds is bit-identical on all workers, also with NaN and infinity."""

    def work(communicator: Communicator) -> Tensor:
        generator = torch.Generator().manual_seed(communicator.rank)
        tensor = torch.randn(1000, generator=generator)
        tensor[0], tensor[1] = math.inf, math.nan
        return communicator.sum(tensor, what="test").wait()

    results = world(work)
    rows = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in size_of(results)]
    for result in results:
        assert result[0] == math.inf
        assert result[1].isnan()
        assert torch.equal(result[2:], results[0][2:])
        torch.testing.assert_close(result[2:], sum(rows)[2:])


@every_world
def test_messages_match_by_source_and_tag_and_arrive_in_order(world: World) -> None:
    """Headers under one tag, each followed by values under another, from all workers to all.

    The receives may start in any order of the tags.
    """

    def work(communicator: Communicator) -> Any:
        others = [rank for rank in range(communicator.size) if rank != communicator.rank]
        sends = []
        for i in range(5):
            for other in others:
                header, values = torch.tensor([i]), numbers(communicator.rank) * (i + 1)
                sends.append(communicator.send(header, destination=other, tag=1, what="test"))
                sends.append(communicator.send(values, destination=other, tag=2, what="test"))
        received = []
        for other in others[::-1]:
            for _ in range(5):
                header, values = torch.zeros(1, dtype=torch.int64), torch.zeros(3).double()
                later = communicator.receive(values, source=other, tag=2, what="test")
                communicator.receive(header, source=other, tag=1, what="test", patient=True).wait()
                later.wait()
                received.append((other, header.item(), values))
        for future in sends:
            future.wait()
        return received

    results = world(work)
    for received in results:
        assert len(received) == 5 * (len(results) - 1)
        for place, (source, header, values) in enumerate(received):
            assert header == place % 5
            assert torch.equal(values, numbers(source) * (header + 1))


@every_world
def test_gather_numbers_is_exact_in_float64(world: World) -> None:
    """Every worker receives the rows in the order of the ranks, also of whole numbers up to 2⁵³."""

    def work(communicator: Communicator) -> Any:
        own = [communicator.rank, 2.0**53 - communicator.rank, math.inf, True]
        return communicator.gather_numbers(own, what="test").wait()

    results = world(work)
    expected = [[rank, 2**53 - rank, math.inf, 1] for rank in size_of(results)]
    assert results == [expected] * len(results)


@every_world
def test_gather_bytes_takes_any_lengths(world: World) -> None:
    """Payloads of unequal length, empty ones and zero bytes arrive as they were sent."""

    def payloads(rank: int) -> list[bytes]:
        return [b"x" * rank, b"", bytes(range(256))[rank:], b"\0" * (3 - rank), "äß".encode()]

    def work(communicator: Communicator) -> list[list[bytes]]:
        return [communicator.gather_bytes(p, what="test") for p in payloads(communicator.rank)]

    results = world(work)
    want = list(zip(*(payloads(rank) for rank in size_of(results)), strict=True))
    for result in results:
        assert [tuple(got) for got in result] == want


# -- futures --------------------------------------------------------------------------------------


@every_world
def test_operations_may_overlap_and_end_in_any_order(world: World) -> None:
    """They do not mix. ``wait`` can be repeated, and gives the same result."""

    def work(communicator: Communicator) -> Any:
        futures: list[Future[Any]] = []
        for i in range(4):
            futures.append(communicator.sum(numbers(communicator.rank) * (i + 1), what="test"))
            futures.append(communicator.maximum(numbers(communicator.rank) * (i + 1), what="test"))
        backwards = [future.wait() for future in reversed(futures)]
        again = [future.done() and future.wait() for future in reversed(futures)]
        return backwards[::-1], all(a is b for a, b in zip(backwards, again, strict=True))

    results = world(work)
    ranks = size_of(results)
    for result, same in results:
        assert same
        for i in range(4):
            rows = [numbers(rank) * (i + 1) for rank in ranks]
            assert torch.equal(result[2 * i], sum(rows))
            assert torch.equal(result[2 * i + 1], torch.stack(rows).amax(0))


@every_world
def test_done_is_false_until_all_workers_have_started(world: World) -> None:
    """Rank 0 asks before the others have started. Later it becomes true without a wait."""

    def work(communicator: Communicator) -> Any:
        if communicator.size == 1:
            return True
        tensor = torch.zeros(1)
        if communicator.rank == 0:
            future = communicator.sum(torch.ones(1), what="test")
            early = future.done()
            for other in range(1, communicator.size):  # only now let the others start
                communicator.send(tensor, destination=other, tag=5, what="go").wait()
            while not future.done():
                pass
            return not early and future.wait().item() == communicator.size
        communicator.receive(tensor, source=0, tag=5, what="go").wait()
        return communicator.sum(torch.ones(1), what="test").wait().item() == communicator.size

    assert all(world(work))


@every_world
def test_then_applies_the_function_once(world: World) -> None:
    """then() chains, calls its function at the first wait() only, and keeps done()."""

    def work(communicator: Communicator) -> Any:
        calls = []

        def total(result: Tensor) -> float:
            calls.append(1)
            return float(result.sum())

        future = communicator.sum(numbers(communicator.rank), what="test").then(total)
        before = len(calls)
        doubled = future.then(lambda value: 2 * value)
        values = [doubled.wait(), doubled.wait(), future.wait()]
        return before, len(calls), values, future.done() and doubled.done()

    results = world(work)
    want = float(sum(numbers(rank).sum() for rank in size_of(results)))
    for before, calls, values, done in results:
        assert (before, calls, done) == (0, 1, True)
        assert values == [2 * want, 2 * want, want]


# -- duplicates, communicators, activities ---------------------------------------------------------


def duplicate(communicator: Communicator) -> Communicator:
    return communicator.duplicate()


def another(communicator: Communicator) -> Communicator:
    """Open another communicator in the simulator, as if it belonged to another process group."""
    second: Communicator = dist.group.WORLD.make_communicator(20.0)  # type: ignore[union-attr]
    return second


@pytest.mark.parametrize(
    ("world", "other"),
    [(gloo, duplicate), (single, duplicate), (simulated, duplicate), (simulated, another)],
)
def test_each_communicator_has_its_own_order_of_operations(world: World, other: Any) -> None:
    """Workers start operations of two duplicates and the original in different orders.

    Messages of one sender and tag do not mix, either.
    """

    def work(original: Communicator) -> Any:
        several = [original, other(original), other(original)]
        rank, size = original.rank, original.size
        order, value = range(3)[:: 1 - 2 * (rank % 2)], numbers(rank)
        sums = {i: several[i].sum(10**i * value, what="a sum") for i in order}
        parts = {i: several[i].gather(value + i, what="a gather") for i in order}
        sent, received = [], []
        for i, one in enumerate(several if size > 1 else ()):
            after = (rank + 1) % size
            sent.append(one.send(value + i, destination=after, tag=3, what="a message"))
        for one in several[::-1] if size > 1 else ():
            message, before = torch.zeros(3).double(), (rank - 1) % size
            received.append(one.receive(message, source=before, tag=3, what="a message").wait())
        for future in sent:
            future.wait()
        return [sums[i].wait() for i in range(3)], [parts[i].wait() for i in range(3)], received

    results = world(work)
    rows = [numbers(rank) for rank in size_of(results)]
    for rank, (sums, parts, received) in enumerate(results):
        for i in range(3):
            assert torch.equal(sums[i], 10**i * sum(rows))
            for part, row in zip(parts[i], rows, strict=True):
                assert torch.equal(part, row + i)
        assert len(received) == 3 * (len(rows) > 1)
        for i, message in enumerate(received[::-1]):
            assert torch.equal(message, rows[rank - 1] + i)


@every_world
def test_a_background_thread_fulfils_a_promise(world: World) -> None:
    """It runs at the same time as collectives of the worker."""

    def work(communicator: Communicator) -> Any:
        promise: Promise[list[float]] = communicator.host.promise()

        def activity() -> None:
            received = []
            for _ in range(3 if communicator.size > 1 else 0):
                message, before = torch.zeros(1), (communicator.rank - 1) % communicator.size
                communicator.receive(message, source=before, tag=6, what="test").wait()
                received.append(message.item())
            promise.fulfil(received)

        communicator.host.spawn(activity, what="a test activity")
        answer = communicator.await_promise(promise, what="what the neighbour sends")
        early = answer.done() and communicator.size > 1
        sends = []
        for i in range(3 if communicator.size > 1 else 0):
            communicator.sum(numbers(communicator.rank), what="test").wait()
            message = torch.tensor([10.0 * communicator.rank + i])
            after = (communicator.rank + 1) % communicator.size
            sends.append(communicator.send(message, destination=after, tag=6, what="test"))
        while not answer.done():
            pass  # it becomes true without a wait
        first, second = answer.wait(), answer.wait()
        for future in sends:
            future.wait()
        assert all(future.done() for future in sends)
        return first, first is second, promise.fulfilled and not early

    results = world(work)
    for rank, (received, same, done) in enumerate(results):
        before = (rank - 1) % len(results)
        assert received == ([10.0 * before + i for i in range(3)] if len(results) > 1 else [])
        assert same
        assert done


@every_world
def test_the_clock_does_not_go_back(world: World) -> None:
    """now() never decreases; sleep() lets at least the given time pass."""

    def work(communicator: Communicator) -> bool:
        times = [communicator.host.now() for _ in range(50)]
        communicator.sum(torch.ones(1), what="test").wait()
        times.append(communicator.host.now())
        communicator.host.sleep(0.02, "a test")
        slept = communicator.host.now() - times[-1]
        return times == sorted(times) and slept >= 0.0199

    assert all(world(work))


class Lost(Future[int]):
    def done(self) -> bool:
        return True

    def wait(self) -> int:
        raise offbeat.CommunicationError("lost")


def test_then_does_not_run_after_a_failure() -> None:
    """wait() raises each time."""
    calls: list[int] = []
    future = Lost().then(calls.append)
    for _ in range(2):
        with pytest.raises(offbeat.CommunicationError, match="lost"):
            future.wait()
    assert not calls
