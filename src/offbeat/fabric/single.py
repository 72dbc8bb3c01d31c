"""The communicator of a lone worker: every operation ends at once and changes nothing."""

import time

from torch import Tensor

from offbeat.fabric.communicator import Communicator, Completed, Handle


class SingleCommunicator(Communicator):
    """One worker by itself, so that the same script runs with ``--nproc-per-node 1``."""

    rank = 0
    size = 1

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.perf_counter()

    def sum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """``tensor`` as it is."""
        return Completed(tensor)

    def maximum(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """``tensor`` as it is."""
        return Completed(tensor)

    def broadcast(self, tensor: Tensor, *, source: int = 0, what: str) -> Handle[Tensor]:
        """``tensor`` as it is."""
        return Completed(tensor)

    def gather(self, tensor: Tensor, *, what: str) -> Handle[list[Tensor]]:
        """A list of this worker's ``tensor`` alone."""
        return Completed([tensor])

    def send(self, tensor: Tensor, *, destination: int, tag: int = 0, what: str) -> Handle[Tensor]:
        """Refused: there is nobody else."""
        raise ValueError(f"{what}: a single worker has no rank {destination} to send to")

    def receive(
        self, tensor: Tensor, *, source: int, tag: int = 0, what: str, patient: bool = False
    ) -> Handle[Tensor]:
        """Refused: there is nobody else."""
        raise ValueError(f"{what}: a single worker has no rank {source} to receive from")

    def exchange(self, tensor: Tensor, *, what: str) -> Handle[Tensor]:
        """A copy of ``tensor``."""
        return Completed(tensor.clone())

    def twin(self) -> Communicator:
        """Another lone worker's."""
        return SingleCommunicator()
