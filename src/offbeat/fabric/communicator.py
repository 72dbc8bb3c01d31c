"""The seam between strategies and networks: what a strategy may ask of the other workers.

Every operation is started by one call and finished by ``Handle.wait``, so that a strategy may do
other work in between. All workers start the same operations in the same order.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from offbeat.errors import CommunicationTimeout

T = TypeVar("T")
U = TypeVar("U")


class Handle(ABC, Generic[T]):
    """An operation under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether ``wait`` would return at once. Never blocks.

        Of a message (``send``, ``receive``) a backend may know only once it was waited for; gloo
        is one.
        """

    @abstractmethod
    def wait(self) -> T:
        """Block until the operation has ended and return its result.

        Raises:
            CommunicationError: the operation failed; the message names operation, rank, seconds
                waited, the ranks that did not answer, and ``timeout_seconds`` when that ran out.
        """

    def then(self, function: Callable[[T], U]) -> "Handle[U]":
        """The same operation with ``function`` applied to its result, once."""
        return _Then(self, function)


class _Then(Handle[U]):
    def __init__(self, handle: Handle[T], function: Callable[[T], U]) -> None:
        self._handle, self._function = handle, function
        self._result: list[U] = []

    def done(self) -> bool:
        return self._handle.done()

    def wait(self) -> U:
        if not self._result:
            self._result.append(self._function(self._handle.wait()))
        return self._result[0]


class Completed(Handle[T]):
    """An operation that has already ended with ``result``."""

    def __init__(self, result: T) -> None:
        self._result = result

    def done(self) -> bool:
        """Always true."""
        return True

    def wait(self) -> T:
        """The result, at once."""
        return self._result


class Promise(Handle[T]):
    """A handle that another activity of this worker fulfils."""

    def __init__(self, what: str, timeout_seconds: float) -> None:
        self.what, self.timeout_seconds = what, timeout_seconds
        self._fulfilled = threading.Event()
        self._results: list[T] = []

    def fulfil(self, result: T) -> None:
        """Let ``wait`` return ``result``."""
        self._results.append(result)
        self._fulfilled.set()

    def done(self) -> bool:
        """Whether it is fulfilled."""
        return self._fulfilled.is_set()

    def wait(self) -> T:
        """Block until it is fulfilled.

        Raises:
            CommunicationError: it was not within ``timeout_seconds``.
        """
        if not self._fulfilled.wait(self.timeout_seconds):
            raise self.late()
        return self._results[0]

    def late(self) -> Exception:
        """What to raise when the time is over."""
        return CommunicationTimeout(
            f"{self.what} did not come within timeout_seconds={self.timeout_seconds:g}"
        )


class Communicator(ABC):
    """Operations between ``size`` workers, of which this one is ``rank``.

    Tensors are flat, contiguous and alike on all workers. Sums are exact in no particular order,
    but all workers receive bit-identical results.
    """

    rank: int
    size: int
    overlaps_backward: bool = True
    """Whether an operation started during backward proceeds while backward goes on."""
    timeout_seconds: float = 300.0
    """How long one operation may take."""

    def computed(self) -> None:  # noqa: B027 - only virtual time must be told
        """This worker has computed the gradients of a step."""

    def watch(self, totals: Callable[[], object]) -> None:  # noqa: B027 - likewise
        """``totals`` gives, at any time, the totals of the training that uses this communicator."""

    @property
    def control_device(self) -> torch.device:
        """Where the small tensors that carry decisions must live."""
        return torch.device("cpu")

    @abstractmethod
    def now(self) -> float:
        """Seconds on this worker's clock (virtual ones in the simulator)."""

    @abstractmethod
    def sum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """Start replacing ``tensor`` by its sum over the workers; ``what`` names it in errors."""

    @abstractmethod
    def maximum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """Start replacing ``tensor`` by its elementwise maximum over the workers."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str) -> Handle[Tensor]:
        """Start replacing ``tensor`` by that of worker ``source``."""

    @abstractmethod
    def gather(self, tensor: Tensor, *, what: str) -> Handle[list[Tensor]]:
        """Start collecting every worker's ``tensor``, in rank order, on all workers."""

    @abstractmethod
    def send(self, tensor: Tensor, *, destination: int, tag: int = 0, what: str) -> Handle[Tensor]:
        """Start sending ``tensor`` to one worker."""

    @abstractmethod
    def receive(
        self, tensor: Tensor, *, source: int, tag: int = 0, what: str, patient: bool = False
    ) -> Handle[Tensor]:
        """Start filling ``tensor`` with what worker ``source`` sends under the same ``tag``.

        ``patient`` is for servers, which wait for requests: no time-out, but an error as soon as
        the connection is lost.
        """

    @abstractmethod
    def exchange(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """Start an all-to-all: of ``size`` equal chunks of ``tensor``, the k-th goes to worker k.

        The result is a new tensor of the same size, whose k-th chunk comes from worker k.
        """

    @abstractmethod
    def twin(self) -> "Communicator":
        """Another communicator of the same workers, with an order of operations of its own.

        A collective: all workers call it alike.
        """

    @property
    def background(self) -> "Communicator":
        """For activities started by ``spawn``: their waits are not the worker's."""
        return self

    def spawn(self, activity: Callable[[], None], *, what: str) -> None:
        """Run ``activity`` beside the worker, until it returns or the worker ends."""
        threading.Thread(target=activity, name=what, daemon=True).start()

    def close(self) -> None:  # noqa: B027 - only connections must be closed
        """Give up: end this worker's connections and activities. Not a collective.

        Workers that still wait for this one fail at once.
        """

    def explain(self, error: Exception) -> Exception:
        """What to raise for an ``error`` that has ended an activity."""
        return error

    def promise(self, *, what: str) -> Promise[T]:
        """A handle that another activity of this worker fulfils."""
        return Promise(what, self.timeout_seconds)

    def any(self, flag: bool, *, what: str) -> Handle[bool]:
        """Start deciding whether ``flag`` is true on at least one worker."""
        tensor = torch.tensor([float(flag)], device=self.control_device)
        return self.maximum(tensor, what=what).then(lambda result: bool(result.item()))

    def gather_bytes(self, payload: bytes, *, what: str) -> list[bytes]:
        """Every worker's ``payload`` (of any length), in rank order. Blocks."""
        device = self.control_device
        length = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        lengths = [int(n.item()) for n in self.gather(length, what=f"length of {what}").wait()]
        padded = torch.zeros(max([*lengths, 1]), dtype=torch.uint8)
        padded[: len(payload)] = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)[
            : len(payload)
        ]
        received = self.gather(padded.to(device), what=what).wait()
        return [
            bytes(t.cpu().numpy().tobytes()[:n]) for t, n in zip(received, lengths, strict=True)
        ]
