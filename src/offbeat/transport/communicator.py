"""The communicator: the interface through which a worker exchanges tensors with the others.

A method such as ``Communicator.sum`` starts an operation and returns its future. ``Future.wait``
blocks until the operation has ended. In between, the worker can compute. A *collective* is an
operation in which all workers take part. On one communicator all workers start the same collectives
in the same order.
"""

import contextlib
import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, Self, TypeVar, final

import torch
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.transport.accounting import Account
from offbeat.transport.future import Future, Operation
from offbeat.transport.host import Host, Promise
from offbeat.transport.key_value_store import KeyValueStore

T = TypeVar("T")
Kind = Literal["sum", "maximum", "broadcast", "gather", "exchange", "send", "receive"]
"""Kinds of operations: five collectives, and two for messages between two workers."""


_MEETING = 2**15 - 1  # tag of the messages of ``meet``, used for nothing else


def _byte() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


class Communicator(ABC):
    """Starts operations between the workers of one group, and counts their bytes and waits.

    Tensors are one-dimensional and contiguous. In one operation they have the same shape and dtype
    on all workers. The order of additions in a sum is unspecified, but all workers receive
    bit-identical results. The argument ``what`` of a method names the operation in errors.

    A subclass implements ``start``, ``start_wait``, ``separate`` and ``close``.

    Attributes:
        rank: Rank of this worker, from 0 to ``size`` - 1.
        size: Number of workers.
        timeout_seconds: Time limit of an operation, except those started with ``patient=True``.
        host: Clock and background threads of this worker.
        account: Account to which the communicator and its duplicates add.
        membership: The ``Membership`` of the communicator's generation
            (``transport/membership.py``); None if the training is not elastic.
        label: Text after the name of each operation in errors. For example, it tells in which group
            the worker has the rank of the message.
        senders: Number of processes of one machine of which only one sends to other machines
            (≥ 1). Each of them counts 1/``senders`` of the bytes, except those of ``exchange``.
    """

    membership: Any = None  # its type would make the imports circular
    label: str = ""
    senders: int = 1

    def __init__(self, rank: int, size: int, timeout_seconds: float, host: Host) -> None:
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self.host = host
        self.account: Account = Account()

    # -- implemented by subclasses ----------------------------------------------------------------

    @abstractmethod
    def start(
        self, kind: Kind, tensor: Tensor, what: str, peer: int, tag: int, patient: bool
    ) -> Operation[Any]:
        """Start an operation that is not counted. The methods ``sum``, ``gather``, … call this.

        Args:
            kind: Name of the method.
            tensor: Tensor of this worker.
            what: Name of the operation in errors.
            peer: Source of a broadcast or a message, or destination of a message.
            tag: Tag of a message.
            patient: True for a message that has no time limit.
        """

    @abstractmethod
    def start_wait(self, promise: Promise[T], what: str, patient: bool) -> Operation[T]:
        """Return an operation that ends when ``promise`` is fulfilled; see ``await_promise``."""

    @abstractmethod
    def separate(self) -> None:
        """Separate a copy of a communicator from the original; see ``duplicate``. A collective."""

    @abstractmethod
    def close(self, *, together: bool = False) -> None:
        """Release connections, threads and descriptors, including those of all duplicates.

        Operations that have not ended fail, here and on the other workers that take part in them.
        A second call has no effect.

        Args:
            together: True if all workers close and all operations have ended. The call is then a
                collective: the workers wait for each other, so that none sees a broken connection.
        """

    def store(self, name: str) -> KeyValueStore:
        """Open the store ``name``: a key-value store that the workers of this training share.

        Every worker opens the same stores in the same order. In elastic training a store outlives
        the generation, and workers that join later open it, too.

        Raises:
            OffbeatError: This kind of communicator has no store.
        """
        raise OffbeatError(f"a {type(self).__name__} has no store, so workers cannot lease data")

    # -- used by everyone -------------------------------------------------------------------------

    @final
    def duplicate(self) -> Self:
        """Return a second communicator between the same workers. A collective.

        Each communicator has its own order of operations. So two threads of a worker can each use
        one of them.
        """
        duplicate = copy.copy(self)
        duplicate.membership = None  # only the original starts membership changes
        duplicate.separate()
        return duplicate

    @final
    def sum(self, tensor: Tensor, *, what: str) -> Future[Tensor]:
        """Start replacing ``tensor`` by its sum over the workers."""
        return self._begin("sum", tensor, what)

    @final
    def maximum(self, tensor: Tensor, *, what: str) -> Future[Tensor]:
        """Start replacing ``tensor`` by its elementwise maximum over the workers."""
        return self._begin("maximum", tensor, what)

    @final
    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str) -> Future[Tensor]:
        """Start replacing ``tensor`` by the tensor of worker ``source``."""
        return self._begin("broadcast", tensor, what, source)

    @final
    def gather(self, tensor: Tensor, *, what: str) -> Future[list[Tensor]]:
        """Start an all-gather: the result lists every worker's ``tensor`` in rank order."""
        return self._begin("gather", tensor, what)

    @final
    def gather_numbers(self, numbers: Sequence[float], *, what: str) -> Future[list[list[float]]]:
        """Start an all-gather in float64: the result lists every worker's numbers in rank order."""
        own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return self.gather(own, what=what).then(lambda rows: [row.tolist() for row in rows])

    @final
    def exchange(self, tensor: Tensor, *, what: str) -> Future[Tensor]:
        """Start an all-to-all: send chunk k of ``tensor`` to worker k, for N chunks of equal size.

        The result is a new tensor of the chunks received, in rank order. With two workers that hold
        ``[a0, a1]`` and ``[b0, b1]``, worker 0 receives ``[a0, b0]`` and worker 1 ``[a1, b1]``.
        """
        return self._begin("exchange", tensor, what)

    @final
    def send(self, tensor: Tensor, *, destination: int, tag: int = 0, what: str) -> Future[Tensor]:
        """Start sending ``tensor`` to one worker, which must start to receive with this tag."""
        return self._begin("send", tensor, what, destination, tag)

    @final
    def receive(
        self, tensor: Tensor, *, source: int, tag: int = 0, what: str, patient: bool = False
    ) -> Future[Tensor]:
        """Start overwriting ``tensor`` with a message that worker ``source`` sends with this tag.

        With ``patient`` there is no time limit, as for a server that waits for requests. The
        operation then fails only if its connection is lost or closed.
        """
        return self._begin("receive", tensor, what, source, tag, patient)

    @final
    def await_promise(self, promise: Promise[T], *, what: str, patient: bool = False) -> Future[T]:
        """Return a future that waits until another thread of this worker fulfils ``promise``.

        The wait has the time limit and the errors of an operation. With ``patient`` it has no time
        limit, and fails only if the connections of this worker are lost or closed.
        """
        operation = self.start_wait(promise, what + self.label, patient)
        operation.communicator = self
        return operation

    @final
    def gather_bytes(self, payload: bytes, *, what: str) -> list[bytes]:
        """Return every worker's ``payload`` in rank order. Lengths may differ.

        A collective. Blocks.
        """
        length = torch.tensor([len(payload)], dtype=torch.int64, device="cpu")
        lengths = [int(n.item()) for n in self.gather(length, what=what).wait()]
        padded = bytearray(payload.ljust(max(*lengths, 1), b"\0"))
        own = torch.frombuffer(padded, dtype=torch.uint8)
        received = self.gather(own, what=what).wait()
        return [t.numpy().tobytes()[:n] for t, n in zip(received, lengths, strict=True)]

    @final
    def gather_values(self, value: Any, *, what: str) -> list[Any]:
        """Return every worker's ``value``, which JSON can contain, in rank order.

        A collective. Blocks.
        """
        return [*map(json.loads, self.gather_bytes(json.dumps(value).encode(), what=what))]

    @final
    def meet(self, *, what: str) -> None:
        """Wait until all workers have called this, by messages of one byte. Blocks.

        A worker that has started a collective instead does not answer, so that the call fails at
        its time limit. It is safe where that may happen: gloo aborts a process that receives a
        collective of another size than it has started, but never combines it with a message.
        """
        peers = [rank for rank in range(self.size) if rank != self.rank]
        futures = [self.send(_byte(), destination=rank, tag=_MEETING, what=what) for rank in peers]
        futures += [self.receive(_byte(), source=rank, tag=_MEETING, what=what) for rank in peers]
        for future in futures:
            future.wait()

    @final
    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context whose duration counts as waiting time, except in background threads.

        Waits for operations inside it do not count a second time.
        """
        if self.host.in_background:
            yield
            return
        started = self.host.now()
        try:
            with self.account.paused():
                yield
        finally:
            self.account.waited(self.host.now() - started)

    def _begin(
        self,
        kind: Kind,
        tensor: Tensor,
        what: str,
        peer: int = 0,
        tag: int = 0,
        patient: bool = False,
    ) -> Operation[Any]:
        """Start an operation, and count the bytes that this worker sends."""
        operation = self.start(kind, tensor, what + self.label, peer, tag, patient)
        operation.communicator = self
        sends = kind != "receive" and (kind != "broadcast" or peer == self.rank)
        if sends and not self.host.in_background:
            # In a ring over all processes, one process of each machine sends to another machine. In
            # an exchange, every process does.
            self.account.sent(tensor.nbytes // (1 if kind == "exchange" else self.senders))
        return operation


class Transport(Protocol):
    """Factory of communicators. ``attach(group=…)`` accepts it in place of a process group.

    The simulator provides one, and workers that gather at a store use another.
    """

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        """Open a communicator, in which this is the time limit of an operation. A collective."""
