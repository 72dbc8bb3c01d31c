"""Changes of the team's view: one ends, and the next begins from what its workers have in common.

Losing a worker and taking one in are the same: everything under way is abandoned, those who are
there agree on the next view, make model, optimizer and counters common, and call ``start`` again.
A worker writes what it gets all at once, and only when it has it all. So whoever is lost on the
way, each of the others has what it had before, or what all are to have; and the next attempt asks
who is ahead.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offbeat.errors import CommunicationError, MismatchError, OffbeatError
from offbeat.fabric import Team, Wire
from offbeat.fabric.adaptive import AdaptiveWire
from offbeat.fabric.wire import Precision
from offbeat.means import ModelMean, OptimizerState, Replica
from offbeat.strategies.base import NonFinite, Part, Strategy, Worker
from offbeat.telemetry import Stats
from offbeat.training.agreement import difference, versioned
from offbeat.training.finite import Finite
from offbeat.training.iteration import Iteration
from offbeat.training.transfer import (
    optimizer_values,
    put_optimizer_values,
    receive_values,
    send_values,
)

logger = logging.getLogger("offbeat")


@dataclass(frozen=True)
class Means:
    """How means are taken.

    Attributes:
        wire: As given to ``attach``.
        optimizer_state: Likewise.
    """

    wire: Precision
    optimizer_state: str

    def open(
        self, team: Team, strategy: Strategy, replica: Replica, parts: Sequence[Part]
    ) -> tuple[Wire, ModelMean]:
        """The wire and the mean of models of one view, in which all hold the same model.

        A collective.
        """
        adapts = self.wire == "auto" and not strategy.chooses
        wire = AdaptiveWire(team) if adapts else Wire(team, self.wire)
        models = ModelMean(team, replica, wire, referenced=strategy.averages == "models")
        if self.optimizer_state == "average":
            optimizers = [part.optimizer for part in parts]
            models.optimizer_state = OptimizerState(team, replica.parameters, optimizers)
        return wire, models


def exact_means(team: Team, replica: Replica) -> tuple[Wire, ModelMean]:
    """A wire and a mean of models that need no common model. No collective."""
    wire = Wire(team)
    return wire, ModelMean(team, replica, wire, referenced=False)


@dataclass(frozen=True)
class _Told:
    """What a worker tells when a view begins.

    Attributes:
        fresh: Whether it has joined, and has nothing to contribute.
        common: The last view whose common model it has taken.
        acted: Rounds since then that it has acted on.
        news: Whether its model holds steps that no mean has seen.
        steps: Own steps.
        syncs: Those that have synchronized.
        digest: Of what must be alike on all workers.
        kept: See ``Strategy.kept``.
    """

    fresh: bool
    common: int
    acted: int
    news: bool
    steps: int
    syncs: int
    digest: str
    kept: dict[str, Any]


@dataclass(frozen=True)
class _Plan:
    """What follows from all that was told, the same on all workers.

    Attributes:
        source: Rank of a worker that has all that can be had.
        behind: Ranks that take everything from it.
        contributing: Ranks whose models are averaged; none: those of all others are equal.
    """

    source: int
    behind: list[int]
    contributing: list[int]


def plan_of(told: Sequence[_Told], strategy: Strategy) -> _Plan:
    """Who has what the others need.

    Where a mean comes in at once, in a round that all wait for, those who have acted on one round
    more hold all that the others have contributed to it. Where models come together at any time,
    all that have been in the same view count alike.
    """
    old = [rank for rank, one in enumerate(told) if not one.fresh]
    together = strategy.averages == "models" or strategy.replicates

    def progress(rank: int) -> tuple[int, ...]:
        one = told[rank]
        last = one.news if strategy.replicates else False
        return (one.common, one.acted, last) if together else (one.common,)

    best = max(progress(rank) for rank in old)
    ahead = [rank for rank in old if progress(rank) == best]
    fresh = [rank for rank, one in enumerate(told) if one.fresh]
    if strategy.replicates:
        behind = sorted({*fresh, *old} - {*ahead})
        return _Plan(ahead[0], behind, [])
    contributing = ahead
    if strategy.averages == "models" and len(ahead) == len(old):
        contributing = [rank for rank in old if told[rank].news] or ahead[:1]
    return _Plan(ahead[0], fresh, contributing)


class Views:
    """The changes of one worker's views.

    Args:
        strategy: Started anew in each.
        worker: This one.
        means: How its wire and means are made.
        stats: Gives its totals.
        lines: What must be alike on all workers.
        min_workers: With fewer nobody goes on.
        non_finite: As given to ``attach``.

    Attributes:
        iteration: Of this worker; to be set.
        lasted: Called with the seconds that each change has taken; to be set.
    """

    def __init__(
        self,
        strategy: Strategy,
        worker: Worker,
        means: Means,
        stats: Callable[[], Stats],
        lines: Sequence[str],
        *,
        min_workers: int,
        non_finite: NonFinite,
    ) -> None:
        self._strategy, self._worker, self._means = strategy, worker, means
        self._stats, self._min_workers, self._non_finite = stats, min_workers, non_finite
        self._text = "\n".join(versioned(lines))
        self.iteration: Iteration | None = None
        self.lasted: Callable[[float], None] = lambda seconds: None
        self._fresh = False  # this worker has joined and has nothing yet
        self._common = worker.team.view
        self._acted = 0  # rounds since then, as far as a change under way knows
        self._overtaken = False
        self._last: CommunicationError | None = None  # why there is no further view

    def look(self) -> None:
        """Raise CommunicationError if another view is wanted."""
        membership = self._worker.team.membership
        if membership is not None and membership.wanted():
            raise CommunicationError("a worker asks to join, or another one has left the view")

    def __call__(self, error: CommunicationError) -> bool:
        """End this view on account of ``error``, and begin the next one. A collective.

        Returns:
            Whether the model is now that of after a step that this worker was about to take.

        Raises:
            CommunicationError: there is none for this worker, or too few are left.
        """
        assert self.iteration is not None
        if self._last is not None:
            raise self._last
        worker, team, before = self._worker, self._worker.team, self._worker.team.host.now()
        self._acted, self._overtaken = self.iteration.acted, False
        try:
            with team.account.paused():
                self._change(error)
        except CommunicationError as last:
            self._last = last
            raise
        self.iteration.begin_view(Finite(self._strategy, worker, self._non_finite))
        seconds = team.host.now() - before
        self.tell()
        self.lasted(seconds)
        details = worker.details
        details["view_changes"] = details.get("view_changes", 0) + 1
        details["view_seconds"] = details.get("view_seconds", 0.0) + seconds
        return self._overtaken

    def tell(self) -> None:
        """Note the view in the totals and in the coming record."""
        worker, team = self._worker, self._worker.team
        worker.details.update(view=team.view, members=list(team.members))
        worker.record.update(view=team.view, workers=team.size)

    def join(self) -> None:
        """Begin the view into which this worker was taken.

        Raises:
            CommunicationError: it was not, in the end, or there are too few.
            MismatchError: it differs from the others.
        """
        self._fresh = True
        try:
            self.begin()
        except CommunicationError as error:
            self._change(error)
        self.tell()

    def _change(self, error: CommunicationError) -> None:
        team = self._worker.team
        while True:
            membership = team.membership
            assert membership is not None
            logger.info("rank %d leaves view %d: %s", team.rank, team.view, error)
            team.close()
            self._worker.replica.forget_buckets()
            team.enter(membership.regroup(view=team.view, step=self._stats().steps))
            if team.size < self._min_workers:
                self._give_up()
            try:
                self.begin()
                return
            except CommunicationError as another:
                error = another

    def begin(self) -> None:
        """Begin the view that the team has entered. A collective.

        Raises:
            CommunicationError: another one is needed.
            MismatchError: this worker has joined, and differs from the others.
        """
        worker, team, strategy = self._worker, self._worker.team, self._strategy
        told = self._tell()
        plan = plan_of(told, strategy)
        self._copy(plan, told)
        if plan.contributing:
            which = plan.contributing
            kept = [one.kept if rank in which else None for rank, one in enumerate(told)]
            strategy.reunite(worker, kept, lambda: self._average(which))
        self._common, self._acted = team.view, 0
        worker.wire, worker.models = self._means.open(team, strategy, worker.replica, worker.parts)
        worker.synchronized()
        worker.norm_squared = None
        worker.overlaps_backward = worker.size > 1 and len(worker.parts) == 1
        worker.state = strategy.start(worker)
        strategy.take_up(worker, told[plan.source].kept)
        self._fresh = False  # not before: until now there was nothing that could be kept
        worker.barrier(f"the beginning of view {team.view}")  # nobody pushes before all have begun
        logger.info("rank %d of %d begins view %d", team.rank, team.size, team.view)

    def _average(self, contributing: Sequence[int]) -> None:
        """x ← mean(x) over some workers, on all."""
        worker, team = self._worker, self._worker.team
        own, total = float(team.rank in contributing), float(len(contributing))
        what = f"mean of the models at the beginning of view {team.view}"
        exact_means(team, worker.replica)[1].average(own, total, exact=True, what=what)

    def _give_up(self) -> None:
        team = self._worker.team
        assert team.membership is not None
        team.membership.leave(ended=False)
        team.close()
        raise CommunicationError(
            f"rank {team.rank}: {team.size} workers are left in view {team.view} (those that began "
            f"as ranks {', '.join(map(str, team.members))}), and min_workers={self._min_workers}: "
            "the model is this worker's own; go on from it, or from a checkpoint, with more"
        )

    def _tell(self) -> list[_Told]:
        """What all workers tell.

        Raises:
            CommunicationError: one that has joined differs, and will leave.
            MismatchError: it is this one.
        """
        worker, stats = self._worker, self._stats()
        own = _Told(
            self._fresh,
            self._common,
            self._acted,
            worker.has_news,
            stats.steps,
            stats.syncs,
            hashlib.sha256(self._text.encode()).hexdigest(),
            {} if self._fresh else self._strategy.kept(worker),
        )
        fabric, what = worker.team.fabric, "what the workers of a view have"
        payload = json.dumps(vars(own)).encode()
        told = [_Told(**json.loads(one)) for one in fabric.gather_bytes(payload, what=what)]
        if all(one.fresh for one in told):
            raise OffbeatError(
                "nobody is left who has the model: all workers of this view have joined lately; "
                "start anew, from a checkpoint"
            )
        first = next(rank for rank, one in enumerate(told) if not one.fresh)
        others = [rank for rank, one in enumerate(told) if one.digest != told[first].digest]
        if others:
            texts = fabric.gather_bytes(self._text.encode(), what=what)
            lines = [text.decode().split("\n") for text in texts]
            text = "; ".join(difference(lines, rank, first) for rank in others)
            kind = MismatchError if fabric.rank in others else CommunicationError
            raise kind(text)
        return told

    def _copy(self, plan: _Plan, told: Sequence[_Told]) -> None:
        """Give those who are behind what they need."""
        worker, fabric = self._worker, self._worker.team.fabric
        tensors = worker.replica.everything()
        if fabric.rank == plan.source and plan.behind:
            values = {
                "model": tensors,
                "optimizers": [optimizer_values(p.optimizer, p.parameters) for p in worker.parts],
            }
            send_values(fabric, values, plan.behind)
        if fabric.rank not in plan.behind:
            return
        values = receive_values(fabric, plan.source)
        with torch.no_grad():
            for tensor, value in zip(tensors, values["model"], strict=True):
                tensor.detach().copy_(value)
        for part, saved in zip(worker.parts, values["optimizers"], strict=True):
            put_optimizer_values(part.optimizer, part.parameters, saved)
        source, stats = told[plan.source], self._stats()
        if self._fresh:
            worker.step = stats.steps = source.steps
            stats.syncs = source.syncs
        else:
            self._overtaken = True
            self._common, self._acted, worker.has_news = source.common, source.acted, source.news
