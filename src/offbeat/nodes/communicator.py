"""Operations between nodes of several workers, such as the sum of a tensor over the nodes.

A *node* is a group of workers, usually on one machine, that acts as one worker towards other nodes.
All workers of a node start the same operation with the same tensor. It has two stages:

1. Across nodes: worker k of each node takes part k of the tensor, and carries out the operation on
   this part with worker k of all other nodes.
2. Inside the node: the workers gather the parts of the result.

So a node sends about as many bytes as a single worker would. All workers of a node receive the same
bits, because each part of the result enters the node through one worker. A broadcast is not divided
into parts: the first workers of the nodes carry it out, and each passes the tensor on in its node.

The second stages run in a background thread, in the order in which the operations were started. A
worker that is busy computing therefore does not delay the second stage on the other workers.

At any moment ``Handle.done`` may return True on one worker of a node and False on another. If a
decision depends on it, the workers of the node must first agree with ``Team.agree``.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.errors import CommunicationError
from offbeat.transport.communicator import Communicator, Wrapper
from offbeat.transport.handle import Completed, Handle
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
from offbeat.transport.stages import Stages

T = TypeVar("T")


class LabelledCommunicator(Wrapper):
    """A communicator that adds a label to the names of its operations in error messages.

    The label, for example "inside the node", tells which group the ranks in a message refer to.
    """

    def __init__(self, inner: Communicator, label: str) -> None:
        super().__init__(inner)
        self._label = label

    @override
    def start(self, operation: Operation[T]) -> Handle[T]:
        return self.inner.start(replace(operation, what=f"{operation.what} ({self._label})"))

    @override
    def twin(self) -> Communicator:
        return LabelledCommunicator(self.inner.twin(), self._label)


class NodeCommunicator(Communicator):
    """Operations between nodes, in which each node counts as one worker.

    ``rank`` is the index of this node from 0, and ``size`` is the number of nodes. All workers of a
    node must start the same operations in the same order, with equal tensors. (``Broadcast`` only
    reads the tensor of the first worker of the source node.) ``Send`` and ``Receive`` raise a
    TypeError.

    Args:
        across: Communicator of this worker and its counterparts in the other nodes.
        inside: Communicator of the workers of this node. Nothing else may use it.
    """

    def __init__(self, across: Communicator, inside: Communicator) -> None:
        self._across, self._inside = across, inside
        self.rank, self.size, self.host = across.rank, across.size, across.host
        self.timeout_seconds = across.timeout_seconds
        self._stages = Stages(across, "stages inside the node")
        self._twins: list[NodeCommunicator] = []
        # Read here, on the main thread: the background thread may have another current GPU.
        self._device = inside.control_device

    @property
    @override
    def control_device(self) -> torch.device:
        return self._across.control_device

    @override
    def start(self, operation: Operation[Any]) -> Handle[Any]:
        match operation:
            case Await():
                return self._across.start(operation)
            case Sum(tensor=tensor) | Maximum(tensor=tensor):
                return self._in_parts(operation, tensor, 1, lambda rows: tensor.copy_(rows[0]))
            case Gather(tensor=tensor):
                return self._in_parts(
                    operation, tensor, 1, lambda rows: [row.clone() for row in rows]
                )
            case Exchange(tensor=tensor):
                return self._in_parts(
                    operation, tensor, self.size, lambda rows: rows.reshape(tensor.shape)
                )
            case Broadcast(tensor=tensor):
                return self._broadcast(operation, tensor)
            case Send(what=what) | Receive(what=what):
                raise TypeError(
                    f"{what}: nodes of several workers cannot send messages to each other; attach "
                    "without node_group"
                )
        raise TypeError(f"nodes do not support the operation {type(operation).__name__}")

    def _in_parts(
        self,
        operation: Sum | Maximum | Gather | Exchange,
        tensor: Tensor,
        rows: int,
        result: Callable[[Tensor], Any],
    ) -> Handle[Any]:
        """Start an operation on parts of the tensor, one part for each worker of the node.

        The tensor is regarded as a matrix with ``rows`` rows: one for each node if the operation is
        an all-to-all, otherwise a single one. A part is a range of columns, padded with zeros so
        that all parts have equal sizes. ``result`` converts the matrix of results into the result
        of the operation.
        """
        workers, width = self._inside.size, tensor.numel() // rows
        share = max(1, -(-width // workers))
        begin = min(width, share * self._inside.rank)
        columns = tensor.view(rows, width)[:, begin : begin + share]
        part = tensor.new_zeros(rows, share)
        part[:, : columns.shape[1]] = columns
        part_operation: Operation[Any] = replace(operation, tensor=part.view(-1))
        first = self._across.start(part_operation)

        def second(received: Tensor | list[Tensor]) -> Any:
            if isinstance(received, list):
                received = torch.stack(received).view(-1)
            gathering = self._inside.gather(self._on_inside_device(received), what=operation.what)
            parts = [part.to(tensor.device).view(-1, share) for part in gathering.wait()]
            joined = torch.stack(parts, dim=1).reshape(-1, workers * share)
            return result(joined[:, :width])

        return self._start_stages(first, second, operation.what, tensor)

    def _broadcast(self, operation: Broadcast, tensor: Tensor) -> Handle[Tensor]:
        """Start a broadcast through the first worker of each node (rare, so not in parts)."""
        first: Handle[Tensor] = Completed(tensor)
        if self._inside.rank == 0:
            first = self._across.start(operation)

        def second(_: Tensor) -> Tensor:
            what = operation.what
            received = self._inside.broadcast(self._on_inside_device(tensor), what=what).wait()
            return tensor if received is tensor else tensor.copy_(received)

        return self._start_stages(first, second, operation.what, tensor)

    def _on_inside_device(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, copied to the GPU if it is on the CPU and the node uses NCCL."""
        moves = self._device.type == "cuda" and not tensor.is_cuda
        return tensor.to(self._device) if moves else tensor

    def _start_stages(
        self, first: Handle[Any], second: Callable[[Any], Any], what: str, tensor: Tensor
    ) -> Handle[Any]:
        """Queue the second stage of an operation whose first stage was started."""
        both = self._stages.start(
            first, lambda received: Completed(second(received)), what=what, like=tensor
        )
        return _Ending(self, both)

    @override
    def twin(self) -> Communicator:
        twin = type(self)(self._across.twin(), self._inside.twin())
        self._twins.append(twin)
        return twin

    @override
    def close(self, *, together: bool = False) -> None:
        self._stop()
        self._across.close(together=together)
        self._inside.close(together=together)

    def _stop(self) -> None:
        """Let the background threads, also of twins, end after the operations in their queues."""
        self._stages.stop()
        for twin in self._twins:
            twin._stop()


class _Ending(Handle[Any]):
    """Handle of an operation with two stages."""

    def __init__(self, communicator: NodeCommunicator, ended: Handle[Any]) -> None:
        self._communicator, self._ended = communicator, ended

    @override
    def done(self) -> bool:
        return self._ended.done()

    @override
    def wait(self) -> Any:
        try:
            return self._ended.wait()
        except CommunicationError:
            # This wakes the workers that wait for this one, inside the node and across nodes.
            self._communicator.close()
            raise
