"""Consensus: replace the local model by the mean over all workers.

The replacement is temporary (for an evaluation) or permanent (at the end of training). It begins
with a *barrier*: all workers wait for each other. *Follower modules*, such as a moving average
(EMA) of the weights, are averaged in a consensus only.

``offbeat.strategies.base`` explains the terms.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor, nn

from offbeat.averaging import Replica, Worker
from offbeat.averaging.exact_mean import ExactMean
from offbeat.averaging.votes import Round
from offbeat.errors import AttachError, CheckpointError, CommunicationError, EndedError
from offbeat.nodes.shards import Shards
from offbeat.training.checks.compatibility import require_usable
from offbeat.training.checks.consistency import copy_rank_0, require_consistency
from offbeat.training.checks.progress import Progress
from offbeat.training.iteration import Iteration
from offbeat.training.monitors import Distance
from offbeat.transport.team import Team

logger = logging.getLogger("offbeat")
T = TypeVar("T")
Snapshot = tuple[list[Tensor], list[Tensor]]
"""Values of the local model and of the local follower modules."""


class FollowerModules:
    """The follower modules of an attached model.

    All workers start from rank 0's values. Each worker then updates its own modules. A consensus
    averages all parameters, also frozen ones, with equal weights. Buffers are combined as in the
    model.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._modules: list[nn.Module] = []
        self._use([])

    def _use(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(modules)
        container = nn.ModuleList(modules)
        self._replica = Replica(container, container.parameters())
        self._mean = ExactMean(self._team, self._replica)

    def check(self, model: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Raise TypeError or AttachError if ``modules`` cannot be added. Sends nothing.

        They must not share tensors with ``model`` or with follower modules that were added before,
        and it must be possible to write their tensors in place. They may share tensors with each
        other; a shared tensor is averaged once.
        """
        if not all(isinstance(m, nn.Module) for m in modules):
            raise TypeError(f"follow() takes modules, got {modules!r}")
        known = (model, *self._modules)
        known_tensors = {id(t) for m in known for t in (*m.parameters(), *m.buffers())}
        for module in modules:
            require_usable(module)
            if not known_tensors.isdisjoint(map(id, (*module.parameters(), *module.buffers()))):
                raise AttachError(
                    f"the follower {type(module).__name__} shares tensors with the model, which is "
                    "averaged already: give only modules with tensors of their own"
                )

    def add(self, modules: Sequence[nn.Module]) -> None:
        """Add ``modules`` and copy rank 0's values of them to all workers. A collective.

        Raises MismatchError if another worker gave different modules.
        """
        container = nn.ModuleList(modules)
        new = Replica(container, container.parameters())
        require_consistency(self._team.everyone, [f"follower {line}" for line in new.describe()])
        copy_rank_0(self._team, new.everything())
        self._use([*self._modules, *modules])

    def average(self, *, final: bool) -> None:
        """Replace the modules by their mean over the workers. A collective.

        With ``final`` the mean is permanent. Otherwise the caller must hold a snapshot, because a
        failure may leave some tensors averaged.
        """
        size = self._team.size
        if size == 1 or not self._replica.everything():
            return
        what = f"{'final mean' if final else 'consensus'} of the followers"
        self._mean.consensus(1.0, size, final=final, what=what)
        copy_rank_0(self._team, self._replica.other_buffers())

    def snapshot(self) -> list[Tensor]:
        """Return a copy of all tensors of the modules."""
        return self._replica.snapshot()

    def restore(self, snapshot: Sequence[Tensor]) -> None:
        """Write the values of ``snapshot`` back into the modules."""
        self._replica.restore(snapshot)


class Consensus:
    """Swaps the local model for the mean over all workers, and back.

    Attributes:
        followers: The follower modules.
        change_view: Called with a CommunicationError to begin the next view. None: the training is
            not elastic, and the error ends it.
        distance: Measurement of the distance between the workers' models. None: no measurement.
        complete: False if a worker took part in the last consensus from ``finish``.
        ended: True if the model of this worker is the final mean. Other workers may not have the
            final mean yet.
    """

    def __init__(
        self,
        worker: Worker,
        iteration: Iteration,
        shards: Shards | None,
    ) -> None:
        self._worker, self._iteration, self._shards = worker, iteration, shards
        self._progress = Progress(worker, iteration.flow.strategy)
        self.followers = FollowerModules(worker.team)
        self.change_view: Callable[[CommunicationError], object] | None = None
        self.distance: Distance | None = None
        self.ended = False
        self.complete = True
        self._versions: list[int] = []  # see note_parameters

    def _retry(self, function: Callable[[], T]) -> T:
        """Call ``function``. In elastic training call it again in the next view after a failure."""
        while True:
            try:
                return function()
            except CommunicationError as error:
                if self.change_view is None or isinstance(error, EndedError):
                    raise
                self.change_view(error)

    # -- changes outside of a step ---------------------------------------------------------------

    def step_ended(self) -> None:
        """Handle the end of a training step."""
        self.ended = False
        self.note_parameters()

    def note_start(self) -> None:
        """Handle a model from which training starts or continues, equal on all workers."""
        self._iteration.loaded = False
        self._progress.note_start()
        self.note_parameters()

    def note_parameters(self) -> None:
        """Store the parameters' version counters, which torch increments at each write."""
        self._worker.touched = False
        self._versions = self._worker.replica.versions()

    def check_parameters(self, what: str, *, finishing: bool = False) -> None:
        """Set ``worker.touched``: True if the parameters changed since ``note_parameters``.

        For example, schedule-free optimizers change the parameters in ``eval()`` and ``train()``.
        A worker without new steps usually has weight 0 in the mean. With ``touched`` it has its
        full weight, so that the mean contains the change.

        Raises:
            AttachError: a parameter of the model was replaced by another one. Or
                ``load_state_dict`` has changed the model. If ``finishing``, this only causes a
                warning, because the final mean replaces the model. ``what`` names the caller.
        """
        self._require_own_parameters()
        try:
            self._iteration.require_known(what)
        except AttachError as error:
            if not finishing:
                raise
            logger.warning("%s", error)
        self._worker.touched = self._versions != self._worker.replica.versions()

    def _require_own_parameters(self) -> None:
        replaced = self._worker.replica.replaced()
        if replaced:
            raise AttachError(
                f"parameter {replaced[0]!r} of the model was replaced after attach(), so it is no "
                "longer synchronized: detach() and attach again"
            )

    # -- consensus -------------------------------------------------------------------------------

    def _wait_for_all(self, *, finishing: bool) -> Round:
        """Wait at a barrier until no worker takes a step. Returns the last round."""
        if self._shards is not None:
            self._shards.reshard()
        last = self._iteration.wait_for_all(finishing=finishing)
        if self.distance is not None:
            self.distance.pause()
        return last

    def before_save(self) -> None:
        """Call ``complete_operations``. In elastic training call it again after a failure."""
        self._retry(self.complete_operations)

    def complete_operations(self) -> None:
        """Wait for all operations of the strategy, so that its state can be saved. A collective."""
        flow = self._iteration.flow
        flow.before_save(lambda: self._iteration.wait_for_all(finishing=False))

    def replace_by_mean(self) -> Snapshot:
        """Replace model and follower modules by their mean over all workers. A collective. Blocks.

        Returns the local values, for ``restore``.
        """
        self._progress.called = True
        return self._retry(lambda: self._show(self._wait_for_all(finishing=False)))

    def _show(self, last: Round, *, finishing: bool = False) -> Snapshot:
        self._progress.compare(last.wait(), finishing=finishing)
        self.complete = not last.wait().finishing
        local = self._worker.replica.snapshot(), self.followers.snapshot()
        try:
            self._average(last, final=False)
        except BaseException:
            self.restore(local)
            raise
        return local

    def require_complete(self, what: str) -> None:
        """Raise CheckpointError in a consensus in which a worker takes part from ``finish``.

        Such a worker does not take part in further collectives, like that of the caller ``what``.
        """
        if self._iteration.shows_consensus and not self.complete:
            raise CheckpointError(
                f"{what} inside consensus(): another worker has called finish() and takes part in "
                "the consensus alone. The earlier checkpoints remain. Save before the first worker "
                "ends, or catch this error"
            )

    def _average(self, last: Round, *, final: bool) -> None:
        self._iteration.flow.consensus(last, final=final)
        copy_rank_0(self._worker.team, self._worker.replica.other_buffers())
        self.followers.average(final=final)

    def restore(self, local: Snapshot) -> None:
        """Replace the mean by ``local``, the result of ``replace_by_mean``."""
        if self._shards is not None:
            self._shards.reshard()
        self._worker.replica.restore(local[0])
        self.followers.restore(local[1])
        self.note_parameters()

    def finish(self) -> None:
        """Replace the model by the mean permanently. A collective."""
        self._progress.warn_if_not_counted()
        try:
            self._retry(self._finish)
        except EndedError:
            # The other workers have finished. If `ended` is set, this worker has the final mean
            # too, and only its last barrier has failed.
            if not self.ended:
                raise

    def _finish(self) -> None:
        team, self.ended = self._worker.team, False
        last = self._wait_for_all(finishing=True)
        while last.wait().finishing < team.size:
            # Some workers have entered consensus() instead: take part in it, then wait again.
            with team.account.paused():
                self.restore(self._show(last, finishing=True))
            last = self._wait_for_all(finishing=True)
        self._average(last, final=True)
        self.ended = True
        # No worker may leave before all have the final mean. If a worker is lost before that, the
        # others of an elastic training compute the mean again in a new view.
        lost = () if self.change_view is not None else (CommunicationError,)
        with contextlib.suppress(*lost), team.account.paused():
            self._progress.compare_final()
