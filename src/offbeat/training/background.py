"""Background tasks: components that exchange messages between workers outside the rounds.

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
        """Report that the strategy may block from now on (True), or has returned (False)."""

    def pause(self) -> None:
        """Pause at a barrier: this worker takes no step until every worker has reached it."""

    def resume(self) -> None:
        """Resume after a barrier. Every worker sees the same number of barriers."""

    def finish(self) -> None:
        """End after the final barrier. A collective."""

    def close(self) -> None:
        """Release resources, possibly on this worker alone and after a failure. Never raises."""


class BackgroundTasks:
    """The background tasks of one synchronizer.

    Args:
        team: The synchronizer's team. A task opens connections of its own with ``team.twin``.
        details: The ``Stats.details`` of the synchronizer, to which a task adds its totals.
        step: Function that returns the number of iterations so far.

    Attributes:
        refuse: Reason why no task can be added. Empty: tasks can be added.
        any: True if there is a task. Read several times in each step.
    """

    def __init__(self, team: Team, details: dict[str, Any], step: Callable[[], int]) -> None:
        self.team, self.details, self.step = team, details, step
        self.refuse, self.any = "", False
        self._tasks: list[BackgroundTask] = []
        self._closed = False

    def add(self, task: BackgroundTask) -> None:
        """Add ``task``.

        Raises:
            AttachError: after ``finish`` or ``detach``; or with the message ``refuse``.
        """
        if self.refuse:
            raise AttachError(self.refuse)
        if self._closed:
            raise AttachError("this synchronizer is finished or detached: attach again first")
        self._tasks.append(task)
        self.any = True

    def set_blocking(self, blocking: bool) -> None:
        """Call ``set_blocking`` of all tasks."""
        for task in self._tasks:
            task.set_blocking(blocking)

    def pause(self) -> None:
        """Call ``pause`` of all tasks."""
        for task in self._tasks:
            task.pause()

    def resume(self) -> None:
        """Call ``resume`` of all tasks."""
        for task in self._tasks:
            task.resume()

    def finish(self) -> None:
        """Call ``finish`` of all tasks. No further task can be added."""
        self._closed = True
        for task in self._tasks:
            task.finish()

    def close(self) -> None:
        """Close and remove all tasks. Never raises."""
        self._closed = True
        for task in self._tasks:
            task.close()
        self._tasks.clear()
        self.any = False
        steps = self.step()
        self.step = lambda: steps  # the old function would keep the synchronizer alive
