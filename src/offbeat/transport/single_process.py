"""The communicator of a single process: sums, broadcasts and gathers complete at once."""

from typing import Any, TypeVar

from torch import Tensor
from typing_extensions import override

from offbeat.errors import CommunicationTimeout
from offbeat.transport.communicator import Communicator, Kind
from offbeat.transport.future import Completed, Operation, PromiseWait
from offbeat.transport.host import Promise, ThreadHost
from offbeat.transport.key_value_store import KeyValueStore
from offbeat.transport.torch_backend.torch_store import TorchStore

T = TypeVar("T")


class SingleCommunicator(Communicator):
    """A communicator of one worker, with which a script also runs on a single process.

    Args:
        timeout_seconds: Time limit of waits for other threads of this process.
    """

    def __init__(self, timeout_seconds: float = 300.0) -> None:
        super().__init__(0, 1, timeout_seconds, ThreadHost())

    @override
    def start(
        self, kind: Kind, tensor: Tensor, what: str, peer: int, tag: int, patient: bool
    ) -> Operation[Any]:
        if kind in ("send", "receive"):
            raise ValueError(f"{what}: a single worker has no rank {peer}")
        if kind == "gather":
            return Completed([tensor])
        return Completed(tensor.clone() if kind == "exchange" else tensor)

    @override
    def start_wait(self, promise: Promise[T], what: str, patient: bool) -> Operation[T]:
        limit = self.timeout_seconds

        def check(seconds: float) -> None:
            if seconds > limit and not patient:
                raise CommunicationTimeout(
                    f"{what} was not fulfilled within timeout_seconds={limit:g}"
                )

        return PromiseWait(promise, check)

    @override
    def separate(self) -> None:
        """Do nothing: there are no connections."""

    @override
    def store(self, name: str) -> KeyValueStore:
        return TorchStore() if self.membership is None else self.membership.store(name)

    @override
    def close(self, *, together: bool = False) -> None:
        """Do nothing: there are no connections."""
