"""The communicator of real workers, on ``torch.distributed`` (gloo or NCCL).

It opens process groups of its own, so that its operations never interleave with the user's: one
for the work, one (gloo) that is used only to find out who is missing after a failure.
"""

import contextlib
import functools
import math
import threading
import time
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import override

from offbeat.errors import AttachError, CommunicationError
from offbeat.transport.communicator import Communicator
from offbeat.transport.connections import Life
from offbeat.transport.handle import Handle
from offbeat.transport.host import ThreadHost, ThreadPromise
from offbeat.transport.operation import (
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
from offbeat.transport.process_groups import GroupFactory
from offbeat.transport.receiver_thread import ENDED, SLICE_SECONDS, needs_waiter

T = TypeVar("T")
_FOREVER = timedelta(days=365)
_SLICE = timedelta(seconds=SLICE_SECONDS)
_HEALTH_SECONDS = 3.0
_FAREWELL_SECONDS = 5.0


class TorchCommunicator(Communicator):
    """Operations over a ``torch.distributed`` process group.

    Args:
        group: The group whose members take part; None is the default group. Or what opens groups
            for them.
        timeout_seconds: How long one operation may take before it fails on every worker.
        health_seconds: How long the others have, after a failure, to say that they are alive.
        farewell_seconds: How long ``close`` waits for threads to end.
        host: Of activities that wait for operations of several communicators; None makes one.

    Raises:
        AttachError: no process group was initialised, or this process is not a member.
        CommunicationError: a worker did not come, or left at once.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | GroupFactory | None,
        *,
        timeout_seconds: float,
        health_seconds: float = _HEALTH_SECONDS,
        farewell_seconds: float = _FAREWELL_SECONDS,
        host: ThreadHost | None = None,
    ) -> None:
        if isinstance(group, GroupFactory):
            factory = group
        else:
            if dist.get_rank(group) < 0:
                raise AttachError("this process is not a member of the group given to attach()")
            factory = GroupFactory.of(group)
        self.backend = factory.backend
        self.rank, self.size = factory.rank, factory.size
        self.timeout_seconds = timeout_seconds
        self.host: ThreadHost = ThreadHost() if host is None else host
        self._life = Life(
            factory,
            self.backend,
            self.host,
            timeout_seconds=timeout_seconds,
            health_seconds=health_seconds,
            farewell_seconds=farewell_seconds,
        )
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
        return _Work(self._life, work, result, operation, started, patient)

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
        try:
            if together and not self._life.closed:
                with contextlib.suppress(CommunicationError):  # training is over, whoever is gone
                    self.sum(torch.zeros(1, device=self.control_device), what="the end").wait()
        finally:  # a Ctrl-C, too, leaves nothing open
            self._life.close(together=together)


class _Work(Handle[Any]):
    def __init__(
        self,
        life: Life,
        work: dist.Work,
        result: Any,
        operation: Operation[Any],
        started: float,
        patient: bool,
    ) -> None:
        self._life, self._result = life, result
        self._work: dist.Work | None = work
        self._what, self._started, self._patient = operation.what, started, patient
        self._collective = operation.collective
        self._ended = False
        life.under_way.add(self)

    @override
    def done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def running(self) -> bool:
        """Whether a thread of the backend is at it. Messages have none."""
        return self._collective and not self.done()

    def failed(self) -> bool:
        """Whether it has ended in an error. Of a message gloo does not know."""
        if not self._collective or self._life.backend != "gloo" or self._work is None:
            return False
        try:
            if self._work.is_completed():
                self._wait()
        except RuntimeError:
            return True
        return False

    @override
    def wait(self) -> Any:
        if self._ended:
            return self._result
        if self._work is None:
            raise self._life.why_closed(self._what)
        try:
            self._block()
        except RuntimeError as error:
            failure = self._life.failure(self._what, self._started, error, patient=self._patient)
            raise failure from None
        self._work, self._ended = None, True
        self._life.under_way.discard(self)
        return self._result

    def _block(self) -> None:
        """Wait so that a Ctrl-C gets through; see ``waiting``."""
        if not self._collective:
            # Named, because gloo ends one at the time-out that its group was opened with.
            limit = timedelta(seconds=self._life.timeout_seconds)
            limit = _FOREVER if self._patient else limit
            if needs_waiter():
                self._life.waiter.wait(functools.partial(self._wait, limit), self._life.look)
            else:
                thread = threading.current_thread()
                self._life.inside.add(thread)
                try:
                    self._wait(limit)
                finally:
                    self._life.inside.discard(thread)
        elif self._life.backend != "gloo":  # NCCL's ends the operation when the time has passed
            self._wait()
        else:
            while True:
                try:
                    self._wait(_SLICE)
                    return
                except RuntimeError:
                    if self.done():
                        self._wait()  # raises why it failed, unless it has ended only now
                        return
                if self._life.look():
                    raise RuntimeError(ENDED)

    def _wait(self, *limit: timedelta) -> None:
        assert self._work is not None
        self._work.wait(*limit)  # held by nobody else: a Ctrl-C's traceback would keep it

    def abandon(self) -> None:
        """Let go of the backend, which would live on with whoever holds this handle."""
        self._work = None


class _Fulfilment(Handle[Any]):
    def __init__(self, life: Life, operation: Await[Any]) -> None:
        assert isinstance(operation.promise, ThreadPromise)
        self._life, self._promise, self._patient = life, operation.promise, operation.patient
        self._what, self._started = operation.what, time.perf_counter()

    @override
    def done(self) -> bool:
        return self._promise.fulfilled

    @override
    def wait(self) -> Any:
        limit = math.inf if self._patient else self._life.timeout_seconds
        deadline = time.perf_counter() + limit
        while not self._promise.fulfilled:
            if self._life.closed:
                raise self._life.why_closed(self._what)
            left = deadline - time.perf_counter()
            if left <= 0:
                raise self._life.failure(self._what, self._started, RuntimeError("no answer"))
            if not self._promise.wait(min(left, SLICE_SECONDS)) and self._life.look():
                raise self._life.failure(self._what, self._started, RuntimeError(ENDED))
        return self._promise.result
