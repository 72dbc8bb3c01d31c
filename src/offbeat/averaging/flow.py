"""A flow drives one strategy on one worker: it turns steps into rounds, means and landings.

The training loop reports what happens (gradients are ready, a step has ended), and the flow calls
the strategy and communicates. There is one flow for shared models, one for gradients, and each
baseline that is neither brings its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from offbeat.averaging.finite import NonFiniteCheck
from offbeat.averaging.rounds import Rounds
from offbeat.averaging.votes import Round
from offbeat.averaging.worker import AttachedOptimizer, Worker
from offbeat.strategies.base import Strategy


class Flow(ABC):
    """Drives one strategy on one worker.

    Args:
        strategy: The strategy.
        worker: This worker.

    Attributes:
        state: Everything that a checkpoint holds of the flow: a dataclass.
        decided: Number of rounds decided in this view.
        wants_buckets: True if ``bucket_ready`` should be called during backward.
        uses_gradients: True if the flow reads or changes gradients.
        needs_unscaled: True if gradients must be unscaled before the flow sees them.
        can_exclude: True if the flow supports ``non_finite="exclude"``.
        waits: True if all workers wait for each mean and take it over as a whole.
        replicates: True if all workers that step hold the same parameters between two steps.
        votes_between_steps: True if votes are cast after the optimizers' steps, not before.
    """

    state: Any
    wants_buckets = False
    uses_gradients = True
    needs_unscaled = True
    can_exclude = True
    waits = False
    replicates = False
    votes_between_steps = False

    def __init__(self, strategy: Strategy, worker: Worker) -> None:
        self.strategy, self.worker = strategy, worker
        self.decided = 0
        self.excluded = False  # this worker, in the round that is about to start
        self._pending: Round | None = None  # started and not decided
        self.check = NonFiniteCheck(worker.rank, worker.non_finite, can_exclude=self.can_exclude)
        self.rounds = Rounds(worker, self.check)

    # -- called by the training loop -------------------------------------------------------------

    @abstractmethod
    def start(self, common: dict[str, Any] | None = None) -> None:
        """Begin from a model that all workers hold.

        Called once by ``attach``; by a checkpoint of a consensus; and on a new flow in each view of
        an elastic training.

        Args:
            common: ``common_values()`` of the most advanced worker. None: training begins.
        """

    def keep_local(self, before: "Flow") -> None:  # noqa: B027
        """Take from the flow of the view before what belongs to this worker alone."""

    def common_values(self) -> dict[str, Any]:
        """What a new view needs and all workers have in common, as plain values for JSON."""
        return {}

    @property
    @abstractmethod
    def unsynced(self) -> bool:
        """True if this worker's model holds steps that no other worker has received."""

    def bucket_ready(self, bucket: int) -> bool:
        """Backward, still running, has completed a bucket of the only optimizer's gradients.

        Called in order, for all buckets but the last.

        Returns:
            True if further buckets of this step should be reported.
        """
        return False

    @abstractmethod
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        """The gradients of one optimizer are ready, and it has not stepped yet.

        Args:
            optimizer: The optimizer.
            last: True if it is the last one of this step.

        Returns:
            True if this synchronized the workers.
        """

    def optimizer_stepped(self, optimizer: AttachedOptimizer) -> None:  # noqa: B027
        """One optimizer has stepped. Its gradients still exist."""

    def step_skipped(self) -> None:  # noqa: B027
        """A GradScaler has skipped the steps of all optimizers, so the model has not changed.

        Called before ``step_ended``.
        """

    @abstractmethod
    def step_ended(self) -> bool:
        """All optimizers have stepped. Returns True if this synchronized the workers."""

    def wait_for_all(self, order: Sequence[int], *, finishing: bool) -> Round:
        """Vote in the others' rounds, without a step, until no worker steps any more.

        Args:
            order: Indices of the optimizers in the order of the last step.
            finishing: True inside ``finish``.

        Returns:
            The last round.
        """
        self.pause(finishing=finishing)
        while True:
            for optimizer in self.voters(order):
                round, self._pending = self._pending, None
                if round is None:
                    round = self.vote(optimizer, stepping=False, finishing=finishing)
                sums = round.wait()
                if sums.stepping == 0:
                    self.all_paused(round)
                    self.worker.record.clear()
                    self.worker.wire.discard_interval()
                    return round
                self.act(round)

    @abstractmethod
    def consensus(self, last: Round, *, final: bool) -> None:
        """Replace the model by the mean over all workers. Called after ``wait_for_all``.

        Args:
            last: The round that ``wait_for_all`` returned.
            final: True if training ends and all workers must hold the same model. Otherwise the
                caller puts this worker's own model back afterwards.
        """

    def before_save(self, barrier: Callable[[], object]) -> None:  # noqa: B027
        """Wait for what is in flight, so that ``state`` can be saved or replaced.

        Args:
            barrier: Waits until all workers are about to save.
        """

    def after_load(self) -> None:  # noqa: B027
        """``state`` was loaded from a checkpoint."""

    # -- rounds ----------------------------------------------------------------------------------

    def voters(self, order: Sequence[int]) -> Sequence[int]:
        """Indices of the optimizers that have a round of their own in each step."""
        return [0]

    def pause(self, *, finishing: bool) -> None:  # noqa: B027
        """This worker takes no step until all workers have stopped."""

    def all_paused(self, last: Round) -> None:  # noqa: B027
        """All workers have stopped."""

    @abstractmethod
    def vote(self, optimizer: int, *, stepping: bool, finishing: bool = False) -> Round:
        """Send this worker's vote and return the round in progress."""

    def act(self, round: Round) -> bool | None:
        """Decide a round and do what it says.

        Returns:
            True if this synchronized the workers; None if the round is still in progress.
        """
        if not self.can_decide(round):
            return None
        wire, details = self.worker.wire, self.worker.details
        # Before anything is launched: all launches of a round have the same precision.
        wire.apply_measurements(round.then(lambda sums: sums.measured))
        details.update(wire.details())
        synced = self.decide(round)
        self.decided += 1
        if synced and self.excluded:
            self.worker.forget_non_finite()
        if self.check.excluded:
            details["non_finite_excluded"] = self.check.excluded
        return synced

    def can_decide(self, round: Round) -> bool:
        """Whether the round can be decided now. May wait for its tally."""
        return True

    @abstractmethod
    def decide(self, round: Round) -> bool:
        """Ask the strategy and do what it says. Returns True if this synchronized the workers."""

    def look_for_non_finite(self, *, stepping: bool, optimizer: int = 0) -> bool:
        """Whether this worker's contribution to the coming round is finite; True if it has none.

        Sets ``excluded``. An excluded worker is restored at once, unless it is about to step.
        """
        worker = self.worker
        self.excluded = False
        if worker.size == 1 or not (stepping or self.unsynced):
            return True
        finite = self.finite(optimizer, stepping=stepping)
        if not finite:
            worker.details["non_finite"] = worker.details.get("non_finite", 0) + 1
            self.excluded = worker.excludes
            if self.excluded and (not stepping or self.votes_between_steps):
                self.restore()
        return finite

    def finite(self, optimizer: int, *, stepping: bool) -> bool:
        """Whether this worker's contribution to the coming round is finite, as far as is known."""
        return True

    def restore(self) -> None:  # noqa: B027
        """Replace this worker's model by the shared one, if the workers keep one."""
