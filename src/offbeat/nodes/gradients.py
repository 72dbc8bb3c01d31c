"""Averaging of gradients and buffers over the workers of a node, in every step.

The workers of a node hold equal models, or shards of one model.
"""

from collections.abc import Sequence

from torch import nn

from offbeat.averaging import AttachedOptimizer, Replica
from offbeat.averaging.gradients import GradientMean
from offbeat.averaging.model_mean import ModelMean
from offbeat.errors import MismatchError, OffbeatError
from offbeat.quantization.wire import Wire
from offbeat.transport.communicator import Communicator
from offbeat.transport.team import Team


class NodeMean:
    """Averages gradients and buffers, so that the models of a node remain equal.

    The strategy receives the mean gradients of the node. With a single optimizer, all buckets of
    gradients except the last may be sent while backward still runs.

    ``Stats`` counts neither the bytes nor the waiting time inside a node.

    Args:
        inside: Communicator between the workers of the node.
        model: The model.
        optimizers: The attached optimizers. None of them if ``fully_shard`` has sharded the model,
            because it averages the gradients itself, during backward.

    Attributes:
        overlap: True if ``start`` must be called during backward.
    """

    def __init__(
        self, inside: Communicator, model: nn.Module, optimizers: Sequence[AttachedOptimizer]
    ) -> None:
        team = self._team = Team(inside)
        self.overlap = len(optimizers) == 1
        # A separate Replica: messages in flight may use the memory of the strategy's Replica.
        self._buffer_mean = ModelMean(team, Replica(model, ()))
        wire = Wire(team)
        self._gradients = [
            GradientMean(wire, each.buckets, overlap=self.overlap) for each in optimizers
        ]

    def start(self, bucket: int) -> None:
        """Start to average a bucket (a group of gradients), once backward has completed it.

        ``bucket`` is an index into ``AttachedOptimizer.buckets``.
        """
        self._gradients[0].start(bucket)

    def average(self, index: int, *, stepping: bool = True) -> None:
        """Average the gradients and the buffers of the workers. A collective of the node. Blocks.

        Floating-point and complex buffers become their mean, signed integer buffers their maximum.

        Args:
            index: Position of the optimizer whose gradients are complete.
            stepping: False at a barrier, where all workers wait for each other. This worker then
                contributes no gradients.

        Raises:
            MismatchError: The workers of the node step different optimizers.
            OffbeatError: Some workers of the node step, and others do not.
        """
        if self._gradients:
            inside, mean = self._team.communicator, self._gradients[index]
            if len(self._gradients) > 1:  # another worker may step another optimizer, or none
                what = "comparison of the optimizers in a node"
                rows = inside.gather_numbers([stepping, index], what=what).wait()
            else:
                rows = mean.reduce([float(stepping)], contribute=stepping)
            steps = sum(row[0] for row in rows)
            if steps not in (0, self._team.size):
                raise OffbeatError(
                    f"{steps:.0f} of the {self._team.size} workers of this node take a step, and "
                    "the others are in consensus(), finish() or save(). The workers of a node must "
                    "stop together: give all of them the same number of batches"
                )
            if len(self._gradients) > 1 and steps:
                if len(indices := {int(row[1]) for row in rows}) > 1:
                    raise MismatchError(
                        f"the workers of a node step the optimizers {sorted(indices)} at the same "
                        "time: step all optimizers equally often and in the same order on every "
                        "rank"
                    )
                mean.reduce([], contribute=True)
        self._buffer_mean.average_buffers(
            1.0, self._team.size, what="mean of the buffers of a node"
        )
