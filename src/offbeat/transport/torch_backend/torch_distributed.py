"""The communicator of real processes, over ``torch.distributed`` with gloo or NCCL.

It opens separate process groups, so that its operations never mix with those of the user's script.
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
from offbeat.transport.board import Board
from offbeat.transport.communicator import Communicator
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
from offbeat.transport.torch_backend.connections import Connections
from offbeat.transport.torch_backend.process_groups import GroupFactory
from offbeat.transport.torch_backend.receiver_thread import (
    CLOSED,
    SLICE_SECONDS,
    needs_receiver_thread,
)
from offbeat.transport.torch_backend.store_board import StoreBoard

T = TypeVar("T")
_FOREVER = timedelta(days=365)
_SLICE = timedelta(seconds=SLICE_SECONDS)
_LIVENESS_SECONDS = 3.0
_CLOSING_SECONDS = 5.0


class TorchCommunicator(Communicator):
    """A communicator over process groups of ``torch.distributed``.

    Args:
        group: Process group whose members take part, or a ``GroupFactory``; None is the default
            group.
        timeout_seconds: Time limit of an operation. A ``patient`` operation has none.
        liveness_seconds: Time in which a worker must answer the check that follows a failure. One
            that does not is reported as missing.
        closing_seconds: Longest time for which ``close`` waits for threads.
        host: Clock and background threads; None creates a new host. All communicators that a
            background thread uses must have the host that started the thread.

    Raises:
        AttachError: This process is not a member of the group.
        CommunicationError: A worker did not open its connections in time, or has left.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | GroupFactory | None,
        *,
        timeout_seconds: float,
        liveness_seconds: float = _LIVENESS_SECONDS,
        closing_seconds: float = _CLOSING_SECONDS,
        host: ThreadHost | None = None,
    ) -> None:
        if isinstance(group, GroupFactory):
            factory = group
        else:
            if dist.get_rank(group) < 0:
                raise AttachError("this process is not a member of the group given to attach()")
            factory = GroupFactory.of(group)
        self._cpu_backend, self._new_store = factory.cpu_backend, factory.new_store
        self.rank, self.size = factory.rank, factory.size
        self.timeout_seconds = timeout_seconds
        self.host: ThreadHost = ThreadHost() if host is None else host
        self._connections = Connections(
            factory,
            factory.backend,
            self.host,
            timeout_seconds=timeout_seconds,
            liveness_seconds=liveness_seconds,
            closing_seconds=closing_seconds,
        )
        self._channel = self._connections.open_channel()

    @property
    @override
    def control_device(self) -> torch.device:
        """The current GPU if only NCCL is available, else the CPU."""
        if self._cpu_backend == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @override
    def start(self, operation: Operation[Any]) -> Handle[Any]:
        if isinstance(operation, Await):
            return _PromiseHandle(self._connections, operation)
        if self._connections.closed:
            raise self._connections.error_after_close(operation.what)
        started = time.perf_counter()
        patient = isinstance(operation, Receive) and operation.patient
        gloo = self._uses_gloo(operation)
        try:
            work, result = self._launch(operation, gloo)
        except RuntimeError as error:
            raise self._connections.failure(
                operation.what, started, error, patient=patient
            ) from None
        return _Work(self._connections, work, result, operation, started, patient, gloo)

    def _uses_gloo(self, operation: Operation[Any]) -> bool:
        """Return True if the gloo group executes the operation."""
        if not operation.collective or self._channel.collectives is self._channel.messages:
            return True
        tensor = getattr(operation, "tensor", None)
        return tensor is not None and tensor.is_cpu and self._cpu_backend == "gloo"

    def _launch(self, operation: Operation[Any], gloo: bool) -> tuple[dist.Work, Any]:
        """Start the operation. Return the backend's handle and the object for its result."""
        # The callers have no local variable for the group: errors would keep it alive.
        group = self._channel.messages if gloo else self._channel.collectives
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
            case Gather(tensor=tensor) if gloo:
                # Gloo's all-gather is a ring: N−1 messages in sequence. Its all-to-all sends all
                # messages at the same time, so it takes one latency instead of N−1.
                copies = tensor.expand(self.size, *tensor.shape).contiguous()
                received = torch.empty_like(copies)
                return group.alltoall_base(received, copies, [], []), list(received)
            case Gather(tensor=tensor):
                parts = [torch.empty_like(tensor) for _ in range(self.size)]
                return group.allgather([parts], [tensor]), parts
            case Exchange(tensor=tensor):
                result = torch.empty_like(tensor)
                return group.alltoall_base(result, tensor, [], []), result
            case Send(tensor=tensor, destination=destination, tag=tag):
                return group.send([tensor], destination, tag), tensor
            case Receive(tensor=tensor, source=source, tag=tag):
                return group.recv([tensor], source, tag), tensor
        raise TypeError(f"torch.distributed has no {type(operation).__name__}")

    @override
    def twin(self) -> Communicator:
        """Return a communicator with separate groups. Closing one of the two closes both."""
        twin = object.__new__(TorchCommunicator)
        twin.__dict__.update(self.__dict__)
        twin._channel = self._connections.open_channel()
        return twin

    @override
    def board(self, name: str) -> Board:
        return StoreBoard(self._new_store())

    @override
    def close(self, *, together: bool = False) -> None:
        try:
            if together and not self._connections.closed:
                with contextlib.suppress(CommunicationError):  # a lost worker no longer matters
                    one = torch.zeros(1, dtype=torch.float32, device=self.control_device)
                    self.sum(one, what="the end").wait()
        finally:  # also after a Ctrl-C
            self._connections.close(together=together)


