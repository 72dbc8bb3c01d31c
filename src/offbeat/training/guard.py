"""Guards around communication: after an interrupted operation no other one may start."""

from types import TracebackType

from offbeat.errors import CommunicationError, OffbeatError
from offbeat.training.background import BackgroundTasks


class Guard:
    """Context around all communication of a synchronizer.

    An exception that leaves the context interrupts an operation half-way, and this worker no longer
    knows which operation the others start next. Entering the context again therefore raises: the
    OffbeatError that left it before, or, after any other exception (such as a Ctrl-C that a
    notebook caught), an OffbeatError that names it.

    In elastic training a CommunicationError is no such failure: all workers begin a new view.

    Attributes:
        failure: The exception that left the context; None if there was none.
        elastic: True if training continues after a CommunicationError.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.elastic = False

    def __enter__(self) -> None:
        failure = self.failure
        if failure is None:
            return
        if isinstance(failure, OffbeatError):
            raise failure
        raise OffbeatError(
            f"a synchronization was interrupted by {type(failure).__name__}, so this worker is out "
            "of step with the others: detach() and attach again, on all workers"
        ) from failure

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not (self.elastic and isinstance(error, CommunicationError)):
            self.failure = error


class StepGuard:
    """The guard around a training step. It also notifies background tasks that it may block."""

    def __init__(self, guard: Guard, tasks: BackgroundTasks) -> None:
        self._guard, self._tasks = guard, tasks

    def __enter__(self) -> None:
        if self._guard.failure is not None:
            self._guard.__enter__()  # raises
        if self._tasks.any:
            self._tasks.set_blocking(True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._guard.__exit__(kind, error, traceback)
        if self._tasks.any:
            self._tasks.set_blocking(False)
