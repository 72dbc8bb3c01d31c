"""Faults at a given operation of a given worker, and how a training and its peers notice them."""

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
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator
from problems import make_batch, make_model, train_step
from transport.communicators import (
    meet,
    simulated,
)

OPERATIONS = 6


def sums(communicator: Communicator) -> list[Any]:
    """Sum on the communicator and its twin in turn. Return each result or error message."""
    twin, outcomes = communicator.twin(), []
    for i in range(OPERATIONS):
        one = twin if i % 2 else communicator
        try:
            outcomes.append(one.sum(torch.tensor([10.0**i]), what=f"sum {i}").wait().item())
        except offbeat.CommunicationError as error:
            outcomes.append(str(error))
    return outcomes


def test_a_fault_fails_one_operation_of_one_worker() -> None:
    """The operation takes place, wait() raises each time, and the next operations succeed."""

    def work(inner: Communicator) -> Any:
        communicator = Faults(inner, [Fault("fail", rank=1, operation=2), Fault("fail", 2, 5)])
        outcomes, tensor = sums(communicator), torch.ones(1)
        failing = Faults(inner, [Fault("fail", rank=rank, operation=0) for rank in range(3)])
        handle = failing.sum(tensor, what="a sum")
        while not handle.done():
            pass
        for one in (handle, handle, handle.then(lambda result: result)):
            with pytest.raises(offbeat.CommunicationError, match="a sum failed on purpose"):
                one.wait()
        return outcomes, communicator.count, tensor.item()

    for rank, (outcomes, count, total) in enumerate(simulated(work)):
        want: list[Any] = [3 * 10.0**i for i in range(OPERATIONS)]
        if rank == 1:
            want[2] = "rank 1: sum 2 failed on purpose"
        if rank == 2:
            want[5] = "rank 2: sum 5 failed on purpose"
        assert outcomes == want
        assert count == OPERATIONS
        assert total == 3.0


def test_a_delayed_operation_starts_late_on_all_workers() -> None:
    """The worker sleeps in virtual time, and the others wait for it."""

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


def delay_for_real(rank: int, size: int) -> float:
    inner = TorchCommunicator(None, timeout_seconds=20)
    communicator = Faults(inner, [Fault("delay", rank=1, operation=1, seconds=0.3)])
    communicator.sum(torch.ones(1), what="a sum").wait()
    started = time.perf_counter()
    communicator.sum(torch.ones(1), what="a late sum").wait()
    elapsed = time.perf_counter() - started
    communicator.close(together=True)
    return elapsed


def test_real_workers_wait_for_a_delayed_one() -> None:
    assert all(0.25 <= elapsed < 10 for elapsed in workers.run(delay_for_real, workers=2))


def cut(rank: int, size: int, operation: int) -> list[Any]:
    inner = TorchCommunicator(None, timeout_seconds=20, liveness_seconds=5.0)
    outcomes = sums(Faults(inner, [Fault("cut", rank=1, operation=operation)]))
    meet("all have seen it", [0, 1, 2])
    inner.close()
    return outcomes


@pytest.mark.parametrize("operation", [0, 3])
def test_a_cut_ends_the_connections_of_one_worker(operation: int) -> None:
    """Also those of its twins. All others notice at once and name the rank."""
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
    """A transport with faults."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        inner = open_communicator(None, timeout_seconds, what="a test")
        self.made = Faults(inner, self.faults)
        return self.made


def test_faults_reach_a_training_through_a_transport() -> None:
    """The step whose operation fails raises, and so do the next ones."""

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
