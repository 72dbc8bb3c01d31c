"""Second stages: their order, failures and end."""

import weakref
from typing import Any

import pytest
import torch

from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Completed, Handle
from offbeat.transport.stages import Stages
from transport import communicators

every_world = pytest.mark.parametrize(
    "world", [communicators.gloo, communicators.simulated], ids=["gloo", "simulated"]
)
LIKE = torch.empty(0)


def failing(communicator: Communicator) -> list[str]:
    """The second operation fails in its second stage. Returns what the waits raise."""
    stages = Stages(communicator, "stages")

    def second(number: int) -> Any:
        def start(_: int) -> Handle[int]:
            if number == 1:
                raise ValueError("number 1")
            return Completed(number)

        return start

    def start(number: int) -> Handle[int]:
        return stages.start(Completed(number), second(number), what="operation", like=LIKE)

    handles, seen = [start(number) for number in range(3)], []
    for handle in handles:
        try:
            seen.append(str(handle.wait()))
        except ValueError as error:
            seen.append(str(error))
    try:
        start(3).wait()
    except ValueError as error:
        seen.append(str(error))
    return seen


@every_world
def test_a_failure_ends_all_later_operations(world: Any) -> None:
    for seen in world(failing):
        assert seen == ["0", "number 1", "number 1", "number 1"]


def freed(communicator: Communicator) -> int:
    """Run many operations, one after the other. Returns how many first results are still there."""
    stages, results = Stages(communicator, "stages"), []

    def second(received: torch.Tensor) -> Handle[int]:
        results.append(weakref.ref(received))
        return Completed(0)

    for _ in range(20):
        first = Completed(torch.ones(1000))
        stages.start(first, second, what="operation", like=LIKE).wait()
    del first
    left = sum(result() is not None for result in results)
    return left


@every_world
def test_operations_that_have_ended_are_freed(world: Any) -> None:
    """The thread may still hold the last one."""
    assert all(left <= 1 for left in world(freed))
