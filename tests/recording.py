"""A communicator that records the operations it starts."""

from dataclasses import dataclass
from typing import TypeVar

from typing_extensions import override

from offbeat.transport.communicator import Communicator, Wrapper
from offbeat.transport.handle import Handle
from offbeat.transport.operation import Operation

T = TypeVar("T")


@dataclass(frozen=True)
class Started:
    """A recorded operation.

    Attributes:
        kind: Name of its class, such as ``Sum``.
        what: Its name in error messages.
        sent_bytes: Payload of this worker in bytes.
        seconds: Time of the start on the host's clock.
    """

    kind: str
    what: str
    sent_bytes: int
    seconds: float


class Recording(Wrapper):
    """Records every operation, including those of its twins, in ``started``."""

    def __init__(self, inner: Communicator, started: list[Started] | None = None) -> None:
        super().__init__(inner)
        self.started: list[Started] = [] if started is None else started

    @override
    def start(self, operation: Operation[T]) -> Handle[T]:
        sent = operation.sent_bytes(self.rank)
        kind, now = type(operation).__name__, self.host.now()
        self.started.append(Started(kind, operation.what, sent, now))
        return self.inner.start(operation)

    @override
    def twin(self) -> Communicator:
        return Recording(self.inner.twin(), self.started)
