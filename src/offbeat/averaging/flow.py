"""The flow: the code that drives one strategy through the training steps of one worker.

The training loop reports events: gradients are ready, or a step has ended. The flow then calls the
strategy and communicates with the other workers. ``RoundAverager`` and ``ClockedAverager`` average
models, ``GradientFlow`` averages gradients. A strategy that declares a ``CustomFlow`` supplies its
own subclass of ``Flow``.

Every worker must start the same collectives in the same order. Therefore a worker that waits at a
barrier still takes part in the rounds of the workers that take steps (``wait_for_all``).

``offbeat.strategies.base`` explains the terms.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from offbeat.averaging.rounds import Rounds, WaitingWarning
from offbeat.averaging.votes import Round
from offbeat.averaging.worker import AttachedOptimizer, Worker
from offbeat.errors import CommunicationError
from offbeat.strategies.base import Strategy


class Flow(ABC):
    """Drives one strategy on one worker.

    Args:
        strategy: The strategy.
        worker: This worker.

    Attributes:
        state: State of the flow that a checkpoint contains: a dataclass.
        syncs: Number of rounds of this generation that synchronized this worker.
        rounds: Makes, sends and numbers this worker's votes.
        can_save: True if ``state`` can be saved and loaded.
        waits: True if all workers wait for each mean, and their local models become equal to it.
        replicates: True if every step averages the gradients, so that all workers that step have
            the same parameters. ``gradients_ready`` is then called at the end of each backward
            pass, also before a GradScaler unscales the gradients.
        measures: True if ``measure`` is called. Not used with ``replicates``.
    """

    state: Any
    can_save = True
    waits = False
    replicates = False
    measures = False

    def __init__(self, strategy: Strategy, worker: Worker) -> None:
        self.strategy, self.worker = strategy, worker
        self.syncs = 0
        self._pending: Round | None = None  # started and not decided
        self.rounds = Rounds(worker)

    # -- a generation begins ---------------------------------------------------------------------

    @abstractmethod
    def start(self) -> None:
        """Initialize the state when a generation begins. All workers have the same model.

        The caller may then overwrite fields of ``state``. A checkpoint supplies all fields. After a
        membership change, the most advanced worker supplies the fields marked ``common()``, and
        this worker's flow of the previous generation supplies those marked ``local()``.
        """

    # -- events of the training loop -------------------------------------------------------------

    @property
    @abstractmethod
    def unsynced(self) -> bool:
        """True if this model may contain changes that the other workers lack."""

    @property
    def lr_factor(self) -> float:
        """``WorkerView.lr_factor``, or 1 if the strategy averages gradients."""
        return 1.0

    def backward_buckets(self, optimizer: AttachedOptimizer) -> Sequence[Sequence[Tensor]]:
        """Return the buckets that ``bucket_ready`` should receive. Empty: no calls."""
        return []

    def bucket_ready(self, bucket: int) -> None:  # noqa: B027
        """Handle a bucket of gradients that is complete while backward still runs.

        Called for the buckets in order, but not for the last bucket.

        Args:
            bucket: Index of the bucket in ``backward_buckets``.
        """

    def measure(self, optimizer: AttachedOptimizer) -> None:  # noqa: B027
        """Measure the gradients of one optimizer at the end of backward, before they are clipped.

        Called after each backward pass. In the last call of a step the gradients are complete.
        """

    @abstractmethod
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        """Handle the gradients of one optimizer, before the optimizer steps.

        Called once for each optimizer in each step. With ``replicates`` it is called at the end of
        each backward pass instead, and again if the training loop then replaces the gradients.

        Args:
            optimizer: The optimizer.
            last: True if this is the last optimizer of the step, in the first call for it.

        Returns:
            True if this call synchronized the workers, for example averaged their gradients.
        """

    def step_skipped(self) -> None:  # noqa: B027
        """Handle a step that all optimizers skipped. Called before ``step_ended``."""

    @abstractmethod
    def step_ended(self) -> bool:
        """Handle the end of a step. Returns True if this call synchronized the workers."""

    # -- barrier, consensus, checkpoints ---------------------------------------------------------

    def wait_for_all(self) -> Round:
        """Wait at a barrier: vote without stepping until all workers have reached the barrier.

        Returns the last round, in which no worker steps.
        """
        finishing = self.worker.call == "finish()"
        self.enter_barrier(finishing=finishing)
        warning = None if finishing else WaitingWarning(self.worker)
        while True:
            round, self._pending = self._pending, None
            if round is None:
                round = self.vote(0, stepping=False)
            sums = round.wait()
            if sums.stepping == 0:
                self.leave_barrier(round)
                self.worker.record.clear()
                return round
            if warning is not None:
                warning(sums)
            self.act(round)

    def enter_barrier(self, *, finishing: bool) -> None:  # noqa: B027
        """Prepare for a barrier. This worker takes no step until the barrier ends. May block.

        ``finishing`` is True if this worker has called ``Synchronizer.finish``.
        """

    def leave_barrier(self, last: Round) -> None:  # noqa: B027
        """Handle the end of the barrier. No worker steps in ``last``, the round that ended it."""

    @abstractmethod
    def consensus(self, last: Round, *, final: bool) -> None:
        """Make the model equal on all workers, usually the mean. Called after ``wait_for_all``.

        Args:
            last: The round that ``wait_for_all`` returned.
            final: True if training ends and all workers must hold the same model. False: the caller
                restores this worker's local model afterwards.
        """

    def snapshot(self) -> list[Tensor]:
        """Return copies, in host memory, of the tensors that an evaluation needs from this worker.

        Sends nothing and does not change the training. The tensors are those of
        ``Replica.snapshot``. The mean of the parameters over the workers is the evaluated model.
        """
        return self.worker.replica.snapshot("cpu")

    def before_save(self) -> None:  # noqa: B027
        """Wait for all operations in flight, so that ``state`` can be saved or replaced.

        Called after ``wait_for_all``.
        """

    def after_load(self) -> None:  # noqa: B027
        """Continue from ``state`` after it was loaded from a checkpoint."""

    # -- rounds ----------------------------------------------------------------------------------

    @abstractmethod
    def vote(self, optimizer: int, *, stepping: bool) -> Round:
        """Send this worker's vote, and return the round. The summed votes may arrive later.

        Args:
            optimizer: Index of the optimizer that takes a step in the round.
            stepping: True if this worker takes a step in the round.
        """

    def act(self, round: Round) -> bool:
        """Decide a round and carry out the decision. Returns True if it synchronized workers."""
        try:
            synced = self.decide(round)
        except CommunicationError:
            round.wait()  # raises the MismatchError if another worker left because of one
            raise
        self.syncs += synced
        return synced

    @abstractmethod
    def decide(self, round: Round) -> bool:
        """Decide the round and carry out the decision. Returns True if it synchronized workers."""

    # -- non-finite values -----------------------------------------------------------------------

    def check_finite(self, *, stepping: bool, optimizer: int = 0) -> bool:
        """Return ``is_finite`` of the contribution to the coming round, and count failures.

        Returns True without a check if there is a single worker or nothing to contribute.
        """
        worker = self.worker
        if worker.size == 1 or not (stepping or self.unsynced):
            return True
        finite = self.is_finite(optimizer, stepping=stepping)
        if not finite:
            worker.details["non_finite"] = worker.details.get("non_finite", 0) + 1
        return finite

    def is_finite(self, optimizer: int, *, stepping: bool) -> bool:
        """Return False if this worker's contribution is known to contain NaN or infinity.

        The arguments are those of ``vote``. A subclass overrides this method. Its ``vote`` calls
        ``check_finite``, which calls this method.
        """
        return True
