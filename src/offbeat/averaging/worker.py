"""One worker: its model, its optimizers and its means of communication with the other workers.

A *flow* is the code that drives a strategy through the events of a training step. ``Worker`` holds
what a flow needs.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from offbeat.averaging.gradients import gradient_buckets
from offbeat.averaging.model_mean import ModelMean
from offbeat.averaging.norm import no_nan, squared_norm
from offbeat.averaging.replica import Replica
from offbeat.quantization.wire import Wire
from offbeat.strategies.base import WorkerView
from offbeat.transport.team import Team

NonFinite = Literal["raise", "warn"]
"""Policy for contributions with NaN or infinity; see the argument ``non_finite`` of ``attach``."""


@dataclass(eq=False)
class AttachedOptimizer:
    """One optimizer and the parameters of the model that it updates.

    Attributes:
        index: Position in the list of optimizers passed to ``attach``.
        optimizer: The torch optimizer.
        parameters: The parameters of this optimizer, in the model's order.
    """

    index: int
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]

    @cached_property
    def buckets(self) -> list[list[nn.Parameter]]:
        """The parameters in buckets, in the order in which backward computes their gradients."""
        return gradient_buckets(self.parameters)

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the parameters that have one."""
        return [p.grad for p in self.parameters if p.grad is not None]


class Worker:
    """The data and the means of communication that a flow needs on one worker.

    Args:
        team: The workers.
        replica: Tensors of this worker's model.
        optimizers: The attached optimizers.
        wire: Sums over the workers at the precision given to ``attach``.
        non_finite: Policy for non-finite contributions, as given to ``attach``.

    Attributes:
        model_mean: Averages whole models or their buffers without quantization.
        start_step: Number of local steps of the most advanced worker when the generation began.
        step: Number of local steps, including the current one once all of its gradients are ready.
        touched: Set before a consensus, which replaces the model by the mean over the workers. True
            if the parameters have changed since the last step. For example, schedule-free
            optimizers change them in ``eval()`` and ``train()``.
        call: Public call in which this worker waits for the others (a name in ``votes.CALLS``).
            Empty while it trains.
        call_bits: Further bits of ``Vote.call`` while this worker waits in ``call``.
        scaled: True if a GradScaler is in use. Non-finite gradients are then normal.
        record: Values for the telemetry record of this step.
        details: Totals for ``Stats.details``.
    """

    def __init__(
        self,
        team: Team,
        replica: Replica,
        optimizers: list[AttachedOptimizer],
        wire: Wire,
        non_finite: NonFinite = "raise",
    ) -> None:
        self.team, self.replica, self.optimizers = team, replica, optimizers
        self.non_finite = non_finite
        self.start_step = self.step = 0
        self.touched = self.scaled = False
        self.call, self.call_bits = "", 0
        self.record: dict[str, Any] = {}
        self.details: dict[str, Any] = {}
        self._nan_buffers = False
        self._nan_buffers = not self.finite_buffers()
        self.open_generation(wire)

    def open_generation(self, wire: Wire) -> None:
        """Use a new wire, at first and after each change of the group of workers."""
        self.wire = wire
        self.model_mean = ModelMean(self.team, self.replica)

    def strategy_view(self) -> WorkerView:
        """Return a new ``WorkerView``, the data that the strategy reads. The flow updates it."""
        return WorkerView(
            rank=self.rank,
            size=self.size,
            step=self.step,
            start_step=self.start_step,
            record=self.record,
            details=self.details,
        )

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self.team.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.team.size

    @property
    def overlaps_backward(self) -> bool:
        """True if the flow may average gradients while backward still runs.

        False in a node: the flow averages the node's mean gradients, which exist only after
        backward. False with several optimizers: backward might complete their buckets in a
        different order on each worker, but all workers must send in the same order.
        """
        return self.size > 1 and len(self.optimizers) == 1 and self.team.node is None

    @property
    def model_version(self) -> int:
        """Greater than n if the model has changed since step n: ``step``, plus 1 if ``touched``."""
        return self.step + self.touched

    @property
    def guarded(self) -> bool:
        """True if non-finite values are kept from other workers (``non_finite="raise"``)."""
        return self.non_finite == "raise"

    def squared_norm(self, tensors: Iterable[Tensor]) -> float:
        """Return the sum of the squares of all elements, including all shards of ``tensors``."""
        (squared,) = self.team.sum_over_shards(squared_norm(tensors))
        return squared

    def finite_gradients(self, optimizers: Iterable[AttachedOptimizer]) -> bool:
        """Return True if all gradients are finite, including all their shards.

        Always True with a GradScaler: it skips the step if a gradient has overflowed.
        """
        if self.scaled:
            return True
        squared = self.squared_norm(g for attached in optimizers for g in attached.gradients())
        return math.isfinite(squared)

    def finite_model(self) -> bool:
        """Return True if all averaged parameters are finite and ``finite_buffers`` returns True.

        Includes all shards.
        """
        squared = self.squared_norm(p.detach() for _, p in self.replica.parameters)
        return math.isfinite(squared) and self.finite_buffers()

    def finite_buffers(self) -> bool:
        """Return False if a floating-point buffer has become NaN, such as a running mean.

        Infinity is allowed, because masks contain it, and so are buffers with NaN from the start.
        """
        return self._nan_buffers or not math.isnan(self.squared_norm(self.replica.float_buffers()))

    def finite_buffers_here(self) -> Tensor | bool:
        """Return ``finite_buffers`` of this process alone, without a wait for a GPU."""
        return self._nan_buffers or no_nan(self.replica.float_buffers())

    def barrier(self, what: str) -> None:
        """Wait until all workers have called this. ``what`` names the operation in errors."""
        one = torch.zeros(1, dtype=torch.float32, device="cpu")
        self.team.communicator.sum(one, what=what).wait()
