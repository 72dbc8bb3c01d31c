"""One worker of a training: its model, its optimizers and how it reaches the other workers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from offbeat.averaging.exact_mean import ExactMean
from offbeat.averaging.gradients import gradient_buckets
from offbeat.averaging.norm import squared_norm
from offbeat.averaging.optimizer_state import OptimizerState, forget_non_finite
from offbeat.averaging.replica import Replica
from offbeat.quantization.wire import Wire
from offbeat.transport.team import Team

NonFinite = Literal["raise", "warn", "exclude"]


@dataclass(eq=False)
class AttachedOptimizer:
    """One optimizer and those parameters of the model that it moves.

    Attributes:
        index: Position in the list of optimizers given to ``attach``.
        optimizer: The torch optimizer.
        parameters: The parameters it moves, in the model's order.
        scale: ``Host.scale``; not 1 only for a placeholder model.
    """

    index: int
    optimizer: torch.optim.Optimizer
    parameters: list[nn.Parameter]
    scale: float = 1.0

    @cached_property
    def buckets(self) -> list[list[nn.Parameter]]:
        """The parameters in buckets, in the order in which backward completes them."""
        return gradient_buckets(self.parameters, scale=self.scale)

    def gradients(self) -> list[Tensor]:
        """The gradients that exist now."""
        return [p.grad for p in self.parameters if p.grad is not None]


class Worker:
    """What a flow needs to train one worker together with the others.

    Args:
        team: The workers.
        replica: Tensors of this worker's model.
        optimizers: The attached optimizers.
        wire: Sums over the workers at the precision given to ``attach``.
        non_finite: Policy for non-finite contributions, as given to ``attach``.

    Attributes:
        exact_mean: Exact means of whole models and buffers, for consensus and the end.
        optimizer_state: Averages the optimizers' state for strategies that ask for it.
        overlaps_backward: True if buckets of gradients are reported while backward runs.
        step: Local steps, the current one included once its last gradients exist.
        touched: True if something outside ``optimizer.step`` has changed the model since the last
            step, as schedule-free optimizers do.
        scaled: True if a GradScaler is in use, under which non-finite gradients are normal.
        norm_squared: ‖g‖² of the current step, if the strategy has measured it.
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
        self.overlaps_backward = False
        self.step = 0
        self.touched = self.scaled = False
        self.norm_squared: float | None = None
        self.record: dict[str, Any] = {}
        self.details: dict[str, Any] = {}
        self.open_view(wire)

    def open_view(self, wire: Wire) -> None:
        """Use ``wire`` and make the means anew: the team has another composition."""
        self.wire = wire
        self.exact_mean = ExactMean(self.team, self.replica)
        torch_optimizers = [one.optimizer for one in self.optimizers]
        self.optimizer_state = OptimizerState(self.team, self.replica.parameters, torch_optimizers)

    @property
    def rank(self) -> int:
        """Number of this worker."""
        return self.team.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.team.size

    @property
    def moves(self) -> int:
        """Local steps, plus one if something else has changed the model since the last step."""
        return self.step + self.touched

    @property
    def guarded(self) -> bool:
        """True if no worker may receive a non-finite value."""
        return self.non_finite != "warn"

    @property
    def excludes(self) -> bool:
        """True if a worker with non-finite values is excluded from the mean."""
        return self.non_finite == "exclude"

    def squared_norm(self, tensors: Iterable[Tensor]) -> float:
        """‖·‖² over ``tensors``, including the shards that other workers of this node hold."""
        (squared,) = self.team.over_shards(squared_norm(tensors))
        return squared

    def finite_gradients(self, optimizers: Iterable[AttachedOptimizer]) -> bool:
        """Whether all gradients are finite. Reads them once, but not under a GradScaler.

        Under a GradScaler the answer is True: gradients overflow there, and the scaler skips the
        step. In a node whose workers hold shards the answer is that of the whole node.
        """
        if self.scaled:
            return True
        squared = self.squared_norm(g for one in optimizers for g in one.gradients())
        return math.isfinite(squared)

    def finite_model(self) -> bool:
        """Whether all averaged parameters are finite. Reads them once."""
        return math.isfinite(self.squared_norm(p.detach() for _, p in self.replica.parameters))

    def forget_non_finite(self) -> None:
        """Reset the optimizer state of each parameter whose state is not finite.

        In a node whose workers hold shards all of them reset the same.
        """
        for one in self.optimizers:
            forget_non_finite(one.optimizer, self.team.over_shards)

    def barrier(self, what: str) -> None:
        """Wait until all workers have reached this point."""
        communicator = self.team.communicator
        communicator.sum(torch.zeros(1, device=communicator.control_device), what=what).wait()
