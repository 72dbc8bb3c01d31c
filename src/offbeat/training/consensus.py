"""Consensus: temporarily or finally replace the local model by the mean over all workers."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from offbeat.averaging import Worker
from offbeat.averaging.votes import Round
from offbeat.errors import AttachError, CommunicationError
from offbeat.nodes.shards import Shards
from offbeat.training.agreement import copy_rank_0
from offbeat.training.background import BackgroundTasks
from offbeat.training.followers import Followers
from offbeat.training.iteration import Iteration
from offbeat.training.monitors import Distance
from offbeat.transport.membership import EndedError

T = TypeVar("T")
Snapshot = tuple[list[Tensor], list[Tensor]]
"""A worker's own model and its own follower modules."""


class Consensus:
    """Swaps the local model for the mean over all workers, and back.

    Args:
        worker: This worker.
        iteration: Its iterations.
        tasks: Background tasks, paused during a consensus.
        shards: The shards that this worker holds of the model, if ``fully_shard`` has divided it.

    Attributes:
        followers: Modules that are averaged together with the model.
        change_view: Continues training after the loss of a worker. None: a loss ends it.
        distance: Measures the distance between the models, if it was asked for.
        ended: True once the model is the final one.
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
        self.followers = Followers(worker.team)
        self.change_view: Callable[[CommunicationError], object] | None = None
        self.distance: Distance | None = None
        self.ended = False
        self._versions: list[int] = []  # of the parameters after the last step

    def _surely(self, function: Callable[[], T]) -> T:
        """Call ``function``, and again in the next view if a worker is lost meanwhile."""
        while True:
            try:
                return function()
            except CommunicationError as error:
                if self.change_view is None or isinstance(error, EndedError):
                    raise
                self.change_view(error)

    # -- changes outside of a step ---------------------------------------------------------------

    def step_ended(self) -> None:
        """A step has ended."""
        self.ended = False
        self.note_parameters()

    def note_parameters(self) -> None:
        """Note the versions of the parameters."""
        self._worker.touched = False
        self._versions = self._worker.replica.versions()

    def check_parameters(self) -> None:
        """Find out whether something changed the parameters since the last step.

        Schedule-free optimizers do so. Such a change must be averaged like a step. The worker then
        keeps its weight while it waits for the others: all of them may change their models in this
        way, and each change counts as its share of the mean.

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
        """Wait for everything in flight, and again in the next view if a worker is lost."""
        self._surely(self.settle)

    def settle(self) -> None:
        """Wait for everything in flight. Only the strategy takes part."""
        flow = self._iteration.flow
        flow.before_save(lambda: self._iteration.wait_for_all(finishing=False))

    def show(self) -> Snapshot:
        """Replace the model by the mean; returns what ``restore`` takes. A collective."""
        return self._surely(lambda: self._show(self._wait_for_all(finishing=False)))

    def _show(self, last: Round) -> Snapshot:
        own = self._worker.replica.snapshot(), self.followers.snapshot()
        try:
            self._average(last, final=False)
        except BaseException:
            self.restore(own)
            raise
        return own

    def _average(self, last: Round, *, final: bool) -> None:
        self._iteration.flow.consensus(last, final=final)
        copy_rank_0(self._worker.team, self._worker.replica.other_buffers())
        self.followers.average(final=final)

    def restore(self, own: Snapshot) -> None:
        """Put this worker's own model back."""
        if self._shards is not None:
            self._shards.reshard()
        self._worker.replica.restore(own[0])
        self.followers.restore(own[1])
        self.note_parameters()

    def finish(self) -> None:
        """Replace the model by the mean of all workers, permanently. A collective."""
        try:
            self._surely(self._finish)
        except EndedError:
            if not self.ended:  # otherwise the others have seen that all workers reached the end
                raise
        self._tasks.finish()

    def _finish(self) -> None:
        worker, team, self.ended = self._worker, self._worker.team, False
        last = self._wait_for_all(finishing=True)
        while last.wait().finishing < team.size:  # others are in consensus(): take part, then wait
            with team.account.paused():
                self.restore(self._show(last))
            last = self._wait_for_all(finishing=True)
        self._average(last, final=True)
        self.ended = True
        if (
            self.change_view is not None
        ):  # a worker that leaves now is not missed by one that restarts
            worker.barrier("the end of training")
