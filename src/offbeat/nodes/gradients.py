"""Averaging of gradients and buffers over the workers of a node, in every step.

The workers of a node hold equal models, or shards of one model.
"""

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
    """Averages only the buffers, for a model that ``fully_shard`` has sharded inside the node.

    ``fully_shard`` itself averages the gradients during backward. For other models, the subclass
    ``NodeMean`` averages gradients, too.

    ``Stats`` counts neither the bytes nor the waiting time inside a node.

    Attributes:
        overlap: True if ``start`` must be called during backward.
    """

    overlap = False

    def __init__(self, inside: Communicator, model: nn.Module) -> None:
        team = self._team = Team(inside)
        # A separate Replica: messages in flight may use the memory of the strategy's Replica.
        self._mean = ExactMean(team, Replica(model, ()))

    def start(self, bucket: int) -> None:
        """Start to average a bucket (a group of gradients), once backward has completed it.

        ``bucket`` is an index into ``AttachedOptimizer.buckets``.
        """

    def average(self, index: int) -> None:
        """Average the buffers, when the gradients of optimizer ``index`` are complete. Blocks.

        A collective of the node.

        Floating-point and complex buffers become their mean, signed integer buffers their maximum.
        """
        what = "mean of the buffers of a node"
        self._mean.average_buffers(1.0, self._team.size, what=what)

    def pause(self, index: int) -> None:
        """Average only the buffers, at a barrier, where all workers wait for each other. Blocks.

        ``index`` is the optimizer whose step would be next.
        """
        self.average(index)


class NodeMean(NodeBuffers):
    """Averages gradients and buffers, so that the models of a node remain equal.

    The strategy receives the mean gradients of the node. With a single optimizer, all buckets of
    gradients except the last may be sent while backward still runs.
    """

    def __init__(
        self, inside: Communicator, model: nn.Module, optimizers: Sequence[AttachedOptimizer]
    ) -> None:
        super().__init__(inside, model)
        wire = Wire(self._team)
        self.overlap = len(optimizers) == 1
        self._means = [
            GradientMean(wire, each.buckets, slots=1, overlap=self.overlap) for each in optimizers
        ]

    @override
    def start(self, bucket: int) -> None:
        self._means[0].start(bucket)

    @override
    def average(self, index: int) -> None:
        self._reduce(index, stepping=True)
        super().average(index)

    @override
    def pause(self, index: int) -> None:
        self._reduce(index, stepping=False)
        super().average(index)

    def _reduce(self, index: int, *, stepping: bool) -> None:
        """Average the gradients if all workers of the node step. Raise if only some of them do."""
        (steps,) = self._means[index].reduce([float(stepping)], contribute=stepping)
        if steps not in (0, self._team.size):
            raise OffbeatError(
                f"{steps:.0f} of the {self._team.size} workers of this node take a step, and the "
                "others are in consensus(), finish() or save(). The workers of a node must stop "
                "together: give all of them the same number of batches"
            )
