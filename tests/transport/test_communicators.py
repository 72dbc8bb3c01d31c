"""Conformance: rules that hold for every communicator."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Completed, Handle
from offbeat.transport.host import Promise
from transport.communicators import World, every_world
from transport.operations import expected, start_all

DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8]


def numbers(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A different vector on each rank. Small integers, so that sums are exact in every dtype."""
    return torch.tensor([rank + 1, 10 * (rank + 1), (rank * 7 + 3) % 5]).to(dtype)


def size_of(results: list[Any]) -> range:
    return range(len(results))


# -- operations as values -------------------------------------------------------------------------


@every_world
def test_every_operation_is_handled(world: World) -> None:
    """A new class of operations must be added to every communicator and to this test."""
    for rank, results in enumerate(got := world(start_all)):
        assert results == expected(rank, len(got))


# -- operations -----------------------------------------------------------------------------------


@every_world
@pytest.mark.parametrize("name", ["sum", "maximum"])
def test_reductions_replace_the_tensor_on_all_workers(world: World, name: str) -> None:
    """sum and maximum work elementwise, in place, in the tensor's own dtype."""

    def work(communicator: Communicator) -> Any:
        out = []
        for dtype in DTYPES:
            tensor = numbers(communicator.rank, dtype)
            result = getattr(communicator, name)(tensor, what="test").wait()
            out.append((result is tensor, tensor))
        return communicator.rank, communicator.size, out

    results = world(work)
    combine = sum if name == "sum" else lambda rows: torch.stack(list(rows)).amax(0)
    for rank, (own, size, out) in enumerate(results):
        assert (own, size) == (rank, len(results))
        for dtype, (in_place, tensor) in zip(DTYPES, out, strict=True):
            want = combine(numbers(r, dtype) for r in size_of(results))
            assert in_place
            assert tensor.dtype == dtype
            assert torch.equal(tensor, want)


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
def test_send_and_receive_match_by_source_and_tag(world: World) -> None:
    """Two messages of one sender are told apart by their tags, in any order of receives."""

    def work(communicator: Communicator) -> Any:
        if communicator.size == 1:
            refused = []
            for start in (
                lambda: communicator.send(numbers(0), destination=0, what="a push"),
                lambda: communicator.receive(numbers(0), source=0, what="a pull"),
            ):
                try:
                    start()
                except ValueError as error:
                    refused.append(str(error))
            return refused
        after = (communicator.rank + 1) % communicator.size
        before = (communicator.rank - 1) % communicator.size
        sends = [
            communicator.send(
                numbers(communicator.rank) + tag, destination=after, tag=tag, what="test"
            )
            for tag in (1, 2)
        ]
        second = communicator.receive(torch.zeros(3).double(), source=before, tag=2, what="test")
        first = communicator.receive(torch.zeros(3).double(), source=before, tag=1, what="test")
        received = first.wait(), second.wait()
        for handle in sends:
            handle.wait()
        return received

    results = world(work)
    if len(results) == 1:
        (refused,) = results
        assert [text.split(":")[0] for text in refused] == ["a push", "a pull"]
        return
    for rank, (first, second) in enumerate(results):
        before = (rank - 1) % len(results)
        assert torch.equal(first, numbers(before) + 1)
        assert torch.equal(second, numbers(before) + 2)


@every_world
def test_messages_of_one_sender_and_tag_arrive_in_order(world: World) -> None:
    """Headers under one tag, each followed by values under another, from all workers to all."""

    def work(communicator: Communicator) -> Any:
        others = [rank for rank in range(communicator.size) if rank != communicator.rank]
        sends = []
        for i in range(5):
            for other in others:
                header, values = (
                    torch.tensor([communicator.rank, i]),
                    numbers(communicator.rank) * (i + 1),
                )
                sends.append(communicator.send(header, destination=other, tag=1, what="test"))
                sends.append(communicator.send(values, destination=other, tag=2, what="test"))
        received = []
        for other in others[::-1]:
            for _ in range(5):
                header, values = torch.zeros(2, dtype=torch.int64), torch.zeros(3).double()
                communicator.receive(header, source=other, tag=1, what="test", patient=True).wait()
                communicator.receive(values, source=other, tag=2, what="test").wait()
                received.append((other, header.tolist(), values))
        for handle in sends:
            handle.wait()
        return received

    results = world(work)
    for received in results:
        assert len(received) == 5 * (len(results) - 1)
        for place, (source, header, values) in enumerate(received):
            assert header == [source, place % 5]
            assert torch.equal(values, numbers(source) * (place % 5 + 1))


