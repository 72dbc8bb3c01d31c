"""The running workers of a mirror run, and their communicators."""

from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from offbeat.nodes.communicator import NodeCommunicator
from offbeat.plan.communicator import MirrorCommunicator
from offbeat.plan.mirror import MirrorCluster
from offbeat.simulate.kernel import Kernel, Signal
from offbeat.simulate.workers import DeadlockError, SimulatedWorker, Workers
from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Handle
from offbeat.transport.operation import Exchange, Gather, Maximum, Operation, Sum
from offbeat.transport.placeholder_tensors import blank, bytes_of
from offbeat.transport.team import Node, Team


class CalmWorkers(Workers):
    """Simulated workers without random states of their own."""

    @override
    def _load_random(self, worker: SimulatedWorker) -> None:
        self._loaded = worker


class InlineWorkers(CalmWorkers):
    """One simulated worker, which runs on the calling thread."""

    @override
    def run(self, function: Callable[[SimulatedWorker], Any]) -> None:
        self._current = worker = self.all[0]
        try:
            worker.result = function(worker)
        finally:
            self._stop()

    @override
    def wait(self, signal: Signal, what: str) -> None:
        worker = self.current
        if worker.background:  # has a thread
            super().wait(signal, what)
            return
        while not signal.happened:
            if not self.kernel.step():
                raise DeadlockError(f"the only worker that runs waits for ever in {what}")
            self._current = worker
            failed = next((one for one in self._background if one.error), None)
            if failed is not None and failed.error is not None:
                raise failed.error


def workers_for(members: Sequence[int]) -> Workers:
    """Simulated workers for so many running ones."""
    kind = InlineWorkers if len(members) == 1 else CalmWorkers
    return kind(Kernel(), len(members), seed=0)


class _MirrorNodes(NodeCommunicator):
    """Operations between nodes of which one worker runs: the same messages, and whole tensors."""

    @override
    def start(self, operation: Operation[Any]) -> Handle[Any]:
        if not isinstance(operation, Sum | Maximum | Gather | Exchange):
            return super().start(operation)
        tensor, what = operation.tensor, operation.what
        part = bytes_of(tensor, self.host.scale, operation.tail) / self._inside.size
        parts = self.size if isinstance(operation, Gather) else 1

        def second(received: Any) -> Any:
            # Parts of the result are put together, of which each worker has one.
            self._inside.gather(blank(round(parts * part)), what=what).wait()
            return received

        return self._start_stages(self._across.start(operation), second, what, tensor)


def team_of(cluster: MirrorCluster, member: int, size: int) -> Team:
    """The team of one running worker; in nodes of several workers its node is one worker of it."""
    line = cluster.part(0, tuple(range(size)), 1)
    everyone = MirrorCommunicator(cluster, member, line)
    workers = cluster.network.workers_per_node
    if workers == 1:
        return Team(everyone)
    inside = everyone.part(range(member, member + workers))
    across = everyone.part(range(0, size, workers), sharing=workers)
    node = Node(everyone, inside)
    communicator: Communicator = _MirrorNodes(across, inside.twin())
    return Team(communicator, node=node)
