"""Which workers are in one node, and the communicators that follow from it."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from offbeat.elastic.connect import open_communicator
from offbeat.errors import AttachError
from offbeat.nodes.communicator import Located, NodeCommunicator
from offbeat.transport.communicator import Communicator, Transport
from offbeat.transport.host import ThreadHost
from offbeat.transport.process_groups import GroupFactory, ranks_text
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Node
from offbeat.transport.torch_distributed import TorchCommunicator

NodeGroup = dist.ProcessGroup | Literal["auto"]


@dataclass(frozen=True, eq=False)
class NodeEnds:
    """One worker's communicators where workers are in nodes.

    Attributes:
        everyone: All workers.
        inside: Those of its node. Errors of an operation say so.
        across: It and its counterparts in the other nodes. Has the ``host`` of ``inside``.
    """

    everyone: Communicator
    inside: Communicator
    across: Communicator


def open_nodes(
    group: dist.ProcessGroup | Transport | None,
    node_group: NodeGroup,
    timeout_seconds: float,
    *,
    sharded: bool = False,
) -> tuple[Communicator, Node | None]:
    """The communicator between the nodes, and this worker's node. A collective of ``group``.

    With one worker in each node that is the workers' own communicator, and None.

    Args:
        group: All workers; None is the default group. A transport of one's own must have
            ``make_nodes(timeout_seconds)``, which gives ``NodeEnds``, as that of the simulator.
        node_group: Those of this worker's node, or "auto": by what torchrun has put into the
            environment, or as the transport has them.
        timeout_seconds: How long one operation may take.
        sharded: See ``Node``.

    Raises:
        AttachError: on all workers, naming one whose node is not like the others.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    transport = world if group is None else group
    if hasattr(transport, "make_communicator"):
        return _open_by(transport, node_group, timeout_seconds)
    everyone = open_communicator(group, timeout_seconds, what="offbeat.attach()")
    try:
        assert group is None or isinstance(group, dist.ProcessGroup)
        own = json.dumps(_own_node(group, node_group)).encode()
        told = everyone.gather_bytes(own, what="comparison of the nodes")
        nodes = layout([json.loads(one) for one in told])
        node = next(members for members in nodes if everyone.rank in members)
        if len(node) == 1:
            return everyone, None
        return _open(group, node_group, nodes, node, everyone, sharded=sharded)
    except BaseException:
        everyone.close()
        raise


def _open_by(
    transport: object, node_group: NodeGroup, timeout_seconds: float
) -> tuple[Communicator, Node | None]:
    """The nodes of a transport that is no process group of torch."""
    make = getattr(transport, "make_nodes", None)
    if make is None:
        raise AttachError(
            "node_group needs a process group of torch.distributed: this transport has no nodes "
            "of several workers (make_nodes)"
        )
    if node_group != "auto":
        raise AttachError(f'node_group must be "auto" with this transport, got {node_group!r}')
    ends: NodeEnds = make(timeout_seconds)
    if ends.inside.size == 1:
        return ends.everyone, None
    return _nested(ends)


def _nested(ends: NodeEnds, *, sharded: bool = False) -> tuple[Communicator, Node]:
    inside = Located(ends.inside, "inside the node")
    between = Located(ends.across, "between nodes")
    if sharded:
        return between, Node(ends.everyone, inside, sharded=True)
    return NodeCommunicator(between, inside.twin()), Node(ends.everyone, inside)


def _open(
    group: dist.ProcessGroup | None,
    node_group: NodeGroup,
    nodes: Sequence[Sequence[int]],
    node: Sequence[int],
    everyone: Communicator,
    *,
    sharded: bool,
) -> tuple[Communicator, Node]:
    place, seconds = node.index(everyone.rank), everyone.timeout_seconds
    host = ThreadHost()  # one for both, for one activity waits for both
    own = GroupFactory.among(group, node) if node_group == "auto" else node_group
    inside = TorchCommunicator(own, timeout_seconds=seconds, host=host)
    try:
        across: SingleCommunicator | TorchCommunicator = SingleCommunicator(seconds)
        across.host = host
        if len(nodes) > 1:
            counterparts = GroupFactory.among(group, [members[place] for members in nodes])
            across = TorchCommunicator(counterparts, timeout_seconds=seconds, host=host)
        try:
            return _nested(NodeEnds(everyone, inside, across), sharded=sharded)
        except BaseException:
            across.close()
            raise
    except BaseException:
        inside.close()
        raise


def node_ranks(
    group: dist.ProcessGroup | Transport | None, node_group: NodeGroup
) -> list[int] | str:
    """The ranks, in the default group, of this worker's node; or why there are none."""
    if not (group is None or isinstance(group, dist.ProcessGroup)) or not dist.is_initialized():
        return "there is no process group"
    own = _own_node(group, node_group)
    if isinstance(own, str):
        return own
    whole = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    return [whole[rank] for rank in own]


def _own_node(group: dist.ProcessGroup | None, node_group: NodeGroup) -> list[int] | str:
    """The ranks, in ``group``, of this worker's node; or why there are none."""
    if node_group == "auto":
        return _from_environment(dist.get_rank(group), dist.get_world_size(group))
    if not isinstance(node_group, dist.ProcessGroup):
        return (
            'node_group must be "auto", or the process group of this worker\'s node, of which it '
            f"is a member; got {node_group!r}"
        )
    whole = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    members = dist.get_process_group_ranks(node_group)
    strange = [rank for rank in members if rank not in whole]
    if strange:
        return f"{ranks_text(strange)} of node_group take no part in the training (group)"
    return [whole.index(rank) for rank in members]


def _from_environment(rank: int, size: int) -> list[int] | str:
    texts = [os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not all(text.isdecimal() for text in texts):
        return (
            'node_group="auto" reads LOCAL_RANK and LOCAL_WORLD_SIZE, which torchrun sets, and '
            f"they are {texts[0]!r} and {texts[1]!r} here: start with torchrun, or give the "
            "process group of each node"
        )
    place, workers = map(int, texts)
    first = rank - place
    if place >= workers or first < 0 or first + workers > size:
        return (
            f'node_group="auto": LOCAL_RANK={place} and LOCAL_WORLD_SIZE={workers} do not fit '
            f"rank {rank} of {size}: give the process group of each node"
        )
    return list(range(first, first + workers))


def layout(told: Sequence[list[int] | str]) -> list[list[int]]:
    """The ranks of each node, nodes by their first rank.

    Args:
        told: By every worker: the ranks of its node, or why it knows none.

    Raises:
        AttachError: they do not fit together, or not all nodes have as many workers.
    """
    nodes: dict[int, list[int]] = {}
    for rank, members in enumerate(told):
        if isinstance(members, str):
            raise AttachError(f"rank {rank}: {members}")
        for other in members:
            if rank not in members or told[other] != members:
                raise AttachError(
                    f"the nodes do not fit together: that of rank {rank} has "
                    f"{ranks_text(members)}, and that of rank {other} has {told[other]}"
                )
        nodes[min(members)] = members
    found = [nodes[first] for first in sorted(nodes)]
    for members in found:
        if len(members) != len(found[0]):
            raise AttachError(
                "all nodes must have as many workers: that of rank "
                f"{found[0][0]} has {len(found[0])}, that of rank {members[0]} has {len(members)}"
            )
    return found