@every_world
def test_exchange_sends_chunk_k_to_worker_k(world: World) -> None:
    """The result is a new tensor of the same dtype; the input is unchanged."""

    def chunks(rank: int, size: int, dtype: torch.dtype) -> Tensor:
        parts = [[10 * rank + k, 100 + rank, 200 + k] for k in range(size)]
        return torch.tensor(parts).reshape(-1).to(dtype)

    def work(communicator: Communicator) -> Any:
        out = []
        for dtype in DTYPES:
            own = chunks(communicator.rank, communicator.size, dtype)
            result = communicator.exchange(own, what="test").wait()
            kept = torch.equal(own, chunks(communicator.rank, communicator.size, dtype))
            out.append((kept and result.data_ptr() != own.data_ptr(), result))
        return out

    results = world(work)
    size = len(results)
    for rank, out in enumerate(results):
        for dtype, (kept, result) in zip(DTYPES, out, strict=True):
            rows = [chunks(source, size, dtype)[3 * rank : 3 * rank + 3] for source in range(size)]
            assert kept
            assert result.dtype == dtype
            assert torch.equal(result, torch.cat(rows))


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


# -- handles --------------------------------------------------------------------------------------


@every_world
def test_operations_may_overlap_and_end_in_any_order(world: World) -> None:
    """Several started operations do not mix; their handles may be waited for backwards."""

    def work(communicator: Communicator) -> Any:
        handles: list[Handle[Any]] = []
        for i in range(4):
            handles.append(communicator.sum(numbers(communicator.rank) * (i + 1), what="test"))
            handles.append(communicator.maximum(numbers(communicator.rank) * (i + 1), what="test"))
        backwards = [handle.wait() for handle in reversed(handles)]
        return backwards[::-1]

    results = world(work)
    ranks = size_of(results)
    for result in results:
        for i in range(4):
            rows = [numbers(rank) * (i + 1) for rank in ranks]
            assert torch.equal(result[2 * i], sum(rows))
            assert torch.equal(result[2 * i + 1], torch.stack(rows).amax(0))


@every_world
def test_wait_can_be_repeated(world: World) -> None:
    """It returns the same result each time. done() becomes true without a wait."""

    def work(communicator: Communicator) -> Any:
        handle = communicator.sum(numbers(communicator.rank), what="test")
        while not handle.done():
            pass  # it becomes true without a wait
        first, second = handle.wait(), handle.wait()
        return first is second, handle.done(), first

    results = world(work)
    for same, done, value in results:
        assert same
        assert done
        assert torch.equal(value, sum(numbers(rank) for rank in size_of(results)))


@every_world
def test_done_is_false_until_all_workers_have_started(world: World) -> None:
    """Rank 0 asks before the others have started: done() returns False at once."""

    def work(communicator: Communicator) -> Any:
        if communicator.size == 1:
            return True
        tensor = torch.zeros(1)
        if communicator.rank == 0:
            handle = communicator.sum(torch.ones(1), what="test")
            early = handle.done()
            for other in range(1, communicator.size):  # only now let the others start
                communicator.send(tensor, destination=other, tag=5, what="go").wait()
            return not early and handle.wait().item() == communicator.size
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

        handle = communicator.sum(numbers(communicator.rank), what="test").then(total)
        before = len(calls)
        doubled = handle.then(lambda value: 2 * value)
        values = [doubled.wait(), doubled.wait(), handle.wait()]
        return before, len(calls), values, handle.done() and doubled.done()

    results = world(work)
    want = float(sum(numbers(rank).sum() for rank in size_of(results)))
    for before, calls, values, done in results:
        assert (before, calls, done) == (0, 1, True)
        assert values == [2 * want, 2 * want, want]


# -- twins, communicators, activities --------------------------------------------------------------


