"""Workers in nodes: one communicator out of one inside each node and one across the nodes.

All workers of a node hand over the same tensor. Each of them sends one part of it across, to its
counterparts in the other nodes, and the parts of the result are gathered inside the node. So a
node sends what a single worker would, and all of its workers get the same bits, because each part
of a result has come to one of them alone.

The gathering inside the node runs in the background, in the order in which the operations were
started: the operations across end at different times on the workers of a node, and none of these
may wait for another one that is busy with something else.

Whether an operation is ``done`` therefore differs between the workers of a node, too. A flow that
decides by it agrees inside the node first, with ``Team.agree``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.errors import CommunicationError
from offbeat.transport.communicator import Communicator, Wrapper
from offbeat.transport.handle import Completed, Handle, explained
from offbeat.transport.host import Promise
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

T = TypeVar("T")
_LOOK_SECONDS = 0.0005


class Located(Wrapper):
    """A communicator whose errors say where it is, for its ranks are those of no other one.

    Args:
        inner: It.
        where: As in "inside the node".
    """

    def __init__(self, inner: Communicator, where: str) -> None:
        super().__init__(inner)
        self._where = where

    @override
    def start(self, operation: Operation[T]) -> Handle[T]:
        return self.inner.start(replace(operation, what=f"{operation.what} ({self._where})"))

    @override
    def twin(self) -> Communicator:
        return Located(self.inner.twin(), self._where)


@dataclass(eq=False)
class _Job:
    """An operation of which one stage has been started, and the other follows.

    Attributes:
        first: The stage across the nodes.
        stream: Of the GPU, on which its tensors are used; None: they are the CPU's.
        second: Takes its result through the one inside.
        ended: Gets the result of both, or what failed.
        next: Gets the job after this one; None: there is none any more.
    """

    first: Handle[Any]
    stream: torch.cuda.Stream | None
    second: Callable[[Any], Any]
    ended: Promise[Any]
    next: Promise["_Job | None"]


class NodeCommunicator(Communicator):
    """Operations between nodes, started alike by all workers of each node.

    ``rank`` is the node's, ``size`` is the number of nodes. Of a tensor that differs between the
    workers of a node, parts of all of them are mixed; ``Broadcast`` takes that of the first.

    Args:
        across: This worker and its counterparts in the other nodes.
        inside: The workers of this node. Nobody else uses it.
    """

    def __init__(self, across: Communicator, inside: Communicator) -> None:
        self._across, self._inside = across, inside
        self.rank, self.size, self.host = across.rank, across.size, across.host
        self.timeout_seconds = across.timeout_seconds
        self._next: Promise[_Job | None] = self.host.promise()
        self._works = self._closed = False
        self._twins: list[NodeCommunicator] = []
        self._device = inside.control_device  # asked here, for each thread has a GPU of its own

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
                    f"{what}: there are no messages between nodes of several workers; attach "
                    "without node_group"
                )
        raise TypeError(f"nodes have no {type(operation).__name__}")

    def _in_parts(
        self,
        operation: Sum | Maximum | Gather | Exchange,
        tensor: Tensor,
        rows: int,
        result: Callable[[Tensor], Any],
    ) -> Handle[Any]:
        """Of each of so many equal ``rows`` of ``tensor``, this worker carries one part across.

        Args:
            operation: What to do across.
            tensor: What it is done with.
            rows: 1 unless rows go to different nodes.
            result: Makes the result out of its rows.
        """
        workers, width = self._inside.size, tensor.numel() // rows
        share = max(1, -(-width // workers))
        begin = min(width, share * self._inside.rank)
        mine = tensor.view(rows, width)[:, begin : begin + share]
        part = tensor.new_zeros(rows, share)
        part[:, : mine.shape[1]] = mine
        carried: Operation[Any] = replace(operation, tensor=part.view(-1))
        first = self._across.start(carried)

        def second(received: Tensor | list[Tensor]) -> Any:
            if isinstance(received, list):
                received = torch.stack(received).view(-1)
            gathering = self._inside.gather(self._carried(received), what=operation.what)
            parts = [one.to(tensor.device).view(-1, share) for one in gathering.wait()]
            columns = torch.stack(parts, dim=1)
            return result(columns.reshape(-1, workers * share)[:, :width])

        return self._follow(first, second, operation.what, tensor)

    def _broadcast(self, operation: Broadcast, tensor: Tensor) -> Handle[Tensor]:
        """The first worker of each node carries all of it: it is not for every step."""
        first: Handle[Tensor] = Completed(tensor)
        if self._inside.rank == 0:
            first = self._across.start(operation)

        def second(_: Tensor) -> Tensor:
            what = operation.what
            received = self._inside.broadcast(self._carried(tensor), what=what).wait()
            return tensor if received is tensor else tensor.copy_(received)

        return self._follow(first, second, operation.what, tensor)

    def _carried(self, tensor: Tensor) -> Tensor:
        """What travels inside: NCCL takes no tensor of the CPU, where gloo across may want it."""
        moves = self._device.type == "cuda" and not tensor.is_cuda
        return tensor.to(self._device) if moves else tensor

    def _follow(
        self, first: Handle[Any], second: Callable[[Any], Any], what: str, tensor: Tensor
    ) -> Handle[Any]:
        if self._closed:
            raise CommunicationError(f"{what} after this worker has left: attach again")
        if not self._works:
            self._works = True
            self.host.spawn(partial(_work, self._across, self._next), what="stages inside the node")
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        job = _Job(first, stream, second, self.host.promise(), self.host.promise())
        self._next.fulfil(job)
        self._next = job.next
        # Patient, for both stages have time-outs of their own, whose errors say more.
        ended = self._across.await_promise(job.ended, what=what, patient=True)
        return _Following(self, ended)

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
        """Let the work in the background end once what was started is done."""
        if not self._closed:
            self._closed = True
            self._next.fulfil(None)
        for twin in self._twins:
            twin._stop()


class _Following(Handle[Any]):
    """Both stages of an operation."""

    def __init__(self, of: NodeCommunicator, ended: Handle[Any]) -> None:
        self._of, self._ended = of, ended

    @override
    def done(self) -> bool:
        return self._ended.done()

    @override
    def wait(self) -> Any:
        try:
            result = self._ended.wait()
            if isinstance(result, Exception):
                raise explained(result)
        except CommunicationError:
            # Closing tells the workers that wait for this one, in its node or elsewhere.
            self._of.close()
            raise
        return result


def _work(across: Communicator, coming: Promise[_Job | None]) -> None:
    """Take one job after the other through its second stage, until the communicator is closed."""
    failure: Exception | None = None
    while True:
        try:
            job = across.await_promise(coming, what="work inside the node", patient=True).wait()
        except CommunicationError:
            return
        if job is None:
            return
        outcome: Any = failure
        if failure is None:
            try:
                outcome = _finish(job, across)
            except Exception as error:  # whatever it is, the worker waits to be told
                error.__traceback__ = None  # it would keep what was being sent
                outcome = failure = error
        job.ended.fulfil(outcome)
        coming = job.next
        del job, outcome  # they may be large, and the next one may be long in coming


def _finish(job: _Job, across: Communicator) -> Any:
    """Both stages.

    To wait for NCCL is to let the stream wait, on which the worker computes meanwhile: so that is
    put off until there is nothing to wait for.
    """
    if job.stream is None:
        return job.second(job.first.wait())
    deadline = across.host.now() + across.timeout_seconds
    while not job.first.done() and across.host.now() < deadline:
        across.host.sleep(_LOOK_SECONDS, "looking for what comes from other nodes")
    with torch.cuda.stream(job.stream):
        return job.second(job.first.wait())
