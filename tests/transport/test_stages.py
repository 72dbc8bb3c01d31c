"""Second stages: their failures and end."""

import weakref

import torch

from offbeat.transport.communicator import Communicator
from offbeat.transport.future import Completed, Future
from offbeat.transport.stages import Stages
from transport.communicators import World, worlds_of_several


def staged(communicator: Communicator) -> tuple[list[str], int]:
    """Run operations of which number 20 fails in its second stage.

    Returns:
        The results or errors of the last ones, and how many first results are still there.
    """
    stages, received = Stages(communicator, "stages"), []

    def start(number: int) -> Future[int]:
        def second(first: torch.Tensor) -> Future[int]:
            received.append(weakref.ref(first))
            if number == 20:
                raise ValueError("number 20")
            return Completed(number)

        first = Completed(torch.ones(1000))
        return stages.start(first, second, what="operation", like=torch.empty(0))

    for number in range(19):
        start(number).wait()
    held, seen = sum(first() is not None for first in received), []
    for future in [start(number) for number in range(19, 22)] + [start(22)]:
        try:
            seen.append(str(future.wait()))
        except ValueError as error:
            seen.append(str(error))
    return seen, held


@worlds_of_several
def test_a_failure_ends_all_later_operations_and_ended_ones_are_freed(world: World) -> None:
    """The thread may still hold the last one."""
    for seen, held in world(staged):
        assert seen == ["19", "number 20", "number 20", "number 20"]
        assert held <= 1
