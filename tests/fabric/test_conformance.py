"""What every communicator does, whatever carries its bytes.

A row of ``WORLDS`` is a way to run ``function(communicator)`` on all workers of one communicator
and to get the results in rank order. A communicator is held to this suite by adding its row.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from offbeat.fabric import (
    Accounting,
    Communicator,
    Completed,
    Handle,
    SingleCommunicator,
    TorchCommunicator,
)
from workers import run

Function = Callable[[Communicator], Any]
World = Callable[[Function], list[Any]]


def _on_gloo(rank: int, size: int, function: Function) -> Any:
    result = function(TorchCommunicator(None, timeout_seconds=20))
    dist.barrier()  # who leaves early would end connections that others are still making
    return result


def gloo(function: Function) -> list[Any]:
    return run(_on_gloo, function, workers=3)


def single(function: Function) -> list[Any]:
    return [function(SingleCommunicator())]


def simulated(function: Function) -> list[Any]:
    return offbeat.simulate(
        lambda: function(dist.group.WORLD.make_communicator()),  # type: ignore[union-attr]
        workers=3,
        network=offbeat.Network("100Mbit/s"),
    ).results


WORLDS = [
    pytest.param(gloo, id="gloo"),
    pytest.param(single, id="single"),
    pytest.param(simulated, id="simulated"),
]
every_world = pytest.mark.parametrize("world", WORLDS)

DTYPES = [torch.float32, torch.float64, torch.int64, torch.uint8]


def numbers(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Another vector on each rank; small integers, so that sums are exact in every dtype."""
    return torch.tensor([rank + 1, 10 * (rank + 1), (rank * 7 + 3) % 5]).to(dtype)


def size_of(results: list[Any]) -> range:
    return range(len(results))


# -- operations -----------------------------------------------------------------------------------


@every_world
@pytest.mark.parametrize("name", ["sum", "maximum"])
def test_reductions_replace_the_tensor_on_all_workers(world: World, name: str) -> None:
    """sum and maximum work elementwise, in place, in the tensor's own dtype."""

    def work(fabric: Communicator) -> Any:
        out = []
        for dtype in DTYPES:
            tensor = numbers(fabric.rank, dtype)
            result = getattr(fabric, name)(tensor, what="test").wait()
            out.append((result is tensor, tensor))
        return fabric.rank, fabric.size, out

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
    """A sum of numbers that do not add exactly is bit-identical everywhere, NaN and inf too."""

    def work(fabric: Communicator) -> Tensor:
        generator = torch.Generator().manual_seed(fabric.rank)
        tensor = torch.randn(1000, generator=generator)
        tensor[0], tensor[1] = math.inf, math.nan
        return fabric.sum(tensor, what="test").wait()

    results = world(work)
    rows = [torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in size_of(results)]
    for result in results:
        assert result[0] == math.inf
        assert result[1].isnan()
        assert torch.equal(result[2:], results[0][2:])
        torch.testing.assert_close(result[2:], sum(rows)[2:])


@every_world
def test_broadcast_gives_everyone_the_sources_tensor(world: World) -> None:
    """Any rank may be the source, and keeps its own values."""

    def work(fabric: Communicator) -> list[Tensor]:
        return [
            fabric.broadcast(numbers(fabric.rank), source=source, what="test").wait()
            for source in range(fabric.size)
        ]

    results = world(work)
    for result in results:
        for source in size_of(results):
            assert torch.equal(result[source], numbers(source))


@every_world
def test_gather_collects_in_rank_order(world: World) -> None:
    """Every worker gets all tensors; its own stays as it was."""

    def work(fabric: Communicator) -> Any:
        own = numbers(fabric.rank)
        return fabric.gather(own, what="test").wait(), own

    results = world(work)
    for rank, (parts, own) in enumerate(results):
        assert len(parts) == len(results)
        for other, part in enumerate(parts):
            assert torch.equal(part, numbers(other))
        assert torch.equal(own, numbers(rank))


