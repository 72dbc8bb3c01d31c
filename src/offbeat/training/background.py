"""Background tasks: components that exchange messages between workers outside of the rounds.

``DataInjection`` is one. Such a task must know when its worker may block, because a blocked worker
cannot answer the task's peers (``data/exchange.py`` explains the deadlock that this avoids).
"""

from collections.abc import Callable
from typing import Any, Protocol

from offbeat.errors import AttachError
from offbeat.transport.team import Team


class BackgroundTask(Protocol):
    """Receives notifications from the synchronizer, on the training thread."""

    def set_blocking(self, blocking: bool) -> None:
        """The strategy may block from now on (True), or it has finished (False)."""

    def pause(self) -> None:
        """This worker waits at a barrier and takes no step until every worker has reached it."""

    def resume(self) -> None:
        """The barrier has ended. Every worker sees the same number of barriers."""

    def finish(self) -> None:
        """The final barrier has ended. A collective."""

    def close(self) -> None:
        """Release resources, possibly on this worker alone and after a failure. Never raises."""


class BackgroundTasks:
    """The background tasks of one synchronizer.

    Args:
        team: The synchronizer's team; a task takes a ``twin`` of it.
        details: Totals of ``Stats.details``, to which tasks add their own.
        step: Returns the number of iterations so far.

    Attributes:
        refuse: Reason why no task can be added; empty if one can.
        any: True if there is a task. Read several times in each step.
    """

    def __init__(self, team: Team, details: dict[str, Any], step: Callable[[], int]) -> None:
        self.team, self.details, self.step = team, details, step
        self.refuse, self.any = "", False
        self._tasks: list[BackgroundTask] = []
        self._closed = False

    def add(self, task: BackgroundTask) -> None:
        """Notify ``task`` from now on.

        Raises:
            AttachError: after ``finish`` or ``detach``, or for the reason in ``refuse``.
        """
        if self.refuse:
            raise AttachError(self.refuse)
        if self._closed:
            raise AttachError("this synchronizer is finished or detached: attach again first")
        self._tasks.append(task)
        self.any = True

    def set_blocking(self, blocking: bool) -> None:
        """Notify all tasks; see ``BackgroundTask``."""
        for task in self._tasks:
            task.set_blocking(blocking)

    def pause(self) -> None:
        """Notify all tasks; see ``BackgroundTask``."""
        for task in self._tasks:
            task.pause()

    def resume(self) -> None:
        """Notify all tasks; see ``BackgroundTask``."""
        for task in self._tasks:
            task.resume()

    def finish(self) -> None:
        """Notify all tasks; see ``BackgroundTask``. No further task can be added."""
        self._closed = True
        for task in self._tasks:
            task.finish()

    def close(self) -> None:
        """Close and forget all tasks. Never raises."""
        self._closed = True
        for task in self._tasks:
            task.close()
        self._tasks.clear()
        self.any = False
        taken = self.step()
        self.step = lambda: taken  # the old function may hold the synchronizer
