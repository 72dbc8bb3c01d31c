"""After a failure: who is still there."""

import queue
import threading
import time
from datetime import timedelta
from typing import Any, Literal

import torch

from offbeat.transport.process_groups import Group, hang_up

_MORE_SECONDS = 0.25  # once one is known to be gone: how long the others have to be so, too
State = Literal["well", "gone", "silent"]


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
        self._asking: list[threading.Thread] = []

    def close(self) -> None:
        """End it: who asks this worker from now on is told that it is gone."""
        group, self._group = self._group, None
        if group is not None and any(thread.is_alive() for thread in self._asking):
            hang_up(group)  # Python would abort with a thread inside gloo
        for thread in self._asking:
            thread.join(self._seconds)
        self._messages.clear()

    def missing(self) -> tuple[list[int], list[int]]:
        """Ranks whose connection is gone, and ranks that do not answer.

        Takes up to ``seconds``, but hardly any time if one is gone: then it does not matter who
        else is silent. The questions to these go on, which is an answer to theirs.
        """
        group = self._group
        others = [] if group is None else [r for r in range(group.size()) if r != group.rank()]
        answers: queue.SimpleQueue[tuple[int, State]] = queue.SimpleQueue()
        for other in others:  # a time-out of one must not cost another
            thread = threading.Thread(
                target=self._ask, args=(group, other, answers), name=f"health of {other}"
            )
            thread.daemon = True
            self._asking.append(thread)
            thread.start()
        found: dict[int, State] = {}
        deadline = time.perf_counter() + self._seconds + 1.0
        while len(found) < len(others):
            try:
                other, state = answers.get(timeout=max(0.0, deadline - time.perf_counter()))
            except queue.Empty:
                break
            found[other] = state
            if state == "gone":
                deadline = min(deadline, time.perf_counter() + _MORE_SECONDS)
        return (
            [other for other in others if found.get(other) == "gone"],
            [other for other in others if found.get(other, "silent") == "silent"],
        )

    def _ask(
        self, group: Group, other: int, answers: "queue.SimpleQueue[tuple[int, State]]"
    ) -> None:
        started = time.perf_counter()
        try:
            self._messages.append(group.send([torch.ones(1)], other, 0))
            answer = group.recv([torch.zeros(1)], other, 0)
            answer.wait(timedelta(seconds=self._seconds))
        except RuntimeError:
            gone = time.perf_counter() - started < 0.9 * self._seconds
            answers.put((other, "gone" if gone else "silent"))
        else:
            answers.put((other, "well"))