@every_world
def test_send_and_receive_match_by_source_and_tag(world: World) -> None:
    """Tags keep two messages of one sender apart, in whatever order they are asked for."""

    def work(fabric: Communicator) -> Any:
        if fabric.size == 1:
            refused = []
            for start in (
                lambda: fabric.send(numbers(0), destination=0, what="a push"),
                lambda: fabric.receive(numbers(0), source=0, what="a pull"),
            ):
                try:
                    start()
                except ValueError as error:
                    refused.append(str(error))
            return refused
        after = (fabric.rank + 1) % fabric.size
        before = (fabric.rank - 1) % fabric.size
        sends = [
            fabric.send(numbers(fabric.rank) + tag, destination=after, tag=tag, what="test")
            for tag in (1, 2)
        ]
        second = fabric.receive(torch.zeros(3).double(), source=before, tag=2, what="test")
        first = fabric.receive(torch.zeros(3).double(), source=before, tag=1, what="test")
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
def test_any_is_true_if_one_worker_says_so(world: World) -> None:
    """One flag suffices, whoever raises it; none is none."""

    def work(fabric: Communicator) -> list[bool]:
        raised = [fabric.any(fabric.rank == r, what="test").wait() for r in range(fabric.size)]
        return [*raised, fabric.any(False, what="test").wait()]

    results = world(work)
    for result in results:
        assert result == [*[True] * len(results), False]
        assert {type(flag) for flag in result} == {bool}


@every_world
def test_gather_bytes_takes_any_lengths(world: World) -> None:
    """Payloads of unequal length, empty ones and zero bytes arrive as they were sent."""

    def payloads(rank: int) -> list[bytes]:
        return [b"x" * rank, b"", bytes(range(256))[rank:], b"\0" * (3 - rank), "äß".encode()]

    def work(fabric: Communicator) -> list[list[bytes]]:
        return [fabric.gather_bytes(p, what="test") for p in payloads(fabric.rank)]

    results = world(work)
    want = list(zip(*(payloads(rank) for rank in size_of(results)), strict=True))
    for result in results:
        assert [tuple(got) for got in result] == want


# -- handles --------------------------------------------------------------------------------------


@every_world
def test_operations_may_overlap_and_end_in_any_order(world: World) -> None:
    """Several started operations do not mix; their handles may be waited for backwards."""

    def work(fabric: Communicator) -> Any:
        handles: list[Handle[Any]] = []
        for i in range(4):
            handles.append(fabric.sum(numbers(fabric.rank) * (i + 1), what="test"))
            handles.append(fabric.maximum(numbers(fabric.rank) * (i + 1), what="test"))
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
def test_a_handle_is_done_after_wait_and_waits_again_for_nothing(world: World) -> None:
    """wait() returns the same result each time; done() never blocks and is true afterwards."""

    def work(fabric: Communicator) -> Any:
        handle = fabric.sum(numbers(fabric.rank), what="test")
        while not handle.done():
            pass  # it becomes true without anyone waiting
        first, second = handle.wait(), handle.wait()
        return first is second, handle.done(), first

    results = world(work)
    for same, done, value in results:
        assert same
        assert done
        assert torch.equal(value, sum(numbers(rank) for rank in size_of(results)))


@every_world
def test_done_is_false_while_others_have_not_come(world: World) -> None:
    """The first rank to start asks before the others have started: done() says so at once."""

    def work(fabric: Communicator) -> Any:
        if fabric.size == 1:
            return True
        tensor = torch.zeros(1)
        if fabric.rank == 0:
            handle = fabric.sum(torch.ones(1), what="test")
            early = handle.done()
            for other in range(1, fabric.size):  # only now let the others start
                fabric.send(tensor, destination=other, tag=5, what="go").wait()
            return not early and handle.wait().item() == fabric.size
        fabric.receive(tensor, source=0, tag=5, what="go").wait()
        return fabric.sum(torch.ones(1), what="test").wait().item() == fabric.size

    assert all(world(work))


@every_world
def test_a_message_is_done_after_wait(world: World) -> None:
    """done() of send and receive never blocks, and is true at the latest after wait()."""

    def work(fabric: Communicator) -> list[bool]:
        if fabric.size == 1:
            return [True]
        after, before = (fabric.rank + 1) % fabric.size, (fabric.rank - 1) % fabric.size
        handles = [
            fabric.receive(torch.zeros(3), source=before, what="test"),
            fabric.send(torch.ones(3), destination=after, what="test"),
        ]
        for handle in handles:
            handle.done()
            handle.wait()
        return [handle.done() for handle in handles]

    for seen in world(work):
        assert all(seen)


@every_world
def test_then_applies_the_function_once(world: World) -> None:
    """then() chains, calls its function at the first wait() only, and keeps done()."""

    def work(fabric: Communicator) -> Any:
        calls = []

        def total(result: Tensor) -> float:
            calls.append(1)
            return float(result.sum())

        handle = fabric.sum(numbers(fabric.rank), what="test").then(total)
        before = len(calls)
        doubled = handle.then(lambda value: 2 * value)
        values = [doubled.wait(), doubled.wait(), handle.wait()]
        return before, len(calls), values, handle.done() and doubled.done()

    results = world(work)
    want = float(sum(numbers(rank).sum() for rank in size_of(results)))
    for before, calls, values, done in results:
        assert (before, calls, done) == (0, 1, True)
        assert values == [2 * want, 2 * want, want]


