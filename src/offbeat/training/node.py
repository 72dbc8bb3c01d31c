"""Inside a node of several workers: in every step the mean of their gradients, and one model."""

from collections.abc import Sequence

from torch import nn
from typing_extensions import override

from offbeat.errors import OffbeatError
from offbeat.fabric import Communicator, Team, Wire
from offbeat.means import ModelMean, Replica
from offbeat.means.gradient_mean import GradientMean
from offbeat.strategies.base import Part


class NodeBuffers:
    """Keeps the buffers of a node's workers equal, whose parameters ``fully_shard`` has divided.

    The gradients are its business, and are there when backward has ended.

    Args:
        inside: The workers of this node. Their bytes and waits are not counted.
        model: The model.
    """

    overlap = False

    def __init__(self, inside: Communicator, model: nn.Module) -> None:
        team = self._team = Team(inside)
        # A replica of its own: what its buckets stage must not be under way elsewhere.
        self._buffers = ModelMean(team, Replica(model, ()), Wire(team), referenced=False)

    def start(self, bucket: int) -> bool:
        """Nothing is started during backward."""
        return False

    def average(self, index: int) -> None:
        """The buffers become their mean. Blocks."""
        what = "mean of the buffers of a node"
        self._buffers.average_buffers(1.0, self._team.size, what=what)

    def meet(self, index: int) -> None:
        """This worker takes no step now, and so must all others of its node. Blocks."""
        self.average(index)


class NodeMean(NodeBuffers):
    """Keeps the workers of a node equal, so that the strategy has one gradient of each node.

    Before the strategy sees them, the gradients of a step become their mean inside the node, and so
    do floating-point and complex buffers; signed integers take the maximum. With one optimizer all
    buckets of gradients but the last leave while backward runs.

    Args:
        inside: The workers of this node. Their bytes and waits are not counted.
        model: The model.
        parts: The optimizers.

    Attributes:
        overlap: Whether to be told of buckets while backward runs.
    """

    def __init__(self, inside: Communicator, model: nn.Module, parts: Sequence[Part]) -> None:
        super().__init__(inside, model)
        team, wire = self._team, Wire(self._team)
        self.overlap = len(parts) == 1
        self._means = [
            GradientMean(
                team,
                wire,
                part.buckets,
                name=f"gradients {part.index}",
                slots=1,
                overlap=self.overlap,
            )
            for part in parts
        ]

    @override
    def start(self, bucket: int) -> bool:
        """Backward, still running, has completed this bucket; whether to tell of further ones."""
        mean = self._means[0]
        mean.start(bucket)
        return mean.overlap

    @override
    def average(self, index: int) -> None:
        """The gradients of optimizer ``index`` become their mean, and so do buffers. Blocks."""
        self._reduce(index, stepping=True)
        super().average(index)

    @override
    def meet(self, index: int) -> None:
        """This worker takes no step now, and so must all others of its node. Blocks.

        Args:
            index: The optimizer whose turn it would be.
        """
        self._reduce(index, stepping=False)
        super().average(index)

    def _reduce(self, index: int, *, stepping: bool) -> None:
        (steps,) = self._means[index].reduce([float(stepping)], contribute=stepping)
        if steps not in (0, self._team.size):
            raise OffbeatError(
                f"{steps:.0f} of the {self._team.size} workers of this node take a step, and the "
                "others are in consensus(), finish() or save(): the workers of a node must stop "
                "together, so give each of them as many batches"
            )
