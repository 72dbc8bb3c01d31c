"""Communicators for the planner, in which some simulated workers may represent the others."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.nodes.communicator import NodeCommunicator
from offbeat.plan.cluster import RepresentativeCluster
from offbeat.simulate.cluster import EndSignal
from offbeat.simulate.communicator import SimulatedCommunicator, SimulatedHandle
from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Handle
from offbeat.transport.operation import Broadcast, Exchange, Gather, Maximum, Operation, Sum
from offbeat.transport.placeholder_tensors import blank, blank_list, bytes_of, is_blank
from offbeat.transport.team import Node, Team


class _RepresentativeHandle(SimulatedHandle):
    """Handle whose ``done`` raises DivergedError if workers would get different answers."""

    @override
    def done(self) -> bool:
        cluster = self._communicator.cluster
        if isinstance(cluster, RepresentativeCluster) and isinstance(self._signal, EndSignal):
            cluster.require_agreement(self._signal)
        return super().done()


class RepresentativeCommunicator(SimulatedCommunicator):
    """Communicator of one representative.

    ``size`` counts all workers of this communicator, running or represented; k of them run. The
    results of collectives are:

    * Sum: the sum of the k tensors times ``size``/k. If the model is a placeholder, the values of
      float32 tensors do not matter, and their sum is the first tensor times ``size``.
    * Maximum: the maximum of the k tensors.
    * Broadcast: the tensor of the first representative.
    * Gather: each of the k tensors, ``size``/k times.
    * Exchange: the chunks for this worker, taken from the tensors that a gather would return.

    A gather or exchange of blank tensors, which have a size but no values, returns blank tensors.
    """

    handle_type = _RepresentativeHandle

    @override
    def start(self, operation: Operation[Any]) -> Handle[Any]:
        match operation:
            case Sum(tensor=tensor):
                return self._join("reduce", operation, self._sum, tensor.copy_)
            case Broadcast(tensor=tensor):
                return self._join("broadcast", operation, _first, tensor.copy_)
            case Gather(tensor=tensor) if is_blank(tensor):
                parts = blank_list(tensor, self.size)
                return self._join("gather", operation, _nothing, _nothing, parts)
            case Exchange(tensor=tensor) if is_blank(tensor):
                result = blank(*tensor.shape, dtype=tensor.dtype)
                return self._join("exchange", operation, _nothing, _nothing, result)
        return super().start(operation)

    @override
    def _by_rank(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensors[rank * len(tensors) // self.size] for rank in range(self.size)]

    @override
    def _size_bytes(self, operation: Any) -> float:
        # Between nodes of L workers each worker sends 1/L of a tensor. ``sharing`` is L there.
        return bytes_of(operation.tensor, self.cluster.scale, operation.tail) / self.group.sharing

    def _sum(self, tensors: Sequence[Tensor]) -> Tensor:
        first, count = tensors[0], len(tensors)
        if self.cluster.scale != 1 and first.dtype == torch.float32:
            return first * self.size
        total = torch.stack(list(tensors)).sum(0) if count > 1 else first.clone()
        return total.mul_(self.size / count) if count < self.size else total


def _first(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


def _nothing(_: object) -> None:
    """Do nothing: blank tensors have no values to combine or store."""


class _RepresentativeNodes(NodeCommunicator):
    """Communicator between nodes. Of each node, at most the first worker runs.

    A worker of a real node sends its part of a tensor to the other nodes, and then the node gathers
    the parts of the result. Here the worker that runs passes on the whole tensor, and the
    simulation counts the bytes of one part.
    """

    @override
    def start(self, operation: Operation[Any]) -> Handle[Any]:
        if not isinstance(operation, Sum | Maximum | Gather | Exchange):
            return super().start(operation)
        tensor, what = operation.tensor, operation.what
        part_bytes = bytes_of(tensor, self.host.scale, operation.tail) / self._inside.size
        parts = self.size if isinstance(operation, Gather) else 1

        def gather_inside(received: Any) -> Any:
            self._inside.gather(blank(round(parts * part_bytes)), what=what).wait()
            return received

        return self._start_stages(self._across.start(operation), gather_inside, what, tensor)


def team_of(cluster: RepresentativeCluster, member: int, size: int) -> Team:
    """Return the workers that train together, and their communicators, for one representative.

    With several workers per node, the members of the team are the nodes.

    Args:
        cluster: The simulated cluster.
        member: Global rank of the representative. With nodes, it is the first worker of its node.
        size: Number of all workers, running or represented.
    """
    group = cluster.connections.subgroup(0, tuple(range(size)), 1)
    workers = RepresentativeCommunicator(cluster, member, group)
    per_node = cluster.network.workers_per_node
    if per_node == 1:
        return Team(workers)
    inside = workers.subgroup(range(member, member + per_node))
    across = workers.subgroup(range(0, size, per_node), sharing=per_node)
    node = Node(workers, inside)
    communicator: Communicator = _RepresentativeNodes(across, inside.twin())
    return Team(communicator, node=node)
