"""What every communicator does, whatever carries its bytes.

A row of ``WORLDS`` is a way to run ``function(communicator)`` on all workers of one communicator
and to get the results in rank order. A communicator is held to this suite by adding its row.
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
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
    Promise,
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
def test_messages_of_one_sender_and_tag_arrive_in_order(world: World) -> None:
    """Headers under one tag, each followed by values under another, from all workers to all."""

    def work(fabric: Communicator) -> Any:
        others = [rank for rank in range(fabric.size) if rank != fabric.rank]
        sends = []
        for i in range(5):
            for other in others:
                header, values = torch.tensor([fabric.rank, i]), numbers(fabric.rank) * (i + 1)
                sends.append(fabric.send(header, destination=other, tag=1, what="test"))
                sends.append(fabric.send(values, destination=other, tag=2, what="test"))
        received = []
        for other in others[::-1]:
            for _ in range(5):
                header, values = torch.zeros(2, dtype=torch.int64), torch.zeros(3).double()
                fabric.receive(header, source=other, tag=1, what="test", patient=True).wait()
                fabric.receive(values, source=other, tag=2, what="test").wait()
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


def meet(folder: str, rank: int, ranks: list[int]) -> None:
    """Wait until all of ``ranks`` are here; not through a communicator."""
    store = dist.FileStore(f"{folder}/meeting", -1)
    store.set(str(rank), "here")
    store.wait([str(other) for other in ranks], timedelta(seconds=30))


def be_patient(rank: int, size: int, folder: str) -> Any:
    fabric = TorchCommunicator(None, timeout_seconds=0.5)
    outcomes = []
    if rank == 0:
        for source in (1, 2):
            fabric.send(torch.zeros(1), destination=source, what="go").wait()
            started = time.perf_counter()
            handle = fabric.receive(torch.zeros(1), source=source, what="a push", patient=True)
            try:
                outcomes.append(f"{handle.wait().item():g}")
            except offbeat.CommunicationError as error:
                outcomes.append(f"{type(error).__name__}: {error}")
            outcomes[-1] += f" in {time.perf_counter() - started:.1f}"
        meet(folder, rank, [0, 1])
    elif rank == 1:
        fabric.receive(torch.zeros(1), source=0, what="go", patient=True).wait()
        time.sleep(1.2)  # more than two time-outs
        fabric.send(torch.tensor([7.0]), destination=0, what="a push").wait()
        meet(folder, rank, [0, 1])
    elif rank == 2:
        fabric.receive(torch.zeros(1), source=0, what="go", patient=True).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    return outcomes


def test_a_patient_receive_has_no_time_out_but_ends_with_its_connection(tmp_path: Path) -> None:
    """The message may come late; when the sender dies the error comes at once and names it."""
    late, lost = run(be_patient, str(tmp_path), workers=3, may_die=(2,))[0]
    value, seconds = late.split(" in ")
    assert (value, float(seconds) >= 1.0) == ("7", True), late
    assert lost.startswith(("CommunicationError", "CommunicationTimeout")), lost
    assert "rank 0: a push failed" in lost
    assert "lost the connection to rank 2, which died" in lost


@every_world
def test_exchange_sends_chunk_k_to_worker_k(world: World) -> None:
    """All-to-all into a new tensor of the same dtype; what was given stays as it was."""

    def chunks(rank: int, size: int, dtype: torch.dtype) -> Tensor:
        parts = [[10 * rank + k, 100 + rank, 200 + k] for k in range(size)]
        return torch.tensor(parts).reshape(-1).to(dtype)

    def work(fabric: Communicator) -> Any:
        out = []
        for dtype in DTYPES:
            own = chunks(fabric.rank, fabric.size, dtype)
            result = fabric.exchange(own, what="test").wait()
            kept = torch.equal(own, chunks(fabric.rank, fabric.size, dtype))
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


# -- twins, communicators, activities --------------------------------------------------------------


@every_world
def test_a_twin_has_an_order_of_its_own(world: World) -> None:
    """Ranks start operations of the twin and of the original in different orders: none mix."""

    def work(fabric: Communicator) -> Any:
        twin = fabric.twin()
        alike = (twin.rank, twin.size) == (fabric.rank, fabric.size)
        value = numbers(fabric.rank)
        starts: list[tuple[str, Callable[[], Handle[Any]]]] = [
            ("original", lambda: fabric.sum(value.clone(), what="test")),
            ("twin", lambda: twin.sum(100 * value, what="test")),
        ]
        again: list[tuple[str, Callable[[], Handle[Any]]]] = [
            ("original maximum", lambda: fabric.maximum(value.clone(), what="test")),
            ("twin gather", lambda: twin.gather(value + 7, what="test")),
            ("second twin", lambda: second.sum(1000 * value, what="test")),
        ]
        second = fabric.twin()
        turn = fabric.rank % 2
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
    """The same sender and tag on both: each receives its own, whichever asks first."""

    def work(fabric: Communicator) -> Any:
        twin = fabric.twin()
        if fabric.size == 1:
            return 1.0, 2.0
        on_original, on_twin = torch.ones(1), torch.full((1,), 2.0)
        if fabric.rank == 0:
            handles = [
                fabric.send(on_original, destination=1, tag=3, what="test"),
                twin.send(on_twin, destination=1, tag=3, what="test"),
            ]
            for handle in handles:
                handle.wait()
        elif fabric.rank == 1:
            on_original, on_twin = torch.zeros(1), torch.zeros(1)
            twin.receive(on_twin, source=0, tag=3, what="test").wait()
            fabric.receive(on_original, source=0, tag=3, what="test").wait()
        return on_original.item(), on_twin.item()

    assert set(world(work)) == {(1.0, 2.0)}


def test_two_communicators_of_a_simulation_do_not_mix() -> None:
    """Messages and collectives meet within one communicator, as those of two process groups do."""

    def work() -> Any:
        make = dist.group.WORLD.make_communicator  # type: ignore[union-attr]
        first, second = make(), make()
        rank, size = first.rank, first.size
        after, before = (rank + 1) % size, (rank - 1) % size
        messages = {1: torch.full((2,), 10.0 + rank), 2: torch.full((2,), 20.0 + rank)}
        for number, fabric in ((1, first), (2, second)):
            fabric.send(messages[number], destination=after, tag=5, what="test")
        received = {}
        for number, fabric in ((2, second), (1, first)):
            into = torch.zeros(2)
            received[number] = fabric.receive(into, source=before, tag=5, what="test").wait()
        pair = [(first, 1.0), (second, 100.0)]
        sums = [
            fabric.sum(torch.tensor([value]), what="test")
            for fabric, value in (pair[::-1] if rank % 2 else pair)
        ]
        values = sorted(handle.wait().item() for handle in sums)
        return received[1].tolist(), received[2].tolist(), values

    for rank, (one, two, sums) in enumerate(offbeat.simulate(work, workers=3).results):
        before = (rank - 1) % 3
        assert one == [10.0 + before] * 2
        assert two == [20.0 + before] * 2
        assert sums == [3.0, 300.0]


@every_world
def test_an_activity_beside_the_worker_fulfils_its_promise(world: World) -> None:
    """spawn() runs it at once, beside collectives of the worker; its result arrives."""

    def work(fabric: Communicator) -> Any:
        promise: Promise[list[float]] = fabric.promise(what="what the neighbour sends")

        def activity() -> None:
            received = []
            for _ in range(3 if fabric.size > 1 else 0):
                message, before = torch.zeros(1), (fabric.rank - 1) % fabric.size
                fabric.background.receive(message, source=before, tag=6, what="test").wait()
                received.append(message.item())
            promise.fulfil(received)

        fabric.spawn(activity, what="a test activity")
        sends = []
        for i in range(3 if fabric.size > 1 else 0):
            fabric.sum(numbers(fabric.rank), what="test").wait()
            message = torch.tensor([10.0 * fabric.rank + i])
            after = (fabric.rank + 1) % fabric.size
            sends.append(fabric.send(message, destination=after, tag=6, what="test"))
        first, second = promise.wait(), promise.wait()
        for handle in sends:
            handle.wait()
        return first, first is second, promise.done()

    results = world(work)
    for rank, (received, same, done) in enumerate(results):
        before = (rank - 1) % len(results)
        assert received == ([10.0 * before + i for i in range(3)] if len(results) > 1 else [])
        assert same
        assert done


@every_world
def test_a_promise_can_be_polled(world: World) -> None:
    """done() becomes true without anyone waiting, as that of any other handle."""

    def work(fabric: Communicator) -> bool:
        if fabric.size == 1:
            return True
        promise: Promise[int] = fabric.promise(what="a message")

        def activity() -> None:
            before = (fabric.rank - 1) % fabric.size
            fabric.background.receive(torch.zeros(1), source=before, tag=6, what="test").wait()
            promise.fulfil(1)

        fabric.spawn(activity, what="a test activity")
        after = (fabric.rank + 1) % fabric.size
        fabric.send(torch.zeros(1), destination=after, tag=6, what="test").wait()
        deadline = time.perf_counter() + 1
        while not promise.done() and time.perf_counter() < deadline:
            pass
        done = promise.done()
        promise.wait()
        return done

    assert all(world(work))


def break_a_promise(rank: int, size: int) -> Any:
    fabric = TorchCommunicator(None, timeout_seconds=1.0)
    promise: Promise[int] = fabric.promise(what="an answer of rank 0's own")
    started = time.perf_counter()
    try:
        promise.wait()
    except offbeat.CommunicationTimeout as error:
        return str(error), time.perf_counter() - started
    return "nothing was raised", 0.0


def test_a_promise_that_is_not_kept_ends_in_a_time_out() -> None:
    """Finite, and the error names the rank, what was waited for and the knob."""
    for rank, (text, seconds) in enumerate(run(break_a_promise, workers=2)):
        assert text.startswith(f"rank {rank}: an answer of rank 0's own failed after 1."), text
        assert "timeout_seconds=1" in text
        assert 0.95 <= seconds < 6


def close_one(rank: int, size: int, folder: str) -> Any:
    fabric = TorchCommunicator(None, timeout_seconds=20)
    started = time.perf_counter()
    if rank == 0:
        outcome: list[str] = []

        def activity() -> None:
            try:
                fabric.background.receive(
                    torch.zeros(1), source=1, tag=6, what="a request", patient=True
                ).wait()
            except offbeat.CommunicationError as error:
                outcome.append(str(error))

        fabric.spawn(activity, what="a test activity")
        fabric.send(torch.zeros(1), destination=1, what="test").wait()  # the thread is running
        fabric.close()
        alive = [t.name for t in threading.enumerate() if t.name == "a test activity"]
        seconds = time.perf_counter() - started
        fabric.close()  # again: nothing
        meet(folder, rank, [0, 1, 2])  # alive while the others ask what has happened
        return alive, outcome, seconds
    if rank == 1:
        fabric.receive(torch.zeros(1), source=0, what="test").wait()
    text = "nothing was raised"
    try:
        fabric.receive(torch.zeros(1), source=0, tag=9, what="an answer").wait()
    except offbeat.CommunicationError as error:
        text = str(error)
    seconds = time.perf_counter() - started
    meet(folder, rank, [0, 1, 2])
    return text, seconds


def test_closing_ends_activities_and_whoever_waits_for_this_worker(tmp_path: Path) -> None:
    """close() is no collective: own threads end, the others' operations fail long before 20 s."""
    (alive, outcome, seconds), *others = run(close_one, str(tmp_path), workers=3)
    assert alive == []
    assert len(outcome) == 1
    assert "rank 0 has given up" in outcome[0]
    assert seconds < 6
    for rank, (text, waited) in enumerate(others, start=1):
        assert text.startswith(f"rank {rank}: an answer failed after"), text
        assert waited < 10


