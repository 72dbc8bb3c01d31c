"""Real workers that die, are stopped, or come later: who goes on, how soon, and who is told what.

Each adds up 2 to the power of its number, so that a sum says who has taken part.
"""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.errors import CommunicationError
from offbeat.fabric import groups, regroup
from offbeat.fabric.membership import membership_of
from offbeat.fabric.regroup import open_elastic
from workers import run

TIMEOUT_SECONDS = 20.0
SUMS = 3  # of the last view


def mask(*numbers: int) -> float:
    return float(sum(2**number for number in numbers))


class Worker:
    """One that goes on adding, through all views."""

    def __init__(self, number: int, size: int, **settings: float) -> None:
        settings = {"timeout_seconds": TIMEOUT_SECONDS, **settings}
        if number < size:
            self.communicator = open_elastic(None, **settings)
        else:
            self.communicator = offbeat.join().make_communicator(settings["timeout_seconds"])
        self.number, self.steps, self.totals = number, 0, []
        self.views: list[Any] = []
        self.changed = 0.0
        self._enter(self.membership.view)

    @property
    def membership(self) -> Any:
        return membership_of(self.communicator)

    def _enter(self, view: Any) -> None:
        self.communicator, self.view = view.communicator, view
        self.views.append((view.number, view.members, sorted(view.newcomers)))
        self.totals.append([])

    def step(self) -> float:
        """The sum of those in the view; nan if that has ended."""
        try:
            if self.membership.wanted():
                raise CommunicationError("wanted")
            x = torch.tensor([mask(self.number)])
            total = self.communicator.sum(x, what="a sum").wait().item()
        except CommunicationError:
            self.communicator.close()
            self._enter(self.membership.regroup(view=self.view.number, step=self.steps))
            self.changed = time.monotonic()
            return float("nan")
        self.steps += 1
        self.totals[-1].append(total)
        return total

    def until(self, *numbers: int) -> "Worker":
        """Go on until these and no others have been in a view for a while."""
        deadline = time.monotonic() + 40
        while self.view.members != numbers or len(self.totals[-1]) < SUMS:
            assert time.monotonic() < deadline, (self.views, numbers)
            self.step()
        return self

    def finish(self) -> Any:
        """The views and what was summed in each."""
        self.membership.leave(ended=True)
        self.communicator.close(together=True)
        for (_, members, _), totals in zip(self.views, self.totals, strict=True):
            assert set(totals) <= {mask(*members)}
        return self.views


def store() -> Any:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)


def die() -> None:
    store().set("died", str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


# -- deaths ---------------------------------------------------------------------------------------


def lose(rank: int, size: int, victims: list[int]) -> Any:
    worker = Worker(rank, size).until(*range(size))
    if rank in victims:
        die()
    survivors = [other for other in range(size) if other not in victims]
    worker.until(*survivors)
    return worker.finish(), worker.changed - float(store().get("died"))


@pytest.mark.parametrize("victims", [[0], [1], [2], [3], [0, 2], [1, 2, 3]], ids=str)
def test_the_others_go_on(victims: list[int]) -> None:
    """Whoever dies, rank 0 too; two at once; all but one."""
    results = run(lose, victims, workers=4, newcomers=0, may_die=tuple(victims))
    survivors = [rank for rank in range(4) if rank not in victims]
    for rank in survivors:
        views, seconds = results[rank]
        assert views[0] == (0, (0, 1, 2, 3), [])
        assert views[-1][1:] == (tuple(survivors), [])
        assert seconds < 10
        print(rank, views, seconds)
