"""After a failure: who is still there."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Literal

import torch

from offbeat.fabric.groups import Group, GroupFactory


class Health:
    """A gloo group beside the group that does the work, used only when that has failed.

    Args:
        groups: Opens it.
        seconds: How long the others have to say that they are alive.
    """

    def __init__(self, groups: GroupFactory, seconds: float) -> None:
        self._seconds = seconds
        self._group: Group | None = groups.open("gloo", seconds)
        self._messages: list[Any] = []  # gloo may lose one that nobody holds

    def close(self) -> None:
        """End it: who asks this worker from now on is told that it is gone."""
        self._group = None
        self._messages.clear()

    def missing(self) -> tuple[list[int], list[int]]:
        """Ranks whose connection is gone, and ranks that do not answer. Takes up to ``seconds``."""
        if self._group is None:
            return [], []
        rank, size = self._group.rank(), self._group.size()
        others = [other for other in range(size) if other != rank]
        with ThreadPoolExecutor(len(others)) as pool:  # a time-out of one must not cost another
            found = dict(zip(others, pool.map(self._ask, others), strict=True))
        return (
            [other for other in others if found[other] == "gone"],
            [other for other in others if found[other] == "silent"],
        )

    def _ask(self, other: int) -> Literal["well", "gone", "silent"]:
        assert self._group is not None
        started = time.perf_counter()
        try:
            self._messages.append(self._group.send([torch.ones(1)], other, 0))
            answer = self._group.recv([torch.zeros(1)], other, 0)
            answer.wait(timedelta(seconds=self._seconds))
        except RuntimeError:
            return "gone" if time.perf_counter() - started < 0.9 * self._seconds else "silent"
        return "well"
