"""Connections of a communicator and its twins: opening, loss of peers, the first error, closing."""

import atexit
import functools
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from typing_extensions import override

from offbeat.errors import CommunicationError, CommunicationTimeout
from offbeat.transport.handle import UnexplainedError
from offbeat.transport.host import ThreadHost
from offbeat.transport.torch_backend import process_groups as groups
from offbeat.transport.torch_backend.exit_reasons import ExitReasons
from offbeat.transport.torch_backend.failure_detection import LivenessCheck
from offbeat.transport.torch_backend.process_groups import GroupFactory, OpeningError, ranks_text
from offbeat.transport.torch_backend.receiver_thread import ReceiverThread

_SETTLE_SECONDS = 0.5  # time in which pending operations fail once their connections are closed
_ABANDON_SECONDS = 1.0  # time after which close() abandons a thread that is still in gloo
_EXIT_SECONDS = 5.0  # time for which Python, when it exits, waits for an abandoned thread


class PendingOperation(Protocol):
    """An operation that was started and not yet waited for."""

    def done(self) -> bool:
        """Return True if the backend reports that the operation has ended."""

    def failed(self) -> bool:
        """Return True if the backend reports that the operation has failed."""

    def running(self) -> bool:
        """Return True while a thread of the backend executes the operation."""

    def abandon(self) -> None:
        """Drop the reference to the backend's operation."""


@dataclass
class Channel:
    """The process groups of one communicator.

    ``Connections.close`` sets them to None, because handles would keep them alive.

    Attributes:
        collectives: Group for collectives.
        messages: Gloo group for messages. With gloo it is the group for collectives.
    """

    collectives: Any
    messages: Any


@dataclass(frozen=True)
class Failure:
    """A failed operation.

    Attributes:
        what: Name of the operation.
        seconds: Time from its start to its failure.
        timed_out: True if its time limit ran out.
        reason: First line of the backend's error message.
    """

    what: str
    seconds: float
    timed_out: bool
    reason: str


