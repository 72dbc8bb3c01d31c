"""After a failure: who is still there."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Literal

import torch

from offbeat.fabric.groups import Group


class Health:
    """A gloo group beside the group that does the work, used only when that has failed.

    Args:
        group: That group.
        seconds: How long the others have to say that they are alive.
    """

    def __init__(self, group: Group, seconds: float) -> None:
        self._seconds = seconds
        self._group: Group | None = group
        self._messages: list[Any] = []  # gloo may lose one that nobody holds

    def close(self) -> None:
        """End it: who asks this worker from now on is told that it is gone."""
        self._group = None
        self._messages.clear()

    def missing(self) -> tuple[list[int], list[int]]:
        """Ranks whose connection is gone, and ranks that do not answer. Takes up to ``seconds``."""
        group = self._group
        others = [] if group is None else [r for r in range(group.size()) if r != group.rank()]
        if not others:
            return [], []
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