@every_world
def test_the_clock_does_not_go_back(world: World) -> None:
    """now() counts seconds and never decreases."""

    def work(fabric: Communicator) -> bool:
        times = [fabric.now() for _ in range(50)]
        fabric.any(False, what="test").wait()
        times.append(fabric.now())
        return times == sorted(times) and all(isinstance(t, float) for t in times)

    assert all(world(work))


def test_completed_is_done_at_once() -> None:
    """The handle of an operation that needs nobody."""
    handle = Completed(3)
    assert handle.done()
    assert handle.wait() == 3
    assert handle.then(lambda value: value + 1).wait() == 4


# -- accounting -----------------------------------------------------------------------------------


@every_world
def test_accounting_counts_what_this_worker_hands_over(world: World) -> None:
    """payload_bytes: sums, maxima and gathers in full, a broadcast at its source only."""

    def work(fabric: Communicator) -> Any:
        account = Accounting(fabric)
        counts = []
        operations: list[Callable[[], object]] = [
            lambda: account.sum(torch.zeros(7), what="test").wait(),
            lambda: account.maximum(torch.zeros(7, dtype=torch.float64), what="test").wait(),
            lambda: account.gather(torch.zeros(5, dtype=torch.uint8), what="test").wait(),
            lambda: account.broadcast(torch.zeros(6), source=0, what="test").wait(),
            lambda: account.any(True, what="test").wait(),
            lambda: account.gather_bytes(b"x" * (account.rank + 1), what="test"),
        ]
        for operation in operations:
            before = account.payload_bytes
            operation()
            counts.append(account.payload_bytes - before)
        same = (account.rank, account.size, account.control_device) == (
            fabric.rank,
            fabric.size,
            fabric.control_device,
        )
        return counts, same

    results = world(work)
    for rank, (counts, same) in enumerate(results):
        # any: one float32; gather_bytes: an int64 length, then padded to the longest payload
        assert counts == [28, 56, 5, 24 if rank == 0 else 0, 4, 8 + len(results)]
        assert same


def test_accounting_counts_what_is_sent_and_not_what_is_received() -> None:
    """A push counts at its sender alone."""

    def work(fabric: Communicator) -> int:
        account = Accounting(fabric)
        if account.rank == 0:
            account.send(torch.zeros(9), destination=1, what="test").wait()
        if account.rank == 1:
            account.receive(torch.zeros(9), source=0, what="test").wait()
        return account.payload_bytes

    assert gloo(work) == [36, 0, 0]


@every_world
def test_paused_accounting_counts_nothing(world: World) -> None:
    """Inside paused() neither bytes nor waits count, also nested and after an exception."""

    def work(fabric: Communicator) -> Any:
        account = Accounting(fabric)
        with account.paused():
            account.sum(torch.zeros(7), what="test").wait()
            with account.paused():
                account.sum(torch.zeros(7), what="test").wait()
            account.sum(torch.zeros(7), what="test").wait()
        try:
            with account.paused():
                raise KeyError
        except KeyError:
            pass
        nothing = account.payload_bytes, account.wait_seconds
        account.sum(torch.zeros(7), what="test").wait()
        return nothing, account.payload_bytes, account.wait_seconds

    for nothing, payload, waited in world(work):
        assert nothing == (0, 0.0)
        assert payload == 28
        assert waited > 0


class Clocked(SingleCommunicator):
    """A clock that the test moves, and operations that take as long as it says."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        return _Slow(self, tensor)


class _Slow(Handle[Tensor]):
    def __init__(self, clock: Clocked, tensor: Tensor) -> None:
        self._clock, self._tensor = clock, tensor

    def done(self) -> bool:
        return False

    def wait(self) -> Tensor:
        self._clock.seconds += 1.5
        if self._tensor.isnan().any():
            raise offbeat.CommunicationError("lost")
        return self._tensor


def test_wait_seconds_are_those_blocked_in_wait() -> None:
    """Only time inside wait() is waiting, through then() and failures too."""
    clock = Clocked()
    account = Accounting(clock)
    handle = account.sum(torch.zeros(2), what="test")
    clock.seconds += 10  # computing
    assert not handle.done()
    handle.wait()
    assert account.wait_seconds == 1.5
    account.sum(torch.zeros(2), what="test").then(lambda result: result).wait()
    assert account.wait_seconds == 3.0
    failing = account.sum(torch.tensor([math.nan]), what="test")
    with pytest.raises(offbeat.CommunicationError):
        failing.wait()
    assert account.wait_seconds == 4.5
    assert account.now() == clock.seconds == 14.5
