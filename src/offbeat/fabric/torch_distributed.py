"""The communicator of real workers, on ``torch.distributed`` (gloo or NCCL).

It opens process groups of its own, so that its operations never interleave with the user's: one
for the work, one (gloo) that is used only to find out who is missing after a failure.
"""

import atexit
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import override

from offbeat.errors import AttachError, CommunicationError, CommunicationTimeout
from offbeat.fabric import groups
from offbeat.fabric.communicator import Communicator
from offbeat.fabric.groups import GroupFactory
from offbeat.fabric.handle import Handle, UnexplainedError
from offbeat.fabric.health import Health
from offbeat.fabric.host import ThreadHost, ThreadPromise
from offbeat.fabric.operation import (
    Await,
    Broadcast,
    Exchange,
    Gather,
    Maximum,
    Operation,
    Receive,
    Send,
    Sum,
)

T = TypeVar("T")
_FOREVER = timedelta(days=365)
_HEALTH_SECONDS = 3.0
_FAREWELL_SECONDS = 5.0
_PATIENT_SECONDS = 0.1  # between looks whether this worker has left


class TorchCommunicator(Communicator):
    """Operations over a ``torch.distributed`` process group.

    Args:
        group: The group whose members take part; None is the default group.
        timeout_seconds: How long one operation may take before it fails on every worker.
        health_seconds: How long the others have, after a failure, to say that they are alive.
        farewell_seconds: How long ``close`` waits for threads to end.

    Raises:
        AttachError: no process group was initialised, or this process is not a member.
        CommunicationError: a worker did not come, or left at once.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        timeout_seconds: float,
        health_seconds: float = _HEALTH_SECONDS,
        farewell_seconds: float = _FAREWELL_SECONDS,
    ) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise AttachError("this process is not a member of the group given to attach()")
        self.timeout_seconds = timeout_seconds
        self.backend = str(dist.get_backend(group))
        self.host: ThreadHost = ThreadHost()
        self._life = _Life(self, GroupFactory(group), health_seconds, farewell_seconds)
        self._lines = self._life.open_lines()

    @property
    @override
    def control_device(self) -> torch.device:
        """The current GPU under NCCL, else the CPU."""
        if self.backend == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @override
    def start(self, operation: Operation[Any]) -> Handle[Any]:
        if isinstance(operation, Await):
            return _Fulfilment(self._life, operation)
        if self._life.closed:
            raise self._life.why_closed(operation.what)
        started = time.perf_counter()
        patient = isinstance(operation, Receive) and operation.patient
        try:
            work, result = self._launch(operation)
        except RuntimeError as error:
            raise self._life.failure(operation.what, started, error, patient=patient) from None
        return _Work(self._life, work, result, operation.what, started, patient)

    def _launch(self, operation: Operation[Any]) -> tuple[dist.Work, Any]:
        """Hand the operation to the backend: what it runs as, and where its result will be."""
        group, messages = self._lines.group, self._lines.messages
        match operation:
            case Sum(tensor=tensor):
                return group.allreduce([tensor]), tensor
            case Maximum(tensor=tensor):
                largest = dist.AllreduceOptions()
                largest.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
                return group.allreduce([tensor], largest), tensor
            case Broadcast(tensor=tensor, source=source):
                root = dist.BroadcastOptions()
                root.rootRank, root.rootTensor = source, 0
                return group.broadcast([tensor], root), tensor
            case Gather(tensor=tensor):
                parts = [torch.empty_like(tensor) for _ in range(self.size)]
                return group.allgather([parts], [tensor]), parts
            case Exchange(tensor=tensor):
                result = torch.empty_like(tensor)
                return group.alltoall_base(result, tensor, [], []), result
            case Send(tensor=tensor, destination=destination, tag=tag):
                return messages.send([tensor], destination, tag), tensor
            case Receive(tensor=tensor, source=source, tag=tag):
                return messages.recv([tensor], source, tag), tensor
        raise TypeError(f"{self.backend} has no {type(operation).__name__}")

    @override
    def twin(self) -> Communicator:
        """Other process groups of the same workers, which end with the first communicator's."""
        twin = object.__new__(TorchCommunicator)
        twin.__dict__.update(self.__dict__)
        twin._lines = self._life.open_lines()
        return twin

    @override
    def close(self, *, together: bool = False) -> None:
        if together and not self._life.closed:
            with contextlib.suppress(CommunicationError):  # training is over, whoever is gone
                self.sum(torch.zeros(1, device=self.control_device), what="the end").wait()
        self._life.close()


@dataclass
class _Lines:
    """The groups of one communicator. Closing takes them away, or handles would keep them alive."""

    group: Any
    messages: Any


