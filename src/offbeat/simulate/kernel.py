"""Virtual time: a clock and a heap of events, and nothing of torch or threads.

Events happen in the order of their time; those of the same time in the order in which they were
scheduled (first in, first out), unless the ties are shuffled by a seed.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

_Event = tuple[float, float, int, Callable[[], None], str]
"""Seconds, what breaks ties, a number that no other one has; the action and its label."""


class Kernel:
    """The clock.

    Args:
        shuffle_seed: Shuffle events of the same time by this seed; None keeps them first in, first
            out. A result that depends on it depends on the order of simultaneous events.

    Attributes:
        now: Virtual seconds since the start.
        recent: The last events: time and label.
    """

    def __init__(self, shuffle_seed: int | None = None) -> None:
        self.now = 0.0
        self.recent: deque[tuple[float, str]] = deque(maxlen=20)
        self._heap: list[_Event] = []
        self._number = 0
        self._ties = None if shuffle_seed is None else random.Random(shuffle_seed)

    def at(self, seconds: float, action: Callable[[], None], label: str) -> None:
        """Let ``action`` happen at ``seconds`` (not before ``now``)."""
        assert seconds >= self.now, f"{label} at {seconds} s, but it is {self.now} s already"
        self._number += 1
        tie = 0.0 if self._ties is None else self._ties.random()
        heapq.heappush(self._heap, (seconds, tie, self._number, action, label))

    def step(self) -> bool:
        """Let the next event happen; False if there is none."""
        if not self._heap:
            return False
        self.now, _, _, action, label = heapq.heappop(self._heap)
        self.recent.append((self.now, label))
        action()
        return True


class Signal:
    """Something that happens once, and the callbacks that wait for it.

    Attributes:
        happened: Whether it has.
        failure: Why what was waited for will not come; None: it has come, or may.
        spared: Workers for whom it has come all the same.
    """

    def __init__(self) -> None:
        self.happened = False
        self.failure: Exception | None = None
        self.spared: frozenset[int] = frozenset()
        self._waiting: list[Callable[[], Any]] = []

    def fail(self, failure: Exception, *, spared: frozenset[int] = frozenset()) -> None:
        """It cannot happen any more; nothing, if it has."""
        if not self.happened:
            self.failure, self.spared = failure, spared
            self.fire()

    def fire(self) -> None:
        """It has happened."""
        self.happened = True
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def then(self, callback: Callable[[], Any]) -> None:
        """Call ``callback`` when it happens; at once if it has."""
        if self.happened:
            callback()
        else:
            self._waiting.append(callback)
