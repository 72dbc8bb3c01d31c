"""Consensus: temporarily or finally replace the local model by the mean over all workers."""

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
        iteration: Its iterations.
        tasks: Background tasks, which are paused while the workers wait for each other.
        shards: This worker's shards of the model. None: the model is not sharded.

    Attributes:
        followers: Follower modules, which are averaged together with the model.
        change_view: Begins the next view after a failure. None: a failure ends training.
        distance: Measures the distance between the models. None: no measurement.
        ended: True once the model is the final mean.
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
        self._versions: list[int] = []  # of the parameters after the last step

    def _retry(self, function: Callable[[], T]) -> T:
        """Call ``function``, and repeat it in the next view if a worker is lost."""
        while True:
            try:
                return function()
            except CommunicationError as error:
                if self.change_view is None or isinstance(error, EndedError):
                    raise
                self.change_view(error)

    # -- changes outside of a step ---------------------------------------------------------------

    def step_ended(self) -> None:
        """Note that the model has changed by a step."""
        self.ended = False
        self.note_parameters()

    def note_parameters(self) -> None:
        """Note the versions of the parameters, for ``check_parameters``."""
        self._worker.touched = False
        self._versions = self._worker.replica.versions()

    def check_parameters(self) -> None:
        """Set ``worker.touched`` if something has changed the parameters since the last step.

        Schedule-free optimizers change them in ``eval()`` and ``train()``. Such a change must be
        averaged like a step. A touched worker therefore keeps its weight while it waits for the
        others, and its change enters the mean.

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
        """Land everything in flight, in the next view if a worker is lost. A collective."""
        self._retry(self.settle)

    def settle(self) -> None:
        """Land everything in flight. A collective. Background tasks continue."""
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
        """Replace the mean by the local model again."""
        if self._shards is not None:
            self._shards.reshard()
        self._worker.replica.restore(local[0])
        self.followers.restore(local[1])
        self.note_parameters()

    def finish(self) -> None:
        """Replace the model by the mean of all workers, permanently. A collective."""
        try:
            self._retry(self._finish)
        except EndedError:
            if not self.ended:  # once ended, every worker has the final model and may leave
                raise
        self._tasks.finish()

    def _finish(self) -> None:
        worker, team, self.ended = self._worker, self._worker.team, False
        last = self._wait_for_all(finishing=True)
        while last.wait().finishing < team.size:
            # Other workers have entered consensus(): take part in it, then wait again.
            with team.account.paused():
                self.restore(self._show(last))
            last = self._wait_for_all(finishing=True)
        self._average(last, final=True)
        self.ended = True
        if self.change_view is not None:
            # No worker may leave before this barrier: a new view may still need it.
            worker.barrier("the end of training")
