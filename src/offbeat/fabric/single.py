"""The communicator of a lone worker: every operation ends at once and changes nothing."""

from typing import Any

from typing_extensions import override

from offbeat.fabric.communicator import Communicator
from offbeat.fabric.handle import Completed, Handle
from offbeat.fabric.host import ThreadHost
from offbeat.fabric.operation import Await, Exchange, Gather, Operation, Receive, Send


class SingleCommunicator(Communicator):
    """One worker by itself, so that the same script runs with ``--nproc-per-node 1``."""

    rank = 0
    size = 1
    timeout_seconds = 300.0

    def __init__(self) -> None:
        self.host = ThreadHost()

    @override
    def start(self, operation: Operation[Any]) -> Handle[Any]:
        match operation:
            case Gather(tensor=tensor):
                return Completed([tensor])
            case Exchange(tensor=tensor):
                return Completed(tensor.clone())
            case Send(what=what, destination=rank):
                raise ValueError(f"{what}: a single worker has no rank {rank} to send to")
            case Receive(what=what, source=rank):
                raise ValueError(f"{what}: a single worker has no rank {rank} to receive from")
            case Await(promise=promise):
                assert promise.fulfilled, "nobody else is there who could fulfil it later"
                return Completed(promise.result)
        return Completed(operation.tensor)  # type: ignore[attr-defined]

    @override
    def twin(self) -> Communicator:
        return SingleCommunicator()

    @override
    def close(self, *, together: bool = False) -> None:
        """Nothing is held."""
