"""The process groups of a communicator: opening them, handling the first failure, closing them.

A *twin* is a second communicator between the same workers, with separate process groups. A
communicator and its twins share one ``Connections`` object, because a lost worker ends all of them.
"""

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
from offbeat.transport.torch_backend.abandoned_threads import abandon_thread
from offbeat.transport.torch_backend.exit_reasons import ExitReasons
from offbeat.transport.torch_backend.failure_detection import LivenessCheck
from offbeat.transport.torch_backend.process_groups import GroupFactory, OpeningError, ranks_text
from offbeat.transport.torch_backend.receiver_thread import ReceiverThread

_SETTLE_SECONDS = 0.5  # time in which operations should fail after their sockets were closed
_ABANDON_SECONDS = 1.0  # time after which close() stops waiting for a thread blocked in gloo


class PendingOperation(Protocol):
    """An operation that was started and not yet waited for."""

    def done(self) -> bool:
        """Return True if the operation is known to have ended."""

    def failed(self) -> bool:
        """Return True if the operation is known to have failed."""

    def running(self) -> bool:
        """Return True if a thread of the backend may still execute the operation."""

    def abandon(self) -> None:
        """Drop the reference to the backend's operation."""


@dataclass
class Channel:
    """The process groups of one communicator.

    Attributes:
        collectives: Group for collectives, except on CPU tensors if another backend executes
            those; None after ``Connections.close``.
        messages: Gloo group for messages, the same as ``collectives`` if that uses gloo; None after
            ``Connections.close``.
    """

    collectives: Any
    messages: Any


@dataclass(frozen=True)
class Failure:
    """A failed operation.

    Attributes:
        what: Name of the operation.
        seconds: Time from the start of the operation to its failure.
        timed_out: True if the cause is that an operation exceeded its time limit.
        reason: First line of the backend's error message, or "".
    """

    what: str
    seconds: float
    timed_out: bool
    reason: str


