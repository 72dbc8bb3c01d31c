"""What a strategy costs that works between nodes of several workers."""

from dataclasses import replace

from offbeat.strategies.forecast import Costs
from offbeat.strategies.node_costs import NodeCosts, maximum_of_normals


def between_nodes(alone: Costs, node: NodeCosts) -> Costs:
    """What a strategy sees of nodes: N/L workers, whose step is that of a node.

    That ends when the slowest of its workers has computed and the mean of their gradients is there.
    Buckets leave while backward runs, exactly whatever the wire; a number and two more go along.

    Args:
        alone: Of the N workers by themselves.
        node: L of them.
    """
    inside = replace(
        alone,
        workers=node.workers,
        bytes_per_second=node.bytes_per_second,
        latency_seconds=node.latency_seconds,
        wire="float32",
    )
    step = inside.gradients_seconds(inside.slowest(1), 3, overlap=True)
    spread = alone.jitter * alone.step_seconds * maximum_of_normals(node.workers)[1]
    return replace(
        alone,
        workers=alone.workers // node.workers,
        step_seconds=step,
        jitter=spread / step,
        node=node,
    )
