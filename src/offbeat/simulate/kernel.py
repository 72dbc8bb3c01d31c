"""The kernel of the simulator: a clock, a queue of events, and signals. Independent of torch.

The clock shows *virtual time*, which jumps from one event to the next. Events are executed in the
order of their times. Simultaneous events are executed in the order in which they were scheduled
(first in, first out), or in a random order that depends on a seed.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

_Event = tuple[float, float, int, Callable[[], None], str]
"""Virtual seconds, tie-breaker, unique number, action, label."""


class Kernel:
    """Virtual clock and event queue.

    Args:
        shuffle_seed: Seed of the random order of simultaneous events; None executes them first in,
            first out. If a result changes with the seed, it depends on the order of such events.

    Attributes:
        now: Virtual seconds since the start.
        recent: Times and labels of the last 20 events, for error messages.
    """

    def __init__(self, shuffle_seed: int | None = None) -> None:
        self.now = 0.0
        self.recent: deque[tuple[float, str]] = deque(maxlen=20)
        self._heap: list[_Event] = []
        self._number = 0
        self._ties = None if shuffle_seed is None else random.Random(shuffle_seed)

    def at(self, seconds: float, action: Callable[[], None], label: str) -> None:
        """Schedule ``action`` for the virtual time ``seconds`` (≥ ``now``)."""
        assert seconds >= self.now, f"{label} at {seconds} s, but it is {self.now} s already"
        self._number += 1
        tie = 0.0 if self._ties is None else self._ties.random()
        heapq.heappush(self._heap, (seconds, tie, self._number, action, label))

    def step(self) -> bool:
        """Execute the next event. Return False if there is none."""
        if not self._heap:
            return False
        self.now, _, _, action, label = heapq.heappop(self._heap)
        self.recent.append((self.now, label))
        action()
        return True


class Signal:
    """A signal that fires once, with or without a failure, and then calls the waiting callbacks.

    Attributes:
        happened: True once the signal has fired.
        failure: Error for the workers that wait for the signal; None without a failure.
        spared: Ranks of the workers for which the awaited operation succeeded. They do not get
            ``failure``.
    """

    def __init__(self) -> None:
        self.happened = False
        self.failure: Exception | None = None
        self.spared: frozenset[int] = frozenset()
        self._callbacks: list[Callable[[], Any]] = []

    def fail(self, failure: Exception, *, spared: frozenset[int] = frozenset()) -> None:
        """Fire with a failure. Does nothing if the signal has fired already."""
        if not self.happened:
            self.failure, self.spared = failure, spared
            self.fire()

    def fire(self) -> None:
        """Fire: call the waiting callbacks."""
        self.happened = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def then(self, callback: Callable[[], Any]) -> None:
        """Call ``callback`` when the signal fires, or now if it has fired already."""
        if self.happened:
            callback()
        else:
            self._callbacks.append(callback)
