"""The contract of a strategy: when a round is due, what a worker contributes, what comes of it.

A strategy is a frozen set of hyper-parameters and these methods, which the front door calls:

    start(worker)         once; returns the mutable state, kept in ``worker.state``
    due(worker)           whether the step at hand ends with a round
    vote(worker, part)    what this worker contributes to the decision of the round
    act(worker, round)    what to do with the outcome; by default x ← mean(x)

A round is run alike on workers that step and on workers that do not (they have finished, or look at
the consensus, while others still step): the front door calls ``vote`` and ``act`` on all of them,
so a worker that is out of data takes part without a line of the strategy's.

The *moments* are for algorithms that do more than rounds: ``gradients``, ``bucket_ready``,
``stepped``, ``iterated``, ``meet``, ``catch_up``, ``consensus``, ``before_save``, ``after_load``.
By default nothing happens at them.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from offbeat.arguments import check_settings, setting
from offbeat.checkpoint import transient
from offbeat.fabric import Handle
from offbeat.fabric.wire import Precision
from offbeat.strategies.roll import Ballot, Roll, Round, Vote
from offbeat.strategies.worker import Part, Worker

__all__ = [
    "Averages",
    "Ballot",
    "Handle",
    "NonFinite",
    "Part",
    "Roll",
    "Round",
    "Rounds",
    "Strategy",
    "Vote",
    "Worker",
    "setting",
    "transient",
]

Averages = Literal["models", "gradients", "updates", "pushes", "nothing"]
Rounds = Literal["gradients", "step", "boundary"]
NonFinite = Literal["warn", "raise", "leave_out"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Strategy(ABC):
    """When workers synchronize, and whether anyone waits."""

    name: ClassVar[str] = ""
    """Of the text form, for the strategies of this package; others go by module and class."""

    averages: ClassVar[Averages] = "models"
    """What travels over the wire: whole models (``worker.average``), gradients, updates, or what is
    pushed to a parameter server and pulled from it.

    "nothing" refuses a lossy ``wire`` and is for strategies that exchange in a way of their own.
    """

    @property
    def default_wire(self) -> Precision:
        """The ``wire`` of ``attach`` where none is given."""
        return "float32"

    @property
    def chooses(self) -> bool:
        """Whether with ``wire="auto"`` it says itself how exactly each sum travels."""
        return False

    adapts: ClassVar[bool] = False
    """Whether ``wire="auto"`` may change the precision between two rounds, by what is waited.

    It may where every sum over the wire is started in ``call``, ``act`` or ``bucket_ready``, and
    those of one stream one after the other.
    """

    rounds: ClassVar[Rounds] = "step"
    """When a round begins and ends.

    "gradients": once for each optimizer, between its gradients and its step.
    "step": it begins when all gradients are there, so that the roll travels while the optimizers
    step, and ends after the step.
    "boundary": it begins after the step, and may end at a later one.
    """

    needs_unscaled: ClassVar[bool] = True
    """Whether ``gradients`` must see them after a GradScaler has unscaled them."""

    meets: ClassVar[bool] = True
    """Whether a step is either local or a synchronization of all workers, so that LSSR is defined.

    Where what others have done comes in at any time, no step is either.
    """

    @property
    def repeatable(self) -> bool:
        """Whether the same gradients give the same models, however long messages take.

        By default where every round ends in the step that has begun it, and nothing is pushed.
        """
        return self.rounds != "boundary" and self.averages != "pushes"

    @property
    def keeps_nodes(self) -> bool:
        """Whether the workers of a node get the same models, whatever arrives when at which one.

        Else ``attach(..., node_group=…)`` refuses it. By default it does if it is ``repeatable``;
        one that is not may agree inside the node on what has arrived: ``worker.team.agree``.
        """
        return self.repeatable

    divides: ClassVar[bool] = False
    """Whether it cuts the model into parts by how much of it a worker holds.

    Then the workers of a node cannot hold a part each, as they do under ``fully_shard``.
    """

    averages_state: ClassVar[bool] = False
    """Whether ``optimizer_state="average"`` applies: all wait while models are averaged."""

    continues: ClassVar[bool] = False
    """Whether training may go on without a worker that is lost, and with one that joins.

    Then ``start`` may be called again at any ``worker.step``, and with another number of workers;
    see ``attach(..., on_failure="continue")``.
    """

    replicates: ClassVar[bool] = False
    """Whether all workers that have stepped hold the same parameters and optimizer state between
    two rounds, so that those of one worker are those of all."""

    non_finite: ClassVar[tuple[NonFinite, ...]] = ("warn", "raise")
    """What ``attach(..., non_finite=…)`` may ask for.

    "leave_out" is for those in whose rounds weight 0 leaves a worker out, which then takes the mean
    of the others; or that can ``restore`` it to what all hold in common.
    """

    def __post_init__(self) -> None:
        check_settings(self)

    # -- rounds ----------------------------------------------------------------------------------

    def start(self, worker: Worker) -> Any:
        """Prepare; all workers hold the same model. Returns the mutable state, a dataclass.

        Called again when training begins anew from a consensus: before the first step, from a
        checkpoint; or, if the strategy ``continues``, at any ``worker.step``, of which only later
        steps count. ``worker.state`` is then what was returned before, or None on a newcomer.
        """
        return None

    def kept(self, worker: Worker) -> dict[str, Any]:
        """What stays in the next view of the team, alike on all workers: plain values for JSON.

        For counters and choices that all have in common; those of one worker are taken by all.
        """
        return {}

    def reunite(
        self,
        worker: Worker,
        kept: Sequence[dict[str, Any] | None],
        mean: Callable[[], None],
    ) -> None:
        """A view begins: make one model of those of its workers; by default ``mean()``.

        A collective, in which all that is under way is over. Nothing may be written before all has
        arrived; it may be called again if it fails.

        Args:
            worker: This worker.
            kept: Of each rank what it has kept; None of those that contribute nothing.
            mean: x ← mean(x) over those that do.
        """
        mean()

    def take_up(self, worker: Worker, kept: dict[str, Any]) -> None:  # noqa: B027
        """Go on from what was ``kept``; ``start`` has been called."""

    @abstractmethod
    def due(self, worker: Worker) -> bool:
        """Whether the step at hand ends with a round; the same on all workers that step.

        Asked for each optimizer with ``rounds="gradients"``; with "boundary" while no round is
        under way.
        """

    def vote(self, worker: Worker, part: int, *, stepping: bool, finishing: bool) -> Vote:
        """What this worker contributes to the decision of a round. Called once a round.

        Args:
            worker: This worker.
            part: Index of the optimizer with ``rounds="gradients"``, else 0.
            stepping: Whether it takes a step in this round.
            finishing: Whether it is inside ``finish``.
        """
        return Vote()

    def finite(self, worker: Worker, part: int, *, stepping: bool) -> bool:
        """Whether what this worker contributes to the round is finite, as far as is known by now.

        Asked just before ``vote``, of a worker that has something to contribute. By default of the
        gradients, of the model after steps whose gradients were not looked at, or of both.
        """
        if self.rounds == "gradients":
            return not stepping or worker.finite_gradients([worker.parts[part]])
        if self.rounds == "step" and stepping:
            alone = worker.steps_since_sync > 1  # the model was everyone's before this step
            return worker.finite_gradients(worker.parts) and (not alone or worker.finite_model())
        return worker.finite_model()

    def restore(self, worker: Worker) -> None:  # noqa: B027
        """This worker is left out: put its model back to what all workers hold in common.

        For those whose workers keep that. Called before the vote of a round in which it takes no
        step, or whose ``rounds`` are "boundary"; others take the next mean whole.
        """

    @staticmethod
    def nobody(roll: Roll) -> bool:
        """Whether all that a round is about were left out of it, if any was."""
        return roll.weight == 0

    def call(self, worker: Worker, part: int, ballot: Ballot) -> Handle[Roll]:
        """Send the ballot. For algorithms that let it ride on something else that they send."""
        return worker.call(ballot)

    def act(self, worker: Worker, round: Round) -> bool | None:
        """Do what the round has decided; by default x ← mean(x).

        Not called where nobody steps any more. What all workers must agree on changes here, or it
        is computed from what they have in common.

        Returns:
            Whether this iteration synchronized; None with ``rounds="boundary"``: it is not decided
            yet, ask again after the next step.
        """
        worker.average(round.wait())
        return True

    # -- moments ---------------------------------------------------------------------------------

    def gradients(self, worker: Worker, part: Part) -> None:  # noqa: B027
        """The gradients of one optimizer are ready; it has not stepped yet."""

    def bucket_ready(self, worker: Worker, part: Part, bucket: int) -> bool:
        """Backward, still running, has completed the gradients of ``part.buckets[bucket]``.

        Called in order, on training with one optimizer, for all buckets but the last, which
        ``gradients`` announces.

        Returns:
            Whether to be told of further ones.
        """
        return False

    def stepped(self, worker: Worker, part: Part) -> None:  # noqa: B027
        """One optimizer has stepped; its gradients are still there."""

    def iterated(self, worker: Worker) -> bool:
        """All optimizers have stepped, and no round has been acted on yet.

        Returns:
            Whether this iteration synchronized by what happened here.
        """
        return False

    def meet(self, worker: Worker, *, finishing: bool) -> None:  # noqa: B027
        """This worker stops stepping until all have come. For those whose workers do not meet."""

    def catch_up(self, worker: Worker, roll: Roll) -> None:  # noqa: B027
        """All have come: put right what this worker has missed, and may not miss later on."""

    def consensus(self, worker: Worker, roll: Roll, *, final: bool) -> None:
        """All have come: put the mean of all models into the model.

        Args:
            worker: This worker.
            roll: The last one, in which nobody stepped.
            final: Training is over: settle what is in flight, and leave all models equal. Else the
                front door puts the worker's own model back afterwards.
        """
        worker.average_all(roll.own.weight, roll.weight, final=final)

    def before_save(self, worker: Worker, meet: Callable[[], object]) -> None:  # noqa: B027
        """The state is about to be saved, or replaced: let what is in flight arrive.

        ``meet`` waits until all workers are about to save.
        """

    def after_load(self, worker: Worker) -> None:  # noqa: B027
        """The state was loaded."""

    # -- text ------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        """The constructor call with the settings that differ from the defaults."""
        shown = ", ".join(f"{k}={v!r}" for k, v in self._settings().items())
        return f"{type(self).__name__}({shown})"

    def __str__(self) -> str:
        """The short text form that ``parse_strategy`` reads, such as ``local:period=8``."""
        shown = ",".join(f"{k}={_as_text(v)}" for k, v in self._settings().items())
        name = self.name or f"{type(self).__module__}:{type(self).__qualname__}"
        return f"{name}:{shown}" if shown else name

    def _settings(self) -> dict[str, Any]:
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


def _as_text(value: object) -> str:
    """A setting as ``parse_strategy`` reads it: a tuple as ``a/b/c``, of one number as ``a/``."""
    if not isinstance(value, tuple):
        return str(value)
    return "/".join(map(str, value)) + ("/" if len(value) == 1 else "")
