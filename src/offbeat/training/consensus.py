"""Consensus: replace the local model by the mean over all workers.

The replacement is temporary (for an evaluation) or permanent (at the end of training).
"""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from offbeat.averaging import Worker
from offbeat.averaging.votes import Round
from offbeat.errors import AttachError, CommunicationError
from offbeat.nodes.shards import Shards
from offbeat.training.background import BackgroundTasks
from offbeat.training.consistency import copy_rank_0
from offbeat.training.follower_modules import FollowerModules
from offbeat.training.iteration import Iteration
from offbeat.training.monitors import Distance
from offbeat.transport.membership import EndedError

T = TypeVar("T")
Snapshot = tuple[list[Tensor], list[Tensor]]
"""Values of the local model and of the local follower modules."""


class Consensus:
    """Swaps the local model for the mean over all workers, and back.

    Args:
        worker: This worker.
        iteration: Iterations of this worker.
        tasks: Background tasks. They are notified before and after the barrier of a consensus.
        shards: This worker's shards of the model. None: the model is not sharded.

    Attributes:
        followers: Follower modules, such as an EMA of the weights: modules that the workers
            average only in a consensus.
        change_view: Function that receives a CommunicationError and begins the next view, a new
            composition of the workers. None: a failure ends training.
        distance: Measurement of the distance between the workers' models. None: no measurement.
        ended: True if the model of this worker is the final mean. Set before the last barrier, so
            other workers may not have the final mean yet.
    """

    def __init__(
        self,
        worker: Worker,
        iteration: Iteration,
        tasks: BackgroundTasks,
        shards: Shards | None,
    ) -> None:
        self._worker, self._iteration = worker, iteration
        self._tasks, self._shards = tasks, shards
        self.followers = FollowerModules(worker.team)
        self.change_view: Callable[[CommunicationError], object] | None = None
        self.distance: Distance | None = None
        self.ended = False
        self._versions: list[int] = []  # version counters of the parameters, see note_parameters

    def _retry(self, function: Callable[[], T]) -> T:
        """Call ``function``. If a worker is lost, call it again in the next view."""
        while True:
            try:
                return function()
            except CommunicationError as error:
                if self.change_view is None or isinstance(error, EndedError):
                    raise
                self.change_view(error)

    # -- changes outside of a step ---------------------------------------------------------------

    def step_ended(self) -> None:
        """Handle the end of a step, after which the model is not the final mean."""
        self.ended = False
        self.note_parameters()

    def note_parameters(self) -> None:
        """Store the version counters of the parameters, for ``check_parameters``.

        Called after ``attach``, a step, a consensus, and the loading of a checkpoint.
        """
        self._worker.touched = False
        self._versions = self._worker.replica.versions()

    def check_parameters(self) -> None:
        """Set ``worker.touched``: True if the parameters changed since ``note_parameters``.

        Schedule-free optimizers change them between steps, in ``eval()`` and ``train()``. The mean
        must contain such a change, as it contains a step. A worker that takes no step has weight 0
        in a round once all its steps are in the shared model; if ``touched`` is set, it keeps its
        weight.

        Raises:
            AttachError: a parameter of the model was replaced by another one.
        """
        worker = self._worker
        replaced = worker.replica.replaced()
        if replaced:
            raise AttachError(
                f"parameter {replaced[0]!r} of the model was replaced after attach(), so it is no "
                "longer synchronized: detach() and attach again"
            )
        worker.touched = self._versions != worker.replica.versions()

    # -- consensus -------------------------------------------------------------------------------

    def _wait_for_all(self, *, finishing: bool) -> Round:
        self._tasks.pause()
        if self._shards is not None:
            self._shards.reshard()
        last = self._iteration.wait_for_all(finishing=finishing)
        if self.distance is not None:
            self.distance.pause()
        self._tasks.resume()
        return last

    def before_save(self) -> None:
        """Call ``settle``. If a worker is lost, call it again in the next view. A collective."""
        self._retry(self.settle)

    def settle(self) -> None:
        """Complete all operations in flight, so that the flow's state can be saved or replaced.

        A collective. Background tasks are not notified.
        """
        flow = self._iteration.flow
        flow.before_save(lambda: self._iteration.wait_for_all(finishing=False))

    def show(self) -> Snapshot:
        """Replace the model by the mean. A collective.

        Returns:
            The local model, for ``restore``.
        """
        return self._retry(lambda: self._show(self._wait_for_all(finishing=False)))

    def _show(self, last: Round) -> Snapshot:
        local = self._worker.replica.snapshot(), self.followers.snapshot()
        try:
            self._average(last, final=False)
        except BaseException:
            self.restore(local)
            raise
        return local

    def _average(self, last: Round, *, final: bool) -> None:
        self._iteration.flow.consensus(last, final=final)
        copy_rank_0(self._worker.team, self._worker.replica.other_buffers())
        self.followers.average(final=final)

    def restore(self, local: Snapshot) -> None:
        """Replace the mean by ``local``, the result of ``show``."""
        if self._shards is not None:
            self._shards.reshard()
        self._worker.replica.restore(local[0])
        self.followers.restore(local[1])
        self.note_parameters()

    def finish(self) -> None:
        """Replace the model by the mean over all workers, permanently. A collective."""
        try:
            self._retry(self._finish)
        except EndedError:
            # The other workers have finished. If `ended` is set, this worker has the final mean
            # too, and only its last barrier has failed.
            if not self.ended:
                raise
        self._tasks.finish()

    def _finish(self) -> None:
        worker, team, self.ended = self._worker, self._worker.team, False
        last = self._wait_for_all(finishing=True)
        while last.wait().finishing < team.size:
            # Some workers have entered consensus() instead: take part in it, then wait again.
            with team.account.paused():
                self.restore(self._show(last))
            last = self._wait_for_all(finishing=True)
        self._average(last, final=True)
        self.ended = True
        if self.change_view is not None:
            # No worker may leave before all have the final mean: if one is lost before, the others
            # repeat the mean in a new view.
            worker.barrier("the end of training")
