"""The communicator of a single process: sums, broadcasts and gathers complete at once."""

from typing import Any

from typing_extensions import override

from offbeat.errors import CommunicationTimeout
from offbeat.transport.board import Board, LocalBoard
from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Completed, Handle
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


class SingleCommunicator(Communicator):
    """A communicator of one worker, with which a script also runs on a single process.

    Args:
        timeout_seconds: Time limit of waits for other threads of this process.
    """

    rank = 0
    size = 1

    def __init__(self, timeout_seconds: float = 300.0) -> None:
        self.timeout_seconds = timeout_seconds
        self.host: ThreadHost = ThreadHost()

    @override
    def start(self, operation: Operation[Any]) -> Handle[Any]:
        match operation:
            case Sum(tensor=tensor) | Maximum(tensor=tensor) | Broadcast(tensor=tensor):
                return Completed(tensor)
            case Gather(tensor=tensor):
                return Completed([tensor])
            case Exchange(tensor=tensor):
                return Completed(tensor.clone())
            case Send(what=what, destination=rank):
                raise ValueError(f"{what}: a single worker has no rank {rank} to send to")
            case Receive(what=what, source=rank):
                raise ValueError(f"{what}: a single worker has no rank {rank} to receive from")
            case Await(promise=promise, what=what, patient=patient):
                assert isinstance(promise, ThreadPromise)
                return _PromiseHandle(promise, what, self.timeout_seconds, patient)
        raise TypeError(f"a single worker has no {type(operation).__name__}")

    @override
    def twin(self) -> Communicator:
        twin = SingleCommunicator(self.timeout_seconds)
        twin.host = self.host
        return twin

    @override
    def board(self, name: str) -> Board:
        return LocalBoard()

    @override
    def close(self, *, together: bool = False) -> None:
        """Do nothing: there are no connections."""


class _PromiseHandle(Handle[Any]):
    def __init__(
        self, promise: ThreadPromise[Any], what: str, timeout_seconds: float, patient: bool
    ) -> None:
        self._promise, self._what = promise, what
        self._timeout_seconds, self._patient = timeout_seconds, patient

    @override
    def done(self) -> bool:
        return self._promise.fulfilled

    @override
    def wait(self) -> Any:
        while not self._promise.wait(self._timeout_seconds):
            if self._patient:
                continue
            raise CommunicationTimeout(
                f"{self._what} was not fulfilled within timeout_seconds={self._timeout_seconds:g}"
            )
        return self._promise.result