class _Life:
    """What a communicator and its twins share: their groups, the first failure, and the end."""

    def __init__(
        self,
        fabric: TorchCommunicator,
        factory: GroupFactory,
        health_seconds: float,
        farewell_seconds: float,
    ) -> None:
        self.rank, self.backend, self.host = fabric.rank, fabric.backend, fabric.host
        self.timeout_seconds = fabric.timeout_seconds
        self.closed = False
        self.under_way: set[_Work] = set()  # operations that nobody has waited for
        self._farewell_seconds = farewell_seconds
        self._factory = factory
        self._lines: list[_Lines] = []
        # Makes the first error: one for all would keep alive what all that raise it hold.
        self._failed: Callable[[], CommunicationError] | None = None
        self._failing = threading.Lock()
        self._health = Health(self._open("gloo"), health_seconds)
        _close_at_exit(self)

    def _open(self, backend: str) -> groups.Group:
        started = time.perf_counter()
        try:
            return self._factory.open(backend, self.timeout_seconds)
        except RuntimeError as error:
            elapsed = time.perf_counter() - started
            text = f"rank {self.rank}: opening connections failed after {elapsed:.1f} s"
            absent = self._factory.absent()
            if absent:
                text += f": {_ranks(absent)} did not come"
            timed_out = elapsed >= 0.95 * self.timeout_seconds
            failure = _Failure("opening", elapsed, timed_out, _first_line(error))
            raise self._error(text, failure)() from None

    def open_lines(self) -> _Lines:
        """Groups for one communicator. A collective."""
        group = self._open(self.backend)
        # Messages travel between CPUs: NCCL has none from any sender.
        messages = group if self.backend == "gloo" else self._open("gloo")
        self._lines.append(_Lines(group, messages))
        return self._lines[-1]

    def _hang_up(self) -> None:
        for lines in self._lines:
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
        return self.explain(_Failure(what, elapsed, timed_out, _first_line(error)))

    def explain(self, failure: "_Failure") -> CommunicationError:
        """The error to raise for a failure, with who is missing if the worker itself asks."""
        if self.host.in_background and self._failed is None:
            # An activity beside the worker ends; the worker itself asks who is missing, because
            # only its own messages of that kind are answered.
            return _BackgroundError(self, failure)
        with self._failing:
            if self._failed is None:
                self._failed = self._describe(failure)
        return self._failed()

    def _describe(self, failure: "_Failure") -> Callable[[], CommunicationError]:
        self._hang_up()
        gone, silent = ([], []) if self.closed else self._health.missing()
        text = f"rank {self.rank}: {failure.what} failed after {failure.seconds:.1f} s"
        if gone:
            text += f": lost the connection to {_ranks(gone)}, which died or gave up first"
        elif silent:
            text += (
                f": no answer from {_ranks(silent)}, busy elsewhere or stuck "
                "(one that skips a step under a GradScaler needs attach(..., scaler=scaler))"
            )
        return self._error(text, failure)

    def _error(self, text: str, failure: "_Failure") -> Callable[[], CommunicationError]:
        """What makes the error: ``text``, the knob to turn, and what the backend said."""
        if failure.timed_out:
            text += (
                f". The time-out is timeout_seconds={self.timeout_seconds:g}: raise it in "
                "attach(..., timeout_seconds=...) if a worker may be that much slower"
            )
        kind = CommunicationTimeout if failure.timed_out else CommunicationError
        return functools.partial(kind, f"{text}. {self.backend} said: {failure.said}")

    def close(self) -> None:
        """Fail what is under way, let the threads end, and give the groups back."""
        if self.closed:
            return
        self.closed = True
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
        for work in list(self.under_way):
            work.abandon()
        self.under_way.clear()
        for lines in self._lines:
            groups.close(lines.group)
            lines.group = lines.messages = None
        self._lines.clear()
        self._health.close()


@dataclass(frozen=True)
class _Failure:
    """An operation that failed, after how long, and the first line of what the backend said."""

    what: str
    seconds: float
    timed_out: bool
    said: str


class _BackgroundError(UnexplainedError):
    def __init__(self, life: _Life, failure: _Failure) -> None:
        super().__init__(f"{failure.what} failed: {failure.said}")
        self._life, self._failure = life, failure

    @override
    def explain(self) -> CommunicationError:
        return self._life.explain(self._failure)


class _Work(Handle[Any]):
    def __init__(
        self,
        life: _Life,
        work: dist.Work,
        result: Any,
        what: str,
        started: float,
        patient: bool,
    ) -> None:
        self._life, self._result = life, result
        self._work: dist.Work | None = work
        self._what, self._started, self._patient = what, started, patient
        self._ended = False
        life.under_way.add(self)

    @override
    def done(self) -> bool:
        return self._work is None or self._work.is_completed()

    @override
    def wait(self) -> Any:
        if self._ended:
            return self._result
        if self._work is None:
            raise self._life.why_closed(self._what)
        try:
            self._work.wait(*([_FOREVER] if self._patient else []))
        except RuntimeError as error:
            failure = self._life.failure(self._what, self._started, error, patient=self._patient)
            raise failure from None
        self._work, self._ended = None, True
        self._life.under_way.discard(self)
        return self._result

    def abandon(self) -> None:
        """Let go of the backend, which would live on with whoever holds this handle."""
        self._work = None


class _Fulfilment(Handle[Any]):
    def __init__(self, life: _Life, operation: Await[Any]) -> None:
        assert isinstance(operation.promise, ThreadPromise)
        self._life, self._promise, self._patient = life, operation.promise, operation.patient
        self._what, self._started = operation.what, time.perf_counter()

    @override
    def done(self) -> bool:
        return self._promise.fulfilled

    @override
    def wait(self) -> Any:
        seconds = _PATIENT_SECONDS if self._patient else self._life.timeout_seconds
        while not self._promise.fulfilled:
            if self._life.closed:
                raise self._life.why_closed(self._what)
            if not self._promise.wait(seconds) and not self._patient:
                raise self._life.failure(self._what, self._started, RuntimeError("no answer"))
        return self._promise.result


def _close_at_exit(life: _Life) -> None:
    """Python would abort with a thread inside gloo, and wait for operations that cannot end."""
    reference = weakref.ref(life)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    atexit.register(close)
    weakref.finalize(life, atexit.unregister, close).atexit = False


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _first_line(error: RuntimeError) -> str:
    """The backend's message without its source path and its small talk."""
    line = str(error).splitlines()[0]
    return line.rpartition("] ")[2].partition(". This is typically")[0][:200]