class Connections:
    """Lifetime of the process groups shared by a communicator and its twins.

    Opens the groups, detects lost peers, turns the first failure into the error that every later
    operation raises, and closes everything once.

    Args:
        factory: Opens the groups. If it can name lost peers, no liveness check is needed.
        backend: Backend of the groups for collectives.
        host: Runs the background threads.
        timeout_seconds: Time limit of one operation.
        liveness_seconds: Time in which a peer must answer the liveness check after a failure.
        closing_seconds: Time for which ``close`` waits for threads.

    Attributes:
        closed: True once ``close`` was called.
        pending: Operations that were started and not yet waited for.
        blocked_threads: Background threads that are blocked in the backend on a receive.
        receiver: Thread that waits for messages on behalf of the main thread.
    """

    def __init__(
        self,
        factory: GroupFactory,
        backend: str,
        host: ThreadHost,
        *,
        timeout_seconds: float,
        liveness_seconds: float,
        closing_seconds: float,
    ) -> None:
        self.rank, self.backend, self.host = factory.rank, backend, host
        self.timeout_seconds = timeout_seconds
        self.closed = False
        self.pending: set[PendingOperation] = set()
        self.blocked_threads: set[threading.Thread] = set()
        self.receiver = ReceiverThread()
        self._closing_seconds = closing_seconds
        self._factory = factory
        self._channels: list[Channel] = []
        # A factory, because one error object would keep alive the tracebacks of all its raisers.
        self._make_error: Callable[[], CommunicationError] | None = None
        self._first_failure: Failure | None = None
        self._closed_at: float | None = None  # when the sockets were closed
        self._failing = threading.Lock()
        self._liveness: LivenessCheck | None = None
        if factory.lost is None:
            self._liveness = LivenessCheck(self._open("gloo"), liveness_seconds)
        self._exit_reasons = ExitReasons(factory.keys(), self.rank)
        close_at_exit(self)

    def _open(self, backend: str) -> groups.Group:
        started = time.perf_counter()
        try:
            return self._factory.open(backend, self.timeout_seconds)
        except RuntimeError as error:
            elapsed = time.perf_counter() - started
            text = f"rank {self.rank}: opening connections failed after {elapsed:.1f} s"
            reason = ""
            if isinstance(error, OpeningError):
                text += f": {error}"
            else:
                reason = _first_line(error)
            timed_out = elapsed >= 0.95 * self.timeout_seconds
            failure = Failure("opening", elapsed, timed_out, reason)
            raise self._error(text, failure)() from None

    def open_channel(self) -> Channel:
        """Open the groups of one communicator. A collective."""
        group = self._open(self.backend)
        # Messages travel between CPUs, because NCCL cannot receive from an unknown sender.
        messages = group if self.backend == "gloo" else self._open("gloo")
        self._channels.append(Channel(group, messages))
        return self._channels[-1]

    # -- failures ---------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Close all sockets if a peer is lost. Called periodically by blocked operations.

        Closing is what wakes the other operations. Two cases need it. An operation may be blocked
        on a healthy but busy peer and would never notice the loss of another one. And gloo stops
        reading from a connection once its next message belongs to a failed operation, so
        operations behind it would block until the time-out.

        Returns:
            True if the sockets were closed more than 0.5 s ago. Gloo sometimes never wakes an
            operation after its connection is closed; the caller then gives up on it.
        """
        failed = any(operation.failed() for operation in list(self.pending))
        if failed or self._exit_reasons.any_published() or self._lost():
            self._close_sockets()
        closed_at = self._closed_at
        return closed_at is not None and time.perf_counter() - closed_at > _SETTLE_SECONDS

    def _close_sockets(self) -> None:
        self._closed_at = self._closed_at or time.perf_counter()
        for channel in list(self._channels):
            for group in {id(g): g for g in (channel.collectives, channel.messages)}.values():
                groups.close_connections(group)

    def error_after_close(self, what: str) -> CommunicationError:
        """Return the error to raise for an operation on closed connections."""
        if self._make_error is not None:
            return self._make_error()
        return CommunicationError(
            f"rank {self.rank}: {what} after this worker has left: attach again"
        )

    def failure(
        self, what: str, started: float, error: RuntimeError, *, patient: bool = False
    ) -> CommunicationError:
        """Return the error to raise for an operation that failed; see ``explain``."""
        error.__traceback__ = None  # it would keep a process group alive
        elapsed = time.perf_counter() - started
        timed_out = not patient and elapsed >= 0.95 * self.timeout_seconds
        return self.explain(Failure(what, elapsed, timed_out, _first_line(error)))

    def explain(self, failure: Failure) -> CommunicationError:
        """Return the error to raise for a failure.

        The first call on the worker's thread closes all sockets and asks which peers are missing.
        All later calls return the same error.
        """
        with self._failing:  # a time-out in gloo makes all other operations fail, too
            first = failure if failure.timed_out else self._first_failure or failure
            self._first_failure = failure = first
        if self.host.in_background and self._make_error is None:
            # The liveness check runs once, on the worker's own thread. That may be much later, or
            # never if the worker is blocked on a peer that in turn is blocked on the lost one.
            # Closing the sockets ends such a deadlock.
            if not self.closed:
                self._close_sockets()
            return _BackgroundError(self, failure)
        with self._failing:
            if self._make_error is None:
                self._make_error = self._describe(failure)
        return self._make_error()

    def _describe(self, failure: Failure) -> Callable[[], CommunicationError]:
        self._close_sockets()
        lost, silent = ([], []) if self.closed else self._missing()
        text = f"rank {self.rank}: {failure.what} failed after {failure.seconds:.1f} s"
        if lost:
            text += f": lost the connection to {self._lost_first(lost)}"
        elif silent:
            text += (
                f": no answer from {ranks_text(silent)}, busy elsewhere or stuck "
                "(one that skips a step under a GradScaler needs attach(..., scaler=scaler))"
            )
            failure = replace(failure, timed_out=True)  # here, or on a peer that then closed
        if not self.closed:
            self._exit_reasons.publish("failed")
        return self._error(text, failure)

    def _lost(self) -> list[int]:
        return [] if self._factory.lost is None else self._factory.lost()

    def _missing(self) -> tuple[list[int], list[int]]:
        """Return lost and silent ranks. The factory names no silent ones: a view change does."""
        return (self._lost(), []) if self._liveness is None else self._liveness.missing()

    def _lost_first(self, lost: list[int]) -> str:
        """Name the ranks that were lost first, with their exit reasons."""
        reasons = self._exit_reasons.read(lost)
        if reasons is None:
            return f"{ranks_text(lost)}, which died or gave up first"
        kinds = {
            "which died or was cut off": [rank for rank in lost if rank not in reasons],
            "which gave up": [rank for rank in lost if reasons.get(rank) == "gave up"],
        }
        texts = [f"{ranks_text(ranks)}, {kind}" for kind, ranks in kinds.items() if ranks]
        return ", and to ".join(texts) or f"{ranks_text(lost)}, which failed before"

    def _error(self, text: str, failure: Failure) -> Callable[[], CommunicationError]:
        """Return a factory of errors: ``text``, the setting to change, the backend's reason."""
        if failure.timed_out:
            text += (
                f". The time-out is timeout_seconds={self.timeout_seconds:g}: raise it in "
                "attach(..., timeout_seconds=...) if a worker may be that much slower"
            )
        kind = CommunicationTimeout if failure.timed_out else CommunicationError
        reason = f". {self.backend} said: {failure.reason}" if failure.reason else ""
        return functools.partial(kind, text + reason)

    # -- closing ----------------------------------------------------------------------------------

    def close(self, *, together: bool = False) -> None:
        """Fail the pending operations, wait for the threads, and release the groups.

        Args:
            together: True if all workers close, so that no exit reason is needed.
        """
        if self.closed:
            return
        self.closed = True
        if self._make_error is None and not together:
            self._exit_reasons.publish("gave up")
        if self.host.active or not all(operation.done() for operation in list(self.pending)):
            with self._failing:
                if self._make_error is None:
                    text = f"rank {self.rank} has given up"
                    self._make_error = functools.partial(CommunicationError, text)
            self._close_sockets()
        self._join_threads()
        stuck = self._is_stuck()
        for operation in list(self.pending):
            operation.abandon()
        self.pending.clear()
        for channel in self._channels:
            groups.close(channel.collectives)
            references = [channel.collectives]
            channel.collectives = channel.messages = None
            groups.release(references, in_background=stuck)
        self._channels.clear()
        self.receiver.close(self._closing_seconds)
        self._exit_reasons.close()
        if self._liveness is not None:
            self._liveness.close()

    def _join_threads(self) -> None:
        current = threading.current_thread()
        deadline = time.perf_counter() + self._closing_seconds
        for thread in self.host.active:
            while thread is not current and thread.is_alive() and time.perf_counter() < deadline:
                thread.join(0.2)
                if thread.is_alive():
                    self._close_sockets()  # the thread may have started an operation meanwhile
                    closed_at = self._closed_at or time.perf_counter()
                    waited = time.perf_counter() - closed_at
                    if thread in self.blocked_threads and waited > _ABANDON_SECONDS:
                        groups.abandon_thread(thread, time.monotonic() + _EXIT_SECONDS)
                        break

    def _is_stuck(self) -> bool:
        """Return True if gloo still runs an operation although all its connections are closed."""
        deadline = time.perf_counter() + _SETTLE_SECONDS
        while any(operation.running() for operation in list(self.pending)):
            if time.perf_counter() > deadline:
                return True
            time.sleep(0.001)
        return False


class _BackgroundError(UnexplainedError):
    def __init__(self, connections: Connections, failure: Failure) -> None:
        super().__init__(f"{failure.what} failed: {failure.reason}")
        self._connections, self._failure = connections, failure

    @override
    def explain(self) -> CommunicationError:
        return self._connections.explain(self._failure)


class Closeable(Protocol):
    """An object with a ``close`` method."""

    def close(self) -> None:
        """Release resources."""


def close_at_exit(resource: Closeable) -> None:
    """Close ``resource`` when Python exits, if it is still alive.

    Otherwise Python would abort with a thread inside gloo, and wait for operations that never end.
    """
    reference = weakref.ref(resource)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(close)
    weakref.finalize(resource, atexit.unregister, close).atexit = False


def _first_line(error: RuntimeError) -> str:
    """Return the backend's message without its source path and its general advice."""
    line = str(error).splitlines()[0]
    return line.rpartition("] ")[2].partition(". This is typically")[0][:200]
