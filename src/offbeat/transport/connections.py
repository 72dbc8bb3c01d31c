"""The life of a communicator and its twins: their connections, the first failure, and the end."""

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
from offbeat.transport import process_groups as groups
from offbeat.transport.exit_reasons import Departures
from offbeat.transport.failure_detection import Health
from offbeat.transport.handle import UnexplainedError
from offbeat.transport.host import ThreadHost
from offbeat.transport.process_groups import GroupFactory, MeetingError, ranks_text
from offbeat.transport.receiver_thread import Waiter

_SETTLE_SECONDS = 0.5  # in which operations fail whose connections have ended
_EXIT_SECONDS = 5.0  # in which Python waits for one that has not, at its end
_HALF_SECONDS = 1.0  # likewise, one that waits for the rest of a message, if gloo lets go of it


class Underway(Protocol):
    """An operation that was started and not waited for."""

    def done(self) -> bool:
        """Whether it has ended, as far as the backend knows."""

    def failed(self) -> bool:
        """Whether it has ended in an error, as far as the backend knows."""

    def running(self) -> bool:
        """Whether a thread of the backend is at it."""

    def abandon(self) -> None:
        """Let go of the backend."""


@dataclass
class Lines:
    """The groups of one communicator. Closing takes them away, or handles would keep them alive."""

    group: Any
    messages: Any


@dataclass(frozen=True)
class Failure:
    """An operation that failed, after how long, and the first line of what the backend said."""

    what: str
    seconds: float
    timed_out: bool
    said: str


