"""Contexts around communication, which cannot be entered again after a failure."""

from collections.abc import Callable

from offbeat.errors import CommunicationError, OffbeatError


class Guard:
    """Context around the communication of this worker.

    All workers must start the same operations in the same order. After an exception inside the
    context, this worker may have skipped some operations. Its next operation would then be combined
    with a different operation of the other workers. Therefore the context raises if it is entered
    after an exception: the same exception if it was an OffbeatError, otherwise an OffbeatError that
    names it. An example is Ctrl-C in a notebook: the next cell raises.

    In elastic training the context can be entered again after a CommunicationError, because the
    workers then open new connections.

    Attributes:
        failure: The exception after which the context cannot be entered. None if there was none.
        elastic: True if training continues after the loss of a worker.
        on_failure: Called when ``failure`` is set.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.elastic = False
        self.on_failure: Callable[[], object] = lambda: None

    def __enter__(self) -> None:
        failure = self.failure
        if failure is None:
            return
        if isinstance(failure, OffbeatError):
            raise failure
        raise OffbeatError(
            f"a synchronization was interrupted by {type(failure).__name__}, so this worker is out "
            "of step with the others. Call detach() here: the others then raise a "
            "CommunicationError at their next synchronization. After detach() there, too, all can "
            "attach again"
        ) from failure

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and not (self.elastic and isinstance(error, CommunicationError)):
            self.failure = error
            self.on_failure()
