"""Finds out which workers form a node, and opens communicators inside and across nodes.

A *node* is a group of workers, usually on one machine, that acts as one worker towards other nodes.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch.distributed as dist

from offbeat.errors import AttachError
from offbeat.transport.communicator import Communicator, Transport
from offbeat.transport.connect import open_communicator
from offbeat.transport.host import ThreadHost
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Node, Team
from offbeat.transport.torch_backend.process_groups import GroupFactory, ranks_text
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator

NodeGroup = dist.ProcessGroup | Literal["auto"]


def open_nodes(
    group: dist.ProcessGroup | Transport | None,
    node_group: NodeGroup,
    timeout_seconds: float,
    *,
    sharded: bool = False,
    needed: bool = True,
) -> Team:
    """Detect the nodes and open their communicators. A collective of ``group``.

    ``group`` and ``node_group`` are those of ``attach``. With "auto" the environment variables of
    torchrun determine the nodes. If not ``needed``, the nodes are checked and not used.

    A custom transport must have ``make_nodes(timeout_seconds)``, and requires "auto". That method
    returns a communicator across nodes, and the ``Node`` of this process. The communicator connects
    the workers that have the same position in their nodes, one of each node. It has the same
    ``host`` object as ``Node.inside``.

    Returns:
        A team with one member for each node. If each node has one worker, or nodes are not
        ``needed``: a team of all workers.

    Raises:
        AttachError: the nodes are invalid (raised on all workers), or the custom transport does not
            support the arguments.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    transport = world if group is None else group
    if hasattr(transport, "make_communicator"):
        across, node = _open_by_transport(transport, node_group, timeout_seconds)
        if node.inside.size == 1 or not needed:
            return Team(node.everyone)
        node = replace(node, sharded=sharded)
    else:
        everyone = open_communicator(group, timeout_seconds, what="offbeat.attach()")
        if transport is None:  # a single process
            return Team(everyone)
        assert group is None or isinstance(group, dist.ProcessGroup)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(everyone.close)
            reported = _reported_node(group, node_group)
            what = "comparison of the nodes"
            nodes = group_into_nodes(everyone.gather_values(reported, what=what))
            members = next(members for members in nodes if everyone.rank in members)
            used = len(members) > 1 and needed
            if used:
                opened = _open_groups(group, node_group, nodes, members, everyone, on_failure)
            on_failure.pop_all()
        if not used:
            return Team(everyone)
        across, inside = opened
        node = Node(everyone, inside, sharded)
    # Errors then say which group the ranks refer to.
    across.label, node.inside.label = " (between nodes)", " (inside the node)"
    return Team(across, node=node)


def _open_by_transport(
    transport: object, node_group: NodeGroup, timeout_seconds: float
) -> tuple[Communicator, Node]:
    make = getattr(transport, "make_nodes", None)
    if make is None:
        raise AttachError(
            "node_group needs a process group of torch.distributed: this transport has no nodes "
            "of several workers (make_nodes)"
        )
    if node_group != "auto":
        raise AttachError(f'node_group must be "auto" with this transport, got {node_group!r}')
    opened: tuple[Communicator, Node] = make(timeout_seconds)
    return opened


def _open_groups(
    group: dist.ProcessGroup | None,
    node_group: NodeGroup,
    nodes: Sequence[Sequence[int]],
    node: Sequence[int],
    everyone: Communicator,
    on_failure: contextlib.ExitStack,
) -> tuple[Communicator, Communicator]:
    """Return the communicators between this process's counterparts, and inside its node."""
    place, seconds = node.index(everyone.rank), everyone.timeout_seconds
    host = ThreadHost()  # shared, because one background thread waits for both communicators
    parent, ranks = (group, node) if node_group == "auto" else (node_group, None)
    inside_group = GroupFactory.among(parent, ranks, inside=True)
    inside = TorchCommunicator(inside_group, timeout_seconds=seconds, host=host)
    on_failure.callback(inside.close)
    if len(nodes) > 1:
        counterparts = GroupFactory.among(group, [members[place] for members in nodes])
        return TorchCommunicator(counterparts, timeout_seconds=seconds, host=host), inside
    across = SingleCommunicator(seconds)
    across.host = host
    return across, inside


def node_ranks(
    group: dist.ProcessGroup | Transport | None, node_group: NodeGroup
) -> list[int] | str:
    """Return the ranks of this worker's node in the default group, or why they are unknown."""
    if not (group is None or isinstance(group, dist.ProcessGroup)) or not dist.is_initialized():
        return "there is no process group"
    node = _reported_node(group, node_group)
    if isinstance(node, str):
        return node
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    return [ranks[rank] for rank in node]


def _reported_node(group: dist.ProcessGroup | None, node_group: NodeGroup) -> list[int] | str:
    """Return the ranks of this worker's node in ``group``, or why they are unknown."""
    if node_group == "auto":
        return _node_from_environment(dist.get_rank(group), dist.get_world_size(group))
    if not isinstance(node_group, dist.ProcessGroup):
        return (
            'node_group must be "auto", or the process group of this worker\'s node, of which it '
            f"is a member; got {node_group!r}"
        )
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    members = dist.get_process_group_ranks(node_group)
    outside = [rank for rank in members if rank not in ranks]
    if outside:
        return f"{ranks_text(outside)} of node_group take no part in the training (group)"
    return [ranks.index(rank) for rank in members]


def _node_from_environment(rank: int, size: int) -> list[int] | str:
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


def group_into_nodes(reported: Sequence[list[int] | str]) -> list[list[int]]:
    """Return the ranks of each node. Nodes are ordered by their lowest rank.

    Args:
        reported: Report of each worker, in rank order: the ranks of its node, or a text that says
            why the worker does not know its node.
    """
    nodes: list[list[int]] = []
    for rank, members in enumerate(reported):
        if isinstance(members, str):
            raise AttachError(f"rank {rank}: {members}")
        for other in members:
            if rank not in members or reported[other] != members:
                raise AttachError(
                    f"the nodes do not fit together: that of rank {rank} has "
                    f"{ranks_text(members)}, and that of rank {other} has {reported[other]}"
                )
        if rank == min(members):
            nodes.append(members)
        if len(members) != len(nodes[0]):
            raise AttachError(
                "all nodes must have the same number of workers: that of rank 0 has "
                f"{len(nodes[0])}, that of rank {rank} has {len(members)}"
            )
    return nodes