@every_world
def test_a_twin_has_an_independent_order_of_operations(world: World) -> None:
    """Ranks start operations of the twin and of the original in different orders."""

    def work(communicator: Communicator) -> Any:
        twin = communicator.twin()
        alike = (twin.rank, twin.size) == (communicator.rank, communicator.size)
        value = numbers(communicator.rank)
        starts: list[tuple[str, Callable[[], Handle[Any]]]] = [
            ("original", lambda: communicator.sum(value.clone(), what="test")),
            ("twin", lambda: twin.sum(100 * value, what="test")),
        ]
        again: list[tuple[str, Callable[[], Handle[Any]]]] = [
            ("original maximum", lambda: communicator.maximum(value.clone(), what="test")),
            ("twin gather", lambda: twin.gather(value + 7, what="test")),
            ("second twin", lambda: second.sum(1000 * value, what="test")),
        ]
        second = communicator.twin()
        turn = communicator.rank % 2
        handles = {name: start() for name, start in (starts[::-1] if turn else starts)}
        handles |= {name: start() for name, start in (again[::-1] if turn else again)}
        return alike, {name: handle.wait() for name, handle in handles.items()}

    results = world(work)
    rows = [numbers(rank) for rank in size_of(results)]
    for alike, out in results:
        assert alike
        assert torch.equal(out["original"], sum(rows))
        assert torch.equal(out["twin"], 100 * sum(rows))
        assert torch.equal(out["second twin"], 1000 * sum(rows))
        assert torch.equal(out["original maximum"], torch.stack(rows).amax(0))
        for part, row in zip(out["twin gather"], rows, strict=True):
            assert torch.equal(part, row + 7)


@every_world
def test_messages_of_a_twin_and_of_the_original_do_not_mix(world: World) -> None:
    """Both carry the same sender and tag; each receives its own, in either order."""

    def work(communicator: Communicator) -> Any:
        twin = communicator.twin()
        if communicator.size == 1:
            return 1.0, 2.0
        on_original, on_twin = torch.ones(1), torch.full((1,), 2.0)
        if communicator.rank == 0:
            handles = [
                communicator.send(on_original, destination=1, tag=3, what="test"),
                twin.send(on_twin, destination=1, tag=3, what="test"),
            ]
            for handle in handles:
                handle.wait()
        elif communicator.rank == 1:
            on_original, on_twin = torch.zeros(1), torch.zeros(1)
            twin.receive(on_twin, source=0, tag=3, what="test").wait()
            communicator.receive(on_original, source=0, tag=3, what="test").wait()
        return on_original.item(), on_twin.item()

    assert set(world(work)) == {(1.0, 2.0)}


def test_two_communicators_of_a_simulation_do_not_mix() -> None:
    """Messages and collectives match within one communicator, as in two process groups."""

    def work() -> Any:
        first, second = (dist.group.WORLD.make_communicator(20.0) for _ in range(2))
        rank, size = first.rank, first.size
        after, before = (rank + 1) % size, (rank - 1) % size
        messages = {1: torch.full((2,), 10.0 + rank), 2: torch.full((2,), 20.0 + rank)}
        for number, communicator in ((1, first), (2, second)):
            communicator.send(messages[number], destination=after, tag=5, what="test")
        received = {}
        for number, communicator in ((2, second), (1, first)):
            into = torch.zeros(2)
            received[number] = communicator.receive(into, source=before, tag=5, what="test").wait()
        pair = [(first, 1.0), (second, 100.0)]
        sums = [
            communicator.sum(torch.tensor([value]), what="test")
            for communicator, value in (pair[::-1] if rank % 2 else pair)
        ]
        values = sorted(handle.wait().item() for handle in sums)
        return received[1].tolist(), received[2].tolist(), values

    for rank, (one, two, sums) in enumerate(offbeat.simulate(work, workers=3).results):
        before = (rank - 1) % 3
        assert one == [10.0 + before] * 2
        assert two == [20.0 + before] * 2
        assert sums == [3.0, 300.0]


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
        for handle in sends:
            handle.wait()
        assert all(handle.done() for handle in sends)
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


def test_completed_is_done_at_once() -> None:
    """Completed is the handle of an operation that has already ended."""
    handle = Completed(3)
    assert handle.done()
    assert handle.wait() == 3
    assert handle.then(lambda value: value + 1).wait() == 4


class Lost(Handle[int]):
    def done(self) -> bool:
        return True

    def wait(self) -> int:
        raise offbeat.CommunicationError("lost")


def test_then_does_not_run_after_a_failure() -> None:
    """wait() raises each time."""
    calls: list[int] = []
    handle = Lost().then(calls.append)
    for _ in range(2):
        with pytest.raises(offbeat.CommunicationError, match="lost"):
            handle.wait()
    assert not calls
