"""The communicator of real processes, over the process groups of ``torch.distributed``.

It opens separate process groups, so that its operations never mix with those of the user's script.
Workers communicate over gloo, which copies tensors of a GPU through page-locked memory. Only the
processes of a node use NCCL with each other, for collectives on GPU tensors, if the user's group
does. Between workers NCCL would need kernels in the same order on all of them, occupy the GPU while
it waits, and end the process on a failure.
"""

import contextlib
import functools
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from offbeat.errors import AttachError, CommunicationError
from offbeat.transport.communicator import Communicator, Kind
from offbeat.transport.future import Operation, PromiseWait
from offbeat.transport.host import Promise, ThreadHost
from offbeat.transport.key_value_store import KeyValueStore
from offbeat.transport.torch_backend.connections import Connections, TorchOperation
from offbeat.transport.torch_backend.liveness_check import LIVENESS_SECONDS
from offbeat.transport.torch_backend.process_groups import GroupFactory
from offbeat.transport.torch_backend.torch_store import TorchStore

T = TypeVar("T")
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
        liveness_seconds: float = LIVENESS_SECONDS,
        closing_seconds: float = _CLOSING_SECONDS,
        host: ThreadHost | None = None,
    ) -> None:
        if isinstance(group, GroupFactory):
            factory = group
        else:
            if dist.get_rank(group) < 0:
                raise AttachError("this process is not a member of the group given to attach()")
            factory = GroupFactory.among(group)
        host = ThreadHost() if host is None else host
        super().__init__(factory.rank, factory.size, timeout_seconds, host)
        self._new_store = factory.new_store
        self._connections = Connections(
            factory,
            host,
            timeout_seconds=timeout_seconds,
            liveness_seconds=liveness_seconds,
            closing_seconds=closing_seconds,
        )
        self._channel = self._connections.open_channel()

    @override
    def start(
        self, kind: Kind, tensor: Tensor, what: str, peer: int, tag: int, patient: bool
    ) -> Operation[Any]:
        connections, channel = self._connections, self._channel
        if connections.closed:
            raise connections.error_after_close(what)
        message = kind in ("send", "receive")
        gloo = message or tensor.is_cpu or channel.collectives is channel.messages
        operation = TorchOperation(connections, what, message=message, gloo=gloo, patient=patient)
        try:
            operation.begin(*self._launch(kind, tensor, peer, tag, gloo))
        except RuntimeError as error:
            raise operation.failure(error) from None
        return operation

    def _launch(
        self, kind: Kind, tensor: Tensor, peer: int, tag: int, gloo: bool
    ) -> tuple[dist.Work, Any]:
        """Start the operation. Return the backend's future and the object for its result."""
        # The callers have no local variable for the group: errors would keep it alive.
        group = self._channel.messages if gloo else self._channel.collectives
        match kind:
            case "sum":
                return group.allreduce([tensor]), tensor
            case "maximum":
                largest = dist.AllreduceOptions()
                largest.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
                return group.allreduce([tensor], largest), tensor
            case "broadcast":
                root = dist.BroadcastOptions()
                root.rootRank, root.rootTensor = peer, 0
                return group.broadcast([tensor], root), tensor
            case "gather" if gloo:
                # Gloo's all-gather is a ring: N−1 messages in sequence. Its all-to-all sends all
                # messages at the same time, so it takes one latency instead of N−1.
                copies = tensor.expand(self.size, *tensor.shape).contiguous()
                received = torch.empty_like(copies)
                return group.alltoall_base(received, copies, [], []), list(received)
            case "gather":
                parts = [torch.empty_like(tensor) for _ in range(self.size)]
                return group.allgather([parts], [tensor]), parts
            case "exchange":
                result = torch.empty_like(tensor)
                return group.alltoall_base(result, tensor, [], []), result
            case "send":
                return group.send([tensor], peer, tag), tensor
            case "receive":
                return group.recv([tensor], peer, tag), tensor

    @override
    def start_wait(self, promise: Promise[T], what: str, patient: bool) -> Operation[T]:
        return PromiseWait(promise, functools.partial(self._connections.check_wait, what, patient))

    @override
    def separate(self) -> None:
        """Open process groups for this copy. Closing the copy or the original closes both."""
        self._channel = self._connections.open_channel()

    @override
    def store(self, name: str) -> KeyValueStore:
        elastic = self.membership
        return elastic.store(name) if elastic else TorchStore(self._new_store())

    @override
    def close(self, *, together: bool = False) -> None:
        try:
            if together and not self._connections.closed:
                # A lost worker no longer matters.
                with contextlib.suppress(CommunicationError), self.account.paused():
                    one = torch.zeros(1, dtype=torch.float32, device="cpu")
                    self.sum(one, what="the end").wait()
        finally:  # also after a Ctrl-C
            self._connections.close(together=together)
