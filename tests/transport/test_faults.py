"""Faults happen at the operation they were meant for, on the worker they were meant for."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
import workers
from faults import Fault, Faults
from offbeat.elastic.connect import open_communicator
from offbeat.transport.communicator import Communicator
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.torch_distributed import TorchCommunicator
from problems import make_batch, make_model, train_step
from transport.communicators import (
    STEP_SECONDS,
    World,
    meet,
    simulated,
    worlds_of_several,
    worlds_without_processes,
)

OPERATIONS = 6


def sums(communicator: Communicator) -> list[Any]:
    """So many sums, in turn on the communicator and its twin: each result, or why there is none."""
    twin, outcomes = communicator.twin(), []
    for i in range(OPERATIONS):
        one = twin if i % 2 else communicator
        try:
            outcomes.append(one.sum(torch.tensor([10.0**i]), what=f"sum {i}").wait().item())
        except offbeat.CommunicationError as error:
            outcomes.append(str(error))
    return outcomes


@worlds_of_several
def test_a_fault_fails_one_operation_of_one_worker(world: World) -> None:
    """Only there; it takes place for the others, and the next ones are as if nothing had been."""

    def work(inner: Communicator) -> Any:
        communicator = Faults(inner, [Fault("fail", rank=1, operation=2), Fault("fail", 2, 5)])
        return sums(communicator), communicator.count

    for rank, (outcomes, count) in enumerate(world(work)):
        want: list[Any] = [3 * 10.0**i for i in range(OPERATIONS)]
        if rank == 1:
            want[2] = "rank 1: sum 2 failed on purpose"
        if rank == 2:
            want[5] = "rank 2: sum 5 failed on purpose"
        assert outcomes == want
        assert count == OPERATIONS


def test_a_failed_operation_has_taken_place() -> None:
    """Its result is there, as late as ever, and lost."""

    def work(inner: Communicator) -> Any:
        communicator, tensor = Faults(inner, [Fault("fail", rank=1, operation=0)]), torch.ones(1000)
        handle = communicator.sum(tensor, what="a sum")
        try:
            handle.wait()
        except offbeat.CommunicationError:
            return tensor[0].item(), communicator.host.now(), "lost"
        return tensor[0].item(), communicator.host.now(), "seen"

    first, *others = simulated(work)
    assert first[0] == 3.0
    assert first[1] > 0
    assert [*first[2:], *(kind for *_, kind in others)] == ["seen", "lost", "seen"]
    assert all(other[:2] == first[:2] for other in others)


@pytest.mark.parametrize("operation", range(OPERATIONS))
def test_every_operation_can_be_hit(operation: int) -> None:
    """They are numbered from 0 in the order of their start, those of twins counted along."""

    def work(inner: Communicator) -> list[bool]:
        outcomes = sums(Faults(inner, [Fault("fail", rank=0, operation=operation)]))
        return [isinstance(outcome, str) for outcome in outcomes]

    hit = [i == operation for i in range(OPERATIONS)]
    assert simulated(work) == [hit, [False] * OPERATIONS, [False] * OPERATIONS]


@worlds_without_processes
def test_a_failed_operation_fails_at_every_wait_and_never_before(world: World) -> None:
    """start() and done() are those of the operation, which takes place; then() raises, too."""

    def work(inner: Communicator) -> Any:
        communicator = Faults(inner, [Fault("fail", rank=rank, operation=0) for rank in range(3)])
        tensor = torch.ones(1)
        handle = communicator.sum(tensor, what="a sum")
        while not handle.done():
            pass
        failures = 0
        for one in (handle, handle, handle.then(lambda result: result)):
            with pytest.raises(offbeat.CommunicationError, match="a sum failed on purpose"):
                one.wait()
            failures += 1
        return failures, tensor.item()

    results = world(work)
    assert results == [(3, float(len(results)))] * len(results)


def test_a_delayed_operation_starts_late_for_all() -> None:
    """In the simulator to the last bit: the worker sleeps, and the others wait for it."""

    def work(inner: Communicator) -> Any:
        delay = Fault("delay", rank=1, operation=3, seconds=2.5)
        communicator = Faults(inner, [delay])
        communicator.sum(torch.ones(1), what="a sum").wait()
        communicator.twin().sum(torch.ones(1), what="a sum").wait()
        communicator.sum(torch.ones(1), what="a sum").wait()
        before = communicator.host.now()
        handle = communicator.sum(torch.ones(1), what="a late sum")
        started = communicator.host.now() - before
        handle.wait()
        return started, communicator.host.now() - before, before

    results = simulated(work)
    duration = results[0][2] / 3  # of a sum
    for rank, (started, ended, _) in enumerate(results):
        assert started == pytest.approx(2.5 if rank == 1 else 0.0)
        assert ended == pytest.approx(2.5 + duration)


def test_a_delay_of_an_activity_does_not_hold_up_the_worker() -> None:
    """Beside the worker, too, time is the activity's own."""

    def work(inner: Communicator) -> float:
        communicator = Faults(inner, [Fault("delay", rank=0, operation=0, seconds=2.5)])
        if communicator.rank < 2:

            def activity() -> None:
                if communicator.rank == 0:
                    communicator.send(torch.ones(1), destination=1, what="a late message").wait()
                else:
                    communicator.receive(torch.ones(1), source=0, what="a late message").wait()

            communicator.host.spawn(activity, what="a test activity")
        communicator.host.computed(1)
        return communicator.host.now()

    assert simulated(work) == pytest.approx([STEP_SECONDS] * 3)


