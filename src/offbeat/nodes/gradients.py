"""Inside a node of several workers: in every step the mean of their gradients, and one model."""

from collections.abc import Sequence

from torch import nn
from typing_extensions import override

from offbeat.averaging import AttachedOptimizer, Replica
from offbeat.averaging.exact_mean import ExactMean
from offbeat.averaging.gradients import GradientMean
from offbeat.errors import OffbeatError
from offbeat.quantization.wire import Wire
from offbeat.transport.communicator import Communicator
from offbeat.transport.team import Team


class NodeBuffers:
    """Keeps the buffers of a node's workers equal. ``fully_shard`` has divided their parameters.

    ``fully_shard`` also averages the gradients; they exist when backward has ended.

    Args:
        inside: The workers of this node. Their bytes and waits are not counted.
        model: The model.

    Attributes:
        overlap: True if ``start`` should be called while backward runs.
    """

    overlap = False

    def __init__(self, inside: Communicator, model: nn.Module) -> None:
        team = self._team = Team(inside)
        # A replica of its own, because the flow's buckets may be in flight.
        self._buffers = ExactMean(team, Replica(model, ()))

    def start(self, bucket: int) -> bool:
        """Backward has completed a bucket of gradients. Returns True to learn of further ones."""
        return False

    def average(self, index: int) -> None:
        """Replace the buffers by their mean over the node. Blocks.

        Args:
            index: The optimizer that is about to step.
        """
        what = "mean of the buffers of a node"
        self._buffers.average_buffers(1.0, self._team.size, what=what)

    def pause(self, index: int) -> None:
        """This worker takes no step now, and neither may the others of its node. Blocks.

        Args:
            index: The optimizer whose turn it would be.
        """
        self.average(index)


class NodeMean(NodeBuffers):
    """Keeps the workers of a node equal, so that the strategy sees one gradient of each node.

    Before the strategy sees them, the gradients of a step become their mean over the node.
    Floating-point and complex buffers do, too; signed integers take the maximum. With one optimizer
    all buckets of gradients but the last leave while backward runs.

    Args:
        inside: The workers of this node. Their bytes and waits are not counted.
        model: The model.
        optimizers: The attached optimizers.
    """

    def __init__(
        self, inside: Communicator, model: nn.Module, optimizers: Sequence[AttachedOptimizer]
    ) -> None:
        super().__init__(inside, model)
        team, wire = self._team, Wire(self._team)
        self.overlap = len(optimizers) == 1
        self._means = [
            GradientMean(
                team,
                wire,
                one.buckets,
                name=f"gradients {one.index}",
                slots=1,
                overlap=self.overlap,
            )
            for one in optimizers
        ]

    @override
    def start(self, bucket: int) -> bool:
        mean = self._means[0]
        mean.start(bucket)
        return mean.overlap

    @override
    def average(self, index: int) -> None:
        """Replace gradients and buffers by their mean over the node. Blocks.

        Args:
            index: The optimizer that is about to step.
        """
        self._reduce(index, stepping=True)
        super().average(index)

    @override
    def pause(self, index: int) -> None:
        self._reduce(index, stepping=False)
        super().average(index)

    def _reduce(self, index: int, *, stepping: bool) -> None:
        (steps,) = self._means[index].reduce([float(stepping)], contribute=stepping)
        if steps not in (0, self._team.size):
            raise OffbeatError(
                f"{steps:.0f} of the {self._team.size} workers of this node take a step, and the "
                "others are in consensus(), finish() or save(). The workers of a node must stop "
                "together: give each of them equally many batches"
            )
