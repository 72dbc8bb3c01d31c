"""Worlds: ways to run a function on all workers of a communicator, with results in rank order.

The tests of this folder run on every communicator in ``WORLDS``.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import offbeat
import workers
from offbeat.transport.communicator import Communicator
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator

Function = Callable[[Communicator], Any]
World = Callable[[Function], list[Any]]

STEP_SECONDS = 0.05
"""Duration of ``host.computed(1)`` in the simulated world."""
TIMEOUT_SECONDS = 20.0


_open: list[Communicator] = []
"""Open communicators of this process, which ends with them: closing takes longer than a test."""


def _on_gloo(rank: int, size: int, function: Function) -> Any:
    _open.append(TorchCommunicator(None, timeout_seconds=TIMEOUT_SECONDS))
    result = function(_open[0])
    dist.barrier()  # an early exit would close connections that others still use
    return result


def gloo(function: Function, number: int = 3) -> list[Any]:
    """A number of processes."""
    return workers.run(_on_gloo, function, workers=number)


def single(function: Function) -> list[Any]:
    """A single process."""
    return [function(SingleCommunicator(TIMEOUT_SECONDS))]


def simulated(function: Function, number: int = 3) -> list[Any]:
    """A number of workers in virtual time."""
    return offbeat.simulate(
        lambda: function(dist.group.WORLD.make_communicator(TIMEOUT_SECONDS)),
        workers=number,
        network=offbeat.Network("100Mbit/s"),
        compute=offbeat.Compute(STEP_SECONDS),
    ).results


WORLDS = [pytest.param(world, id=world.__name__) for world in (gloo, single, simulated)]
every_world = pytest.mark.parametrize("world", WORLDS)
worlds_of_several = pytest.mark.parametrize("world", [WORLDS[0], WORLDS[2]])
worlds_without_processes = pytest.mark.parametrize("world", WORLDS[1:])


def held(most: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Return the numbers of threads and descriptors, once they are at most ``most``.

    A joined thread is counted for a moment longer.
    """
    deadline = time.monotonic() + 5
    while True:
        found = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        settled = all(a <= b for a, b in zip(found, most, strict=True))
        if not any(most) or settled or time.monotonic() > deadline:
            return found
        time.sleep(0.001)


def meet(name: str, ranks: list[int]) -> None:
    """Wait until all of ``ranks`` have called this with the same ``name``. Processes only.

    It uses the store of the test, which works after the failure of a communicator.
    """
    store = dist.group.WORLD.get_group_store()
    store.set(f"meeting {name}/{dist.get_rank()}", "here")
    store.wait([f"meeting {name}/{rank}" for rank in ranks], timedelta(seconds=30))
    store.set(f"after {name}/{dist.get_rank()}", "seen")
    if dist.get_rank() == 0:  # it serves the store, so it must not exit first
        store.wait([f"after {name}/{rank}" for rank in ranks], timedelta(seconds=30))