class Connections:
    """The process groups of a communicator and its twins, from opening to closing.

    After the first failed operation, all later operations raise an equal error. It names the
    workers that are lost or do not answer.

    Args:
        factory: Factory that opens the groups. If ``factory.lost`` is None, a ``LivenessCheck``
            finds lost workers.
        backend: Backend of the groups for collectives on tensors that are not on the CPU.
        host: Host that runs this worker's background threads.
        timeout_seconds: Time limit of one operation.
        liveness_seconds: Time in which another worker must answer the ``LivenessCheck``.
        closing_seconds: Longest time for which ``close`` waits for the threads of ``host``, and
            again for ``receiver``.

    Attributes:
        closed: True once ``close`` was called.
        pending: Operations that were started and not yet waited for.
        receiver: Thread that waits for messages on behalf of the main thread.
        blocked_threads: Other threads that wait in the backend for a message.
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
        # A factory of errors. An error object would keep the tracebacks of all its raisers alive.
        self._make_error: Callable[[], CommunicationError] | None = None
        self._first_failure: Failure | None = None
        self._closed_at: float | None = None  # when the sockets were closed
        self._failing = threading.Lock()
        self._liveness: LivenessCheck | None = None
        if factory.lost is None:
            self._liveness = LivenessCheck(self._open("gloo"), liveness_seconds)
        self._exit_reasons = ExitReasons(factory.new_store(), self.rank)
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
        """Open the process groups of one communicator. A collective."""
        group = self._open(self.backend)
        # Messages use gloo and tensors on the CPU even if collectives use NCCL.
        messages = group if self.backend == "gloo" else self._open("gloo")
        self._channels.append(Channel(group, messages))
        return self._channels[-1]

    # -- failures ---------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Close all sockets if an operation has failed or a worker is lost or has left.

        Most waits call this method every 0.1 s. Closing the sockets ends operations that would
        otherwise block until their time limit. Example: this worker waits for worker 1, which waits
        for the lost worker 2.

        Returns:
            True if the sockets were closed more than 0.5 s ago. The caller then stops waiting,
            because gloo does not always end an operation when its sockets are closed.
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
        """Return the error to raise if an operation is started or waited for after ``close``."""
        if self._make_error is not None:
            return self._make_error()
        return CommunicationError(
            f"rank {self.rank}: {what} after this worker has left: attach again"
        )

    def failure(
        self, what: str, started: float, error: RuntimeError, *, patient: bool = False
    ) -> CommunicationError:
        """Return the error to raise for a failed operation; see ``explain``.

        Args:
            what: Name of the operation.
            started: Start of the operation, by ``time.perf_counter``.
            error: Error of the backend.
            patient: True if the operation has no time limit.
        """
        error.__traceback__ = None  # it would keep a process group alive
        elapsed = time.perf_counter() - started
        timed_out = not patient and elapsed >= 0.95 * self.timeout_seconds
        return self.explain(Failure(what, elapsed, timed_out, _first_line(error)))

    def explain(self, failure: Failure) -> CommunicationError:
        """Close all sockets, and return the error to raise for a failure.

        The first call on the training thread runs the liveness check, which may block for about
        ``liveness_seconds``. All later calls return an equal error. A call on a background thread
        before that returns an ``UnexplainedError``.
        """
        with self._failing:  # a time-out is reported rather than the failures that it causes
            first = failure if failure.timed_out else self._first_failure or failure
            self._first_failure = failure = first
        if self.host.in_background and self._make_error is None:
            # Only the training thread runs the liveness check. It may be blocked, for example on a
            # worker that waits for the lost worker. Closing the sockets unblocks it.
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
                f": no answer from {ranks_text(silent)}, busy elsewhere or stuck, for example in "
                "another collective, in finish() of another synchronizer, in an evaluation, or "
                "after steps that attach(..., scaler=scaler) would count"
            )
            # No worker is lost. So the first failure was a time-out, here or on another worker,
            # which then closed its sockets.
            failure = replace(failure, timed_out=True)
        if not self.closed:
            self._exit_reasons.publish("failed")
        return self._error(text, failure)

    def _lost(self) -> list[int]:
        return [] if self._factory.lost is None else self._factory.lost()

    def _missing(self) -> tuple[list[int], list[int]]:
        """Return the lost ranks and the silent ranks (those that do not answer).

        In elastic training no rank counts as silent: the next view excludes such workers.
        """
        return (self._lost(), []) if self._liveness is None else self._liveness.missing()

    def _lost_first(self, lost: list[int]) -> str:
        """Return a text that names the ranks that were lost first, with their exit reasons.

        A worker with the exit reason "failed" was not the first: its operation failed because of
        another worker.
        """
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
        """Return a factory of errors with this text, a remedy and the backend's message."""
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
        """Let pending operations fail, wait for the threads, and release the groups.

        Args:
            together: True if all workers close. Then no exit reason is published.
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
            groups.destroy_nccl_group(channel.collectives)
            references = [channel.collectives]
            # Otherwise handles that the caller still holds would keep the groups alive.
            channel.collectives = channel.messages = None
            groups.drop_references(references, in_background=stuck)
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
                    self._close_sockets()  # the thread may have started another operation
                    closed_at = self._closed_at or time.perf_counter()
                    waited = time.perf_counter() - closed_at
                    if thread in self.blocked_threads and waited > _ABANDON_SECONDS:
                        abandon_thread(thread)
                        break

    def _is_stuck(self) -> bool:
        """Wait at most 0.5 s until no operation runs. Return True if one still runs."""
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
    """Call ``resource.close()`` when Python exits, unless ``resource`` was garbage-collected.

    At exit, Python would abort if a thread were still inside gloo or the store.
    """
    reference = weakref.ref(resource)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(close)
    weakref.finalize(resource, atexit.unregister, close).atexit = False


def _first_line(error: RuntimeError) -> str:
    """Return the first line of the backend's message, without the source path and advice."""
    line = str(error).splitlines()[0]
    return line.rpartition("] ")[2].partition(". This is typically")[0][:200]
