"""The process groups of a communicator: opening them, handling the first failure, closing them.

A *duplicate* is a second communicator between the same workers, with separate process groups. A
communicator and its duplicates share one ``Connections`` object, because a lost worker ends all of
them.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from offbeat.errors import CommunicationError, CommunicationTimeout
from offbeat.transport.future import SLICE_SECONDS, Operation, UnexplainedError
from offbeat.transport.host import ThreadHost
from offbeat.transport.torch_backend import process_groups as groups
from offbeat.transport.torch_backend.exit_reasons import ExitReasons
from offbeat.transport.torch_backend.liveness_check import LivenessCheck
from offbeat.transport.torch_backend.process_groups import GroupFactory, OpeningError, ranks_text
from offbeat.transport.torch_backend.store_access import call_within
from offbeat.transport.torch_backend.threads import call_in_thread, close_at_exit

_SETTLE_SECONDS = 0.5  # time in which operations should fail after their sockets were closed
_FOREVER = timedelta(days=365)
_SLICE = timedelta(seconds=SLICE_SECONDS)
_CLOSED = "the connections are closed"


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
    """The process groups of a communicator and its duplicates, from opening to closing.

    After the first failed operation, all later operations raise an equal error. It names the
    workers that are lost or do not answer.

    Args:
        factory: Factory that opens the groups. If ``factory.lost`` is None, a ``LivenessCheck``
            finds lost workers.
        host: Host that runs this worker's background threads.
        timeout_seconds: Time limit of one operation.
        liveness_seconds: Time in which another worker must answer the ``LivenessCheck``.
        closing_seconds: Longest time for which ``close`` waits for the threads of ``host``.

    Attributes:
        closed: True once ``close`` was called.
        pending: Operations that were started and not yet waited for.
    """

    def __init__(
        self,
        factory: GroupFactory,
        host: ThreadHost,
        *,
        timeout_seconds: float,
        liveness_seconds: float,
        closing_seconds: float,
    ) -> None:
        self.rank, self.backend, self.host = factory.rank, factory.backend, host
        self._lost: Callable[[], list[int]] = factory.lost or list
        self.timeout_seconds = timeout_seconds
        self.closed = False
        self.pending: set[TorchOperation] = set()
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
            known = isinstance(error, OpeningError)
            text = f"rank {self.rank}: opening connections failed after {elapsed:.1f} s"
            text += f": {error}" if known else ""
            timed_out = elapsed >= 0.95 * self.timeout_seconds
            failure = Failure("opening", elapsed, timed_out, "" if known else _first_line(error))
            raise self._error(text, failure)() from None

    def open_channel(self) -> Channel:
        """Open the process groups of one communicator. A collective."""
        group = self._open(self.backend)
        # Messages use gloo and tensors on the CPU even if collectives use NCCL.
        messages = group if self.backend == "gloo" else self._open("gloo")
        self._channels.append(Channel(group, messages))
        return self._channels[-1]

    # -- failures ---------------------------------------------------------------------------------

    def poll(self) -> None:
        """Close all sockets if an operation has failed or a worker is lost or has left.

        Waits call this method every 0.1 s. Closing the sockets ends operations that would otherwise
        block until their time limit. Example: this worker waits for worker 1, which waits for the
        lost worker 2.

        Raises:
            RuntimeError: The sockets were closed more than 0.5 s ago. The caller stops waiting,
                because gloo does not always end an operation when its sockets are closed.
        """
        failed = any(operation.failed() for operation in list(self.pending))
        if failed or self._exit_reasons.any_published() or self._lost():
            self._close_sockets()
        closed_at = self._closed_at
        if closed_at is not None and time.perf_counter() - closed_at > _SETTLE_SECONDS:
            raise RuntimeError(_CLOSED)

    def check_wait(self, what: str, patient: bool, seconds: float) -> None:
        """Raise an error if a wait for a thread of this worker must end after ``seconds``."""
        if self.closed:
            raise self.error_after_close(what)
        try:
            if seconds > self.timeout_seconds and not patient:
                raise RuntimeError("no answer")
            self.poll()
        except RuntimeError as error:
            raise self.failure(what, seconds, error, patient=patient) from None

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
        self, what: str, seconds: float, error: RuntimeError, *, patient: bool
    ) -> CommunicationError:
        """Return the error to raise for an operation that failed; see ``explain``.

        Args:
            what: Name of the operation.
            seconds: Time from the start of the operation to its failure.
            error: Error of the backend.
            patient: True if the operation has no time limit.
        """
        error.__traceback__ = None  # it would keep a process group alive
        timed_out = not patient and seconds >= 0.95 * self.timeout_seconds
        return self.explain(Failure(what, seconds, timed_out, _first_line(error)))

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
            text = f"{failure.what} failed: {failure.reason}"
            return UnexplainedError(text, functools.partial(self.explain, failure))
        with self._failing:
            if self._make_error is None:
                self._make_error = self._describe(failure)
        return self._make_error()

    def _describe(self, failure: Failure) -> Callable[[], CommunicationError]:
        self._close_sockets()
        # In elastic training no rank counts as silent: the next generation excludes such workers.
        lost, silent = list[int](), list[int]()
        if self._liveness is not None and not self.closed:
            lost, silent = self._liveness.lost_and_silent()
        elif not self.closed:
            lost = self._lost()
        text = f"rank {self.rank}: {failure.what} failed after {failure.seconds:.1f} s"
        if lost:
            text += f": lost the connection to {self._lost_first(lost)}"
        elif silent:
            text += (
                f": no answer from {ranks_text(silent)}, busy elsewhere or stuck, for example in a "
                "collective of torch.distributed outside of sync.consensus() (use sync.mean(), or "
                "call it inside), in finish() of another synchronizer, in an evaluation, or after "
                "steps that attach(..., scaler=scaler) would count"
            )
            # No worker is lost. So the first failure was a time-out, here or on another worker,
            # which then closed its sockets.
            failure = replace(failure, timed_out=True)
        if not self.closed:
            self._exit_reasons.publish("failed")
        return self._error(text, failure)

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
            "which gave up (an error, detach(), or a script that ended without finish())": [
                rank for rank in lost if reasons.get(rank) == "gave up"
            ],
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
        for operation in list(self.pending):
            operation.abandon()
        self.pending.clear()
        for channel in self._channels:
            groups.destroy_nccl_group(channel.collectives)
            references = [channel.collectives, channel.messages]
            # Otherwise futures that the caller still holds would keep the groups alive.
            channel.collectives = channel.messages = None
            # Gloo frees a group with its last reference. It blocks until the time limit of an
            # operation that still runs.
            with contextlib.suppress(RuntimeError):
                call_within(_SETTLE_SECONDS, references.clear)
        self._channels.clear()
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


class TorchOperation(Operation[Any]):
    """An operation of a process group.

    Args:
        connections: Connections over which it runs.
        what: Name of the operation in errors.
        message: True for a message, False for a collective.
        gloo: True if gloo executes the operation.
        patient: True for a message without a time limit.
    """

    def __init__(
        self, connections: Connections, what: str, *, message: bool, gloo: bool, patient: bool
    ) -> None:
        self._connections, self._what, self._patient = connections, what, patient
        self._message, self._gloo = message, gloo
        self._started = time.perf_counter()
        self._work: dist.Work | None = None
        self._result: Any = None
        self._ended = False

    def begin(self, work: dist.Work, result: Any) -> None:
        """Set the backend's future, and the object to which the backend writes the result."""
        self._work, self._result = work, result
        self._connections.pending.add(self)

    @override
    def done(self) -> bool:
        work = self._work  # another thread may set it to None
        return work is None or work.is_completed()

    def failed(self) -> bool:
        """Return True for a gloo collective that has failed; False for a message and with NCCL."""
        work = self._work
        if self._message or not self._gloo or work is None:
            return False
        try:
            if work.is_completed():
                work.wait()
        except RuntimeError:
            return True
        return False

    @override
    def block(self) -> Any:
        if self._ended:
            return self._result
        if self._work is None:
            raise self._connections.error_after_close(self._what)
        try:
            self._block()
        except RuntimeError as error:
            raise self.failure(error) from None
        self._work, self._ended = None, True
        self._connections.pending.discard(self)
        return self._result

    def failure(self, error: RuntimeError) -> CommunicationError:
        """Return the error to raise for an error of the backend."""
        seconds = time.perf_counter() - self._started
        return self._connections.failure(self._what, seconds, error, patient=self._patient)

    def _block(self) -> None:
        """Block until the operation ends. Over gloo, Ctrl-C acts within 0.1 s."""
        connections = self._connections
        if self._message:
            # Gloo loses a message when a wait for it times out, so this wait has no slices. Without
            # a limit, it would have that of the group.
            seconds = timedelta(seconds=connections.timeout_seconds)
            wait = functools.partial(self._wait, _FOREVER if self._patient else seconds)
            call_in_thread(
                wait, name=self._what, poll=connections.poll, interval_seconds=SLICE_SECONDS
            )
        elif not self._gloo:  # NCCL enforces the time limit itself
            self._wait()
        else:
            while True:
                try:
                    self._wait(_SLICE)
                    return
                except RuntimeError:
                    if self.done():  # it failed, or ended just after this wait
                        self._wait()
                        return
                connections.poll()

    def _wait(self, *limit: timedelta) -> None:
        assert self._work is not None
        # Use no local variable: the traceback of a Ctrl-C would keep it, and so the operation.
        self._work.wait(*limit)

    def abandon(self) -> None:
        """Drop the reference to the backend's operation, which keeps its process group alive."""
        self._work = None


def _first_line(error: RuntimeError) -> str:
    """Return the first line of the backend's message, without the source path and advice."""
    line = str(error).splitlines()[0]
    return line.rpartition("] ")[2].partition(". This is typically")[0][:200]