class _Work(Handle[Any]):
    def __init__(
        self,
        connections: Connections,
        work: dist.Work,
        result: Any,
        operation: Operation[Any],
        started: float,
        patient: bool,
        gloo: bool,
    ) -> None:
        self._connections, self._result = connections, result
        self._work: dist.Work | None = work
        self._what, self._started, self._patient = operation.what, started, patient
        self._collective, self._gloo = operation.collective, gloo
        self._ended = False
        connections.pending.add(self)

    @override
    def done(self) -> bool:
        return self._work is None or self._work.is_completed()

    def running(self) -> bool:
        """Return True for a collective that has not ended; False for a message."""
        return self._collective and not self.done()

    def failed(self) -> bool:
        """Return True for a gloo collective that has failed; False for a message and with NCCL."""
        if not self._collective or not self._gloo or self._work is None:
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
            raise self._connections.error_after_close(self._what)
        try:
            self._block()
        except RuntimeError as error:
            failure = self._connections.failure(
                self._what, self._started, error, patient=self._patient
            )
            raise failure from None
        self._work, self._ended = None, True
        self._connections.pending.discard(self)
        return self._result

    def _block(self) -> None:
        """Block until the operation ends. Over gloo, Ctrl-C acts within 0.1 s."""
        if not self._collective:
            # Without a limit, gloo would use that of the group.
            limit = timedelta(seconds=self._connections.timeout_seconds)
            limit = _FOREVER if self._patient else limit
            if needs_receiver_thread():
                wait = functools.partial(self._wait, limit)
                self._connections.receiver.wait(wait, self._connections.poll)
            else:
                thread = threading.current_thread()
                self._connections.blocked_threads.add(thread)
                try:
                    self._wait(limit)
                finally:
                    self._connections.blocked_threads.discard(thread)
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
                if self._connections.poll():
                    raise RuntimeError(CLOSED)

    def _wait(self, *limit: timedelta) -> None:
        assert self._work is not None
        # Use no local variable: the traceback of a Ctrl-C would keep it, and so the operation.
        self._work.wait(*limit)

    def abandon(self) -> None:
        """Drop the reference to the backend's operation, which keeps its process group alive."""
        self._work = None


class _PromiseHandle(Handle[Any]):
    def __init__(self, connections: Connections, operation: Await[Any]) -> None:
        assert isinstance(operation.promise, ThreadPromise)
        self._connections, self._promise = connections, operation.promise
        self._patient, self._what = operation.patient, operation.what
        self._started = time.perf_counter()

    @override
    def done(self) -> bool:
        return self._promise.fulfilled

    @override
    def wait(self) -> Any:
        limit = math.inf if self._patient else self._connections.timeout_seconds
        deadline = time.perf_counter() + limit
        while not self._promise.fulfilled:
            if self._connections.closed:
                raise self._connections.error_after_close(self._what)
            left = deadline - time.perf_counter()
            if left <= 0:
                raise self._connections.failure(
                    self._what, self._started, RuntimeError("no answer")
                )
            if not self._promise.wait(min(left, SLICE_SECONDS)) and self._connections.poll():
                raise self._connections.failure(
                    self._what, self._started, RuntimeError(CLOSED), patient=self._patient
                )
        return self._promise.result