def test_a_plain_promise_ends_in_a_time_out() -> None:
    """Without a network, too."""
    promise: Promise[int] = Promise("an answer", 0.01)
    assert not promise.done()
    with pytest.raises(offbeat.CommunicationTimeout, match=r"an answer.*timeout_seconds=0\.01"):
        promise.wait()


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
            lambda: account.exchange(torch.zeros(2 * account.size), what="test").wait(),
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
        size = len(results)
        assert counts == [28, 56, 5, 24 if rank == 0 else 0, 4, 8 + size, 8 * size]
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
def test_a_twin_counts_on_the_same_account(world: World) -> None:
    """Its bytes and its waits, those of a twin of a twin too; and nothing while paused."""

    def work(fabric: Communicator) -> Any:
        account = Accounting(fabric)
        twin = account.twin()
        other = twin.twin()
        alike = (twin.rank, twin.size) == (fabric.rank, fabric.size)
        twin.sum(torch.zeros(7), what="test").wait()
        other.gather(torch.zeros(3), what="test").wait()
        counted, waited = account.payload_bytes, account.wait_seconds
        with account.paused():
            twin.sum(torch.zeros(7), what="test").wait()
            twin.exchange(torch.zeros(2 * fabric.size), what="test").wait()
        paused = account.payload_bytes - counted, account.wait_seconds - waited
        return alike, counted, waited, paused

    for alike, counted, waited, paused in world(work):
        assert alike
        assert counted == 28 + 12
        assert waited > 0
        assert paused == (0, 0.0)