class Life:
    """What a communicator and its twins share.

    Args:
        factory: Opens the groups, and may know who is lost; else a group is opened to ask them.
        backend: Of the groups that do the work.
        host: Runs the activities.
        timeout_seconds: How long one operation may take.
        health_seconds: How long the others have, after a failure, to say that they are alive.
        farewell_seconds: How long ``close`` waits for threads to end.

    Attributes:
        closed: Whether this worker has left.
        under_way: Operations that nobody has waited for.
        inside: Threads that wait in the backend for a message.
        waiter: Waits for messages in the place of the main thread.
    """

    def __init__(
        self,
        factory: GroupFactory,
        backend: str,
        host: ThreadHost,
        *,
        timeout_seconds: float,
        health_seconds: float,
        farewell_seconds: float,
    ) -> None:
        self.rank, self.backend, self.host = factory.rank, backend, host
        self.timeout_seconds = timeout_seconds
        self.closed = False
        self.under_way: set[Underway] = set()
        self.inside: set[threading.Thread] = set()
        self.waiter = Waiter()
        self._farewell_seconds = farewell_seconds
        self._factory = factory
        self._lines: list[Lines] = []
        # Makes the first error: one for all would keep alive what all that raise it hold.
        self._failed: Callable[[], CommunicationError] | None = None
        self._first: Failure | None = None  # what it tells of
        self._hung_up: float | None = None  # when
        self._failing = threading.Lock()
        self._health: Health | None = None
        if factory.lost is None:
            self._health = Health(self._open("gloo"), health_seconds)
        self._departures = Departures(factory.keys(), self.rank)
        close_at_exit(self)

    def _open(self, backend: str) -> groups.Group:
        started = time.perf_counter()
        try:
            return self._factory.open(backend, self.timeout_seconds)
        except RuntimeError as error:
            elapsed = time.perf_counter() - started
            text = f"rank {self.rank}: opening connections failed after {elapsed:.1f} s"
            said = ""
            if isinstance(error, MeetingError):
                text += f": {error}"
            else:
                said = _first_line(error)
            timed_out = elapsed >= 0.95 * self.timeout_seconds
            failure = Failure("opening", elapsed, timed_out, said)
            raise self._error(text, failure)() from None

    def open_lines(self) -> Lines:
        """Groups for one communicator. A collective."""
        group = self._open(self.backend)
        # Messages travel between CPUs: NCCL has none from any sender.
        messages = group if self.backend == "gloo" else self._open("gloo")
        self._lines.append(Lines(group, messages))
        return self._lines[-1]

    def look(self) -> bool:
        """Hang up if a worker is lost, though not to what waits here. Called now and then in waits.

        Returns whether the connections ended so long ago that what still waits has missed it, as
        happens in gloo.

        An operation that was started later may wait for one that lives and is busy. Besides, gloo
        reads no more from a connection whose next message is for an operation that has failed by
        another connection: what else waits there would wait for the time-out.
        """
        failed = any(work.failed() for work in list(self.under_way))
        if failed or self._departures.look() or self._lost():
            self._hang_up()
        ended = self._hung_up
        return ended is not None and time.perf_counter() - ended > _SETTLE_SECONDS

    def _hang_up(self) -> None:
        self._hung_up = self._hung_up or time.perf_counter()
        for lines in list(self._lines):
            for group in {id(g): g for g in (lines.group, lines.messages)}.values():
                groups.hang_up(group)

    def why_closed(self, what: str) -> CommunicationError:
        """What to raise for an operation after the end."""
        if self._failed is not None:
            return self._failed()
        return CommunicationError(
            f"rank {self.rank}: {what} after this worker has left: attach again"
        )

    def failure(
        self, what: str, started: float, error: RuntimeError, *, patient: bool = False
    ) -> CommunicationError:
        """The error to raise when an operation failed. Asks once who is still there."""
        error.__traceback__ = None  # it would keep a process group
        elapsed = time.perf_counter() - started
        timed_out = not patient and elapsed >= 0.95 * self.timeout_seconds
        return self.explain(Failure(what, elapsed, timed_out, _first_line(error)))

    def explain(self, failure: Failure) -> CommunicationError:
        """The error to raise for a failure, with who is missing if the worker itself asks."""
        with self._failing:  # a time-out of gloo's makes everything else fail, too
            self._first = failure = failure if failure.timed_out else self._first or failure
        if self.host.in_background and self._failed is None:
            # An activity beside the worker ends; the worker itself asks who is missing, because
            # only its own messages of that kind are answered. That may be later, or never while it
            # waits for somebody else, who in turn may wait for the one that is lost.
            if not self.closed:
                self._hang_up()
            return _BackgroundError(self, failure)
        with self._failing:
            if self._failed is None:
                self._failed = self._describe(failure)
        return self._failed()

    def _describe(self, failure: Failure) -> Callable[[], CommunicationError]:
        self._hang_up()
        gone, silent = ([], []) if self.closed else self._missing()
        text = f"rank {self.rank}: {failure.what} failed after {failure.seconds:.1f} s"
        if gone:
            text += f": lost the connection to {self._first_of(gone)}"
        elif silent:
            text += (
                f": no answer from {ranks_text(silent)}, busy elsewhere or stuck "
                "(one that skips a step under a GradScaler needs attach(..., scaler=scaler))"
            )
            failure = replace(failure, timed_out=True)  # another worker's, perhaps, which hung up
        if not self.closed:
            self._departures.tell("failed")
        return self._error(text, failure)

    def _lost(self) -> list[int]:
        return [] if self._factory.lost is None else self._factory.lost()

    def _missing(self) -> tuple[list[int], list[int]]:
        """Ranks that are gone, and ranks that are silent, whom a view change finds out itself."""
        return (self._lost(), []) if self._health is None else self._health.missing()

    def _first_of(self, gone: list[int]) -> str:
        """Those who did not leave on account of others, and why they left."""
        told = self._departures.told(gone)
        if told is None:
            return f"{ranks_text(gone)}, which died or gave up first"
        ways = {
            "which died or was cut off": [rank for rank in gone if rank not in told],
            "which gave up": [rank for rank in gone if told.get(rank) == "gave up"],
        }
        texts = [f"{ranks_text(ranks)}, {how}" for how, ranks in ways.items() if ranks]
        return ", and to ".join(texts) or f"{ranks_text(gone)}, which failed before"

    def _error(self, text: str, failure: Failure) -> Callable[[], CommunicationError]:
        """What makes the error: ``text``, the knob to turn, and what the backend said."""
        if failure.timed_out:
            text += (
                f". The time-out is timeout_seconds={self.timeout_seconds:g}: raise it in "
                "attach(..., timeout_seconds=...) if a worker may be that much slower"
            )
        kind = CommunicationTimeout if failure.timed_out else CommunicationError
        said = f". {self.backend} said: {failure.said}" if failure.said else ""
        return functools.partial(kind, text + said)

    def close(self, *, together: bool = False) -> None:
        """Fail what is under way, let the threads end, and give the groups back.

        Args:
            together: All workers leave: nobody will ask why.
        """
        if self.closed:
            return
        self.closed = True
        if self._failed is None and not together:
            self._departures.tell("gave up")
        if self.host.active or not all(work.done() for work in list(self.under_way)):
            with self._failing:
                if self._failed is None:
                    text = f"rank {self.rank} has given up"
                    self._failed = functools.partial(CommunicationError, text)
            self._hang_up()
        current = threading.current_thread()
        deadline = time.perf_counter() + self._farewell_seconds
        for thread in self.host.active:
            while thread is not current and thread.is_alive() and time.perf_counter() < deadline:
                thread.join(0.2)
                if thread.is_alive():
                    self._hang_up()  # what it has begun meanwhile was not under way then
                    ended = self._hung_up or time.perf_counter()
                    if thread in self.inside and time.perf_counter() - ended > _HALF_SECONDS:
                        groups.leave(thread, time.monotonic() + _EXIT_SECONDS)
                        break
        lost = self._loses_track()
        for work in list(self.under_way):
            work.abandon()
        self.under_way.clear()
        for lines in self._lines:
            groups.close(lines.group)
            held = [lines.group]
            lines.group = lines.messages = None
            groups.let_go(held, beside=lost)
        self._lines.clear()
        self.waiter.close(self._farewell_seconds)
        self._departures.close()
        if self._health is not None:
            self._health.close()

    def _loses_track(self) -> bool:
        """Whether an operation runs on although all connections have ended, as happens in gloo."""
        deadline = time.perf_counter() + _SETTLE_SECONDS
        while any(work.running() for work in list(self.under_way)):
            if time.perf_counter() > deadline:
                return True
            time.sleep(0.001)
        return False


class _BackgroundError(UnexplainedError):
    def __init__(self, life: Life, failure: Failure) -> None:
        super().__init__(f"{failure.what} failed: {failure.said}")
        self._life, self._failure = life, failure

    @override
    def explain(self) -> CommunicationError:
        return self._life.explain(self._failure)


class Closes(Protocol):
    """Something with an end."""

    def close(self) -> None:
        """End it."""


def close_at_exit(one: Closes) -> None:
    """Python would abort with a thread inside gloo, and wait for operations that cannot end."""
    reference = weakref.ref(one)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(close)
    weakref.finalize(one, atexit.unregister, close).atexit = False


def _first_line(error: RuntimeError) -> str:
    """The backend's message without its source path and its small talk."""
    line = str(error).splitlines()[0]
    return line.rpartition("] ")[2].partition(". This is typically")[0][:200]
