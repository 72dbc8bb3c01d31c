"""A worker that is late for an operation."""

import time

import torch

import workers
from faults import Fault, Faults
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator


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
