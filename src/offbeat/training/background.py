"""Background tasks: components that exchange messages between workers outside of the strategy.

``DataInjection`` is an example: its workers send each other training samples. The strategy may
block this worker, for example until another worker has taken a step. If that worker waited for
samples of this worker's next step, both would wait forever. Therefore a task is notified when the
strategy may block. During that time it must not make other workers wait for this worker's next
step. See ``data/exchange.py``.
"""

from collections.abc import Callable
from typing import Any, Protocol

from offbeat.errors import AttachError
from offbeat.transport.team import Team


class BackgroundTask(Protocol):
    """A background task. The synchronizer calls its methods on the training thread."""

    def set_blocking(self, blocking: bool) -> None:
        """Handle the start (True) or the end (False) of a call in which the strategy may block."""

    def pause(self) -> None:
        """Handle the start of a barrier. This worker takes no step until the barrier ends."""

    def resume(self) -> None:
        """Handle the end of the barrier. All workers pass the same number of barriers."""

    def finish(self) -> None:
        """End the task at the end of training, after the last barrier. A collective."""

    def close(self) -> None:
        """Release resources. Called after training has ended or failed. Never raises."""


class BackgroundTasks:
    """The background tasks of one synchronizer.

    Attributes:
        team: The workers. ``team.twin()`` opens separate connections between them for a task.
        details: The dictionary ``Stats.details``, to which a task adds its totals.
        step: Function that returns the number of training steps so far.
        add_error: Reason why no task can be added, for the AttachError of ``add``. Usually empty.
        any: True if there is at least one task.
    """

    def __init__(self, team: Team, details: dict[str, Any], step: Callable[[], int]) -> None:
        self.team, self.details, self.step = team, details, step
        self.add_error, self.any = "", False
        self._tasks: list[BackgroundTask] = []
        self._closed = False

    def add(self, task: BackgroundTask) -> None:
        """Add ``task``, or raise AttachError if ``add_error`` is set or training has ended."""
        if self.add_error:
            raise AttachError(self.add_error)
        if self._closed:
            raise AttachError("this synchronizer is finished or detached: attach again first")
        self._tasks.append(task)
        self.any = True

    def set_blocking(self, blocking: bool) -> None:
        """Notify all tasks; see ``BackgroundTask.set_blocking``."""
        for task in self._tasks:
            task.set_blocking(blocking)

    def pause(self) -> None:
        """Notify all tasks; see ``BackgroundTask.pause``."""
        for task in self._tasks:
            task.pause()

    def resume(self) -> None:
        """Notify all tasks; see ``BackgroundTask.resume``."""
        for task in self._tasks:
            task.resume()

    def finish(self) -> None:
        """End all tasks. A collective. No further task can be added."""
        self._closed = True
        for task in self._tasks:
            task.finish()

    def close(self) -> None:
        """Close and remove all tasks. No further task can be added. Never raises."""
        self._closed = True
        for task in self._tasks:
            task.close()
        self._tasks.clear()
        self.any = False
        steps = self.step()
        self.step = lambda: steps  # the old function would keep the synchronizer alive