def delay_for_real(rank: int, size: int) -> float:
    inner = TorchCommunicator(None, timeout_seconds=20)
    communicator = Faults(inner, [Fault("delay", rank=1, operation=1, seconds=0.3)])
    communicator.sum(torch.ones(1), what="a sum").wait()
    started = time.perf_counter()
    communicator.sum(torch.ones(1), what="a late sum").wait()
    elapsed = time.perf_counter() - started
    communicator.close(together=True)
    return elapsed


def test_a_delay_is_one_of_real_workers() -> None:
    assert all(0.25 <= elapsed < 10 for elapsed in workers.run(delay_for_real, workers=2))


def cut(rank: int, size: int, operation: int) -> list[Any]:
    inner = TorchCommunicator(None, timeout_seconds=20, liveness_seconds=5.0)
    outcomes = sums(Faults(inner, [Fault("cut", rank=1, operation=operation)]))
    meet("all have seen it", [0, 1, 2])
    inner.close()
    return outcomes


@pytest.mark.parametrize("operation", [0, 3])
def test_a_cut_ends_the_connections_of_one_worker(operation: int) -> None:
    """Just before the operation, on its twins too; all others find out at once, and who it is."""
    started = time.perf_counter()
    for rank, outcomes in enumerate(workers.run(cut, operation, workers=3)):
        assert outcomes[:operation] == [3 * 10.0**i for i in range(operation)]
        for i, text in enumerate(outcomes[operation:], start=operation):
            if rank == 1:
                assert f"sum {i} after this worker has left" in text
            else:
                assert text.startswith(f"rank {rank}: sum {operation} failed after 0."), text
                assert "lost the connection to rank 1, which gave up" in text
    assert time.perf_counter() - started < 10


class Faulty:
    """A transport with faults, as in the documentation."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        inner = open_communicator(None, timeout_seconds, what="a test")
        self.made = Faults(inner, self.faults)
        return self.made


def test_faults_reach_a_training_through_a_transport() -> None:
    """Those of set-up are counted; the step whose operation fails raises, and the next ones."""

    def train(transport: Faulty) -> Any:
        """Operations of set-up and of each step, up to the first step that fails."""
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = offbeat.attach(model, optimizer, offbeat.BSP(), group=transport)
        counts = [transport.made.count]
        for step in range(8):
            try:
                train_step(model, optimizer, make_batch(dist.get_rank(), step))
            except offbeat.CommunicationError:
                break
            counts.append(transport.made.count - sum(counts))
        sync.detach()
        return counts

    def work() -> Any:
        clean = train(Faulty())
        operation = sum(clean[:6])  # the first of the sixth step
        return clean, train(Faulty(*[Fault("fail", rank, operation) for rank in range(3)]))

    for clean, broken in offbeat.simulate(work, workers=3).results:
        assert len(clean) == 9
        assert broken == clean[:6]


def test_only_the_named_worker_has_faults() -> None:
    communicator = Faults(SingleCommunicator(), [Fault("fail", rank=1, operation=0)])
    assert communicator.sum(torch.ones(1), what="test").wait().item() == 1.0