@every_world
def test_the_background_is_not_accounted(world: World) -> None:
    """What an activity sends and waits for does not count; the worker's wait for a promise does."""

    def work(fabric: Communicator) -> Any:
        account = Accounting(fabric)
        promise: Promise[float] = account.promise(what="a message")

        def activity() -> None:
            background, message = account.background, torch.full((9,), 1.0 + fabric.rank)
            if fabric.size > 1:
                after, before = (fabric.rank + 1) % fabric.size, (fabric.rank - 1) % fabric.size
                send = background.send(message, destination=after, tag=6, what="test")
                message = torch.zeros(9)
                background.receive(message, source=before, tag=6, what="test").wait()
                send.wait()
                background.receive(torch.zeros(1), source=before, tag=7, what="test").wait()
            promise.fulfil(message[0].item())

        account.spawn(activity, what="a test activity")
        nothing = account.payload_bytes, account.wait_seconds
        if fabric.size > 1:
            after = (fabric.rank + 1) % fabric.size
            fabric.send(torch.zeros(1), destination=after, tag=7, what="test").wait()
        start = account.now()
        got = promise.wait()
        elapsed = account.now() - start
        return nothing, got, account.payload_bytes, account.wait_seconds, elapsed

    results = world(work)
    for rank, (nothing, got, payload, waited, elapsed) in enumerate(results):
        assert nothing == (0, 0.0)
        assert got == 1.0 + (rank - 1) % len(results)
        assert payload == 0
        assert 0 < waited <= elapsed or waited == elapsed == 0


def test_waiting_for_a_promise_takes_virtual_time_that_counts() -> None:
    """Exactly the time until it is fulfilled; a background that waits meanwhile adds nothing."""

    def work() -> Any:
        fabric = dist.group.WORLD.make_communicator()  # type: ignore[union-attr]
        account = Accounting(fabric)
        promise: Promise[int] = account.promise(what="a message")

        def activity() -> None:
            message, before = torch.zeros(250), (fabric.rank - 1) % fabric.size
            account.background.receive(message, source=before, tag=6, what="test").wait()
            promise.fulfil(1)

        account.spawn(activity, what="a test activity")
        after = (fabric.rank + 1) % fabric.size
        fabric.send(torch.zeros(250), destination=after, tag=6, what="test")
        promise.wait()
        return account.wait_seconds, account.payload_bytes

    network = offbeat.Network("8Mbit/s", latency="1ms")  # 1000 bytes: 1 ms + 1 ms
    result = offbeat.simulate(work, workers=2, network=network)
    for waited, payload in result.results:
        assert waited == pytest.approx(2e-3, rel=1e-9)
        assert payload == 0
    assert {span.kind for span in result.timeline} == {"wait", "transfer"}
    assert sum(span.kind == "wait" for span in result.timeline) == 2


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
