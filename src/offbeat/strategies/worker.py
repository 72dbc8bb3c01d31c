"""What a strategy sees of the worker it runs on."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.fabric import Communicator, Completed, Handle, Team, Wire
from offbeat.fabric.control_only import ControlOnly
from offbeat.means import ModelMean, Replica
from offbeat.means.gradient_mean import gradient_buckets
from offbeat.means.optimizer_state import forget_not_finite
from offbeat.significance import squared_norm
from offbeat.strategies.roll import Ballot, Roll


@dataclass(eq=False)
class Part:
    """One optimizer and those of the model's parameters that it moves.

    Attributes:
        index: Of the optimizer, as given to ``attach``.
        optimizer: It.
        parameters: In the model's order.
        scale: ``Host.scale``.
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
        """The gradients that are there now."""
        return [p.grad for p in self.parameters if p.grad is not None]


class Worker:
    """What a strategy sees of the worker it runs on.

    Attributes:
        team: The workers; who needs their communicator, their number or a clock asks it.
        replica: The model's tensors.
        parts: One for each optimizer.
        wire: Sums over the workers at the precision of the wire.
        overlaps_backward: Whether the front door will tell of buckets while backward runs.
        step: Own iterations, the one at hand included as soon as its last gradients are ready.
        steps_since_sync: Those since the models were last averaged.
        has_news: Whether this worker's model holds steps that no mean of models has seen.
        touched: Whether something else has changed it since: ``has_news`` is true then, too.
        scaled: Whether a GradScaler is at work, for whom gradients that are not finite are normal.
        guarded: Whether nobody may take in what is not finite: it is asked for by ``non_finite``.
        leaves_out: Whether who would contribute that is left out; else the run ends.
        left_out: Whether it is this worker, in the round that is about to be called.
        untold: Whether it was this worker after the last vote, so that the next one has to tell.
        norm_squared: ‖g‖² of this iteration, if it was measured.
        record: Numbers for this iteration's telemetry record.
        details: Totals of the strategy's own, shown as ``Stats.details``.
        state: What the strategy's ``start`` returned.
    """

    def __init__(
        self, team: Team, replica: Replica, parts: list[Part], wire: Wire, models: ModelMean
    ) -> None:
        self.team, self.replica, self.parts = team, replica, parts
        self.wire, self.models = wire, models
        self.overlaps_backward = False
        self.step = 0
        self.steps_since_sync = 0
        self.has_news = self.touched = False
        self.scaled = self.guarded = self.leaves_out = self.left_out = self.untold = False
        self.norm_squared: float | None = None
        self.record: dict[str, Any] = {}
        self.details: dict[str, Any] = {}
        self.state: Any = None

    @property
    def moves(self) -> int:
        """Own steps, and one more if something else has changed the model since."""
        return self.step + self.touched

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.team.rank

    @property
    def size(self) -> int:
        """The number of workers, now."""
        return self.team.size

    @property
    def ballot_slots(self) -> int:
        """How many numbers a ballot has without those of its vote's ``more``."""
        return Ballot.SLOTS + self.wire.slots

    @property
    def fabric(self) -> Communicator:
        """The communicator, for decisions; over a lossy wire it refuses to carry models."""
        if self.wire.exact:
            return self.team.fabric
        return ControlOnly(self.team.fabric, self.wire.precision)

    def call(self, ballot: Ballot) -> Handle[Roll]:
        """Start a roll."""
        values, size = ballot.values(), self.size
        if size == 1:
            return Completed(ballot.read(values, 1))
        tensor = torch.tensor(values, dtype=torch.float64, device=self.team.fabric.control_device)
        handle = self.team.fabric.sum(tensor, what=f"flag exchange at step {self.step}")
        return handle.then(lambda sums: ballot.read(sums.tolist(), size))

    def squared_norm(self, tensors: Iterable[Tensor]) -> float:
        """‖·‖² over all ``tensors``, those shards too that others of this node hold of them."""
        (squared,) = self.team.over_shards(squared_norm(tensors))
        return squared

    def finite_gradients(self, parts: Iterable[Part]) -> bool:
        """Whether no gradient of ``parts`` is NaN or infinite. Reads them once."""
        if self.scaled:
            return True
        return math.isfinite(squared_norm(g for part in parts for g in part.gradients()))

    def finite_model(self) -> bool:
        """Whether no averaged parameter is NaN or infinite. Reads them once."""
        return math.isfinite(squared_norm(p.detach() for _, p in self.replica.parameters))

    def forget_not_finite(self) -> None:
        """What is not finite in the optimizers' state begins anew."""
        for part in self.parts:
            forget_not_finite(part.optimizer)

    def barrier(self, what: str) -> None:
        """Wait until all workers have come."""
        fabric = self.team.fabric
        fabric.sum(torch.zeros(1, device=fabric.control_device), what=what).wait()

    # -- means ---------------------------------------------------------------------------------

    def average(self, roll: Roll, *, take: bool = True) -> None:
        """x ← Σ w·x / Σ w over the workers, with the weights of ``roll``; see ``ModelMean``.

        When nobody has news nothing is sent: the models are already the same.

        Args:
            roll: The weights.
            take: False keeps this worker's own model.
        """
        if roll.weight == 0:
            return
        if self.size > 1:
            what = f"mean of the model at step {self.step}"
            self.models.average(roll.own.weight, roll.weight, take=take, what=what)
        if take:
            self.synchronized()

    def average_all(self, own: float, total: float, *, final: bool) -> None:
        """The exact mean of all models, for a look at the consensus or at the end.

        Args:
            own: w of this worker.
            total: Σ w; 0: the models are the same already.
            final: Whether it stays; a look is undone by the front door.
        """
        if self.size > 1 and total:
            what = f"{'final mean' if final else 'consensus'} of the model at step {self.step}"
            if final:
                self.models.average(own, total, exact=True, what=what)
            else:
                self.models.look(own, total, what=what)
        self.synchronized()

    def average_buffers(self, *, final: bool) -> None:
        """The mean of all workers' buffers, where the parameters are common anyway."""
        if self.size > 1:
            what = f"{'final mean' if final else 'consensus'} of the buffers at step {self.step}"
            self.models.average_buffers(1.0, self.size, what=what)
        self.synchronized()

    def synchronized(self, steps_since: int = 0, *, news: bool = False) -> None:
        """Note that this worker's model has taken in a mean of all.

        Args:
            steps_since: Own steps since the models of that mean.
            news: Whether any of them has not been sent.
        """
        self.steps_since_sync, self.has_news = steps_since, news
