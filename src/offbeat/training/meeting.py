"""Where all workers come together: to look at the mean of their models, and at the end."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from offbeat.errors import AttachError, CommunicationError
from offbeat.fabric.membership import EndedError
from offbeat.strategies.base import Roll, Strategy, Worker
from offbeat.training.agreement import copy_rank_0
from offbeat.training.beside import Beside
from offbeat.training.companion import Companions
from offbeat.training.distance import Distance
from offbeat.training.iteration import Iteration
from offbeat.training.shards import Shards
from offbeat.training.views import Views

T = TypeVar("T")
Own = tuple[list[Tensor], list[Tensor]]
"""A worker's own model, and its own modules that go along."""


class Meeting:
    """Its own model against everybody's.

    Attributes:
        views: Who goes on after a loss; None: nobody.
        distance: What measures the distance between the models meanwhile, if anything does.
        ends: Whether the model is the final one.

    Args:
        strategy: Which strategy.
        worker: Of this worker.
        iteration: Its steps.
        companions: What accompanies the training, and is away in a meeting.
        beside: Modules that are averaged, too.
        shards: How the model is divided inside its node, if it is.
    """

    def __init__(
        self,
        strategy: Strategy,
        worker: Worker,
        iteration: Iteration,
        companions: Companions,
        beside: Beside,
        shards: Shards | None,
    ) -> None:
        self._strategy, self._worker, self._iteration = strategy, worker, iteration
        self._companions, self._beside, self._shards = companions, beside, shards
        self.views: Views | None = None
        self.distance: Distance | None = None
        self.ends = False
        self._common: object = None  # what the parameters were when all had the same

    def _surely(self, function: Callable[[], T]) -> T:
        """Call ``function``, again in the next view if a worker is lost meanwhile."""
        while True:
            try:
                return function()
            except CommunicationError as error:
                if self.views is None or isinstance(error, EndedError):
                    raise
                self.views(error)

    # -- what a step leaves ----------------------------------------------------------------------

    def stepped(self) -> None:
        """A step has ended."""
        self.ends = False
        self.note_common()

    def note_common(self) -> None:
        """Note the parameters, if this worker has nothing that the others have not."""
        worker = self._worker
        worker.touched = False
        self._common = None if worker.has_news else worker.replica.versions()

    def look_at_parameters(self) -> None:
        """What was changed between two steps, as by schedule-free optimizers, is news, too.

        Raises:
            AttachError: a parameter of the model was replaced by another one.
        """
        worker = self._worker
        replaced = worker.replica.replaced()
        if replaced:
            raise AttachError(
                f"parameter {replaced[0]!r} of the model was replaced after attach(), so that it "
                "is synchronized no more: detach() and attach again"
            )
        worker.touched = self._common is not None and self._common != worker.replica.versions()
        worker.has_news = worker.has_news or worker.touched

    # -- the meeting -----------------------------------------------------------------------------

    def _meet(self, *, finishing: bool) -> Roll:
        """Take part in the others' rounds with weight 0 until nobody steps any more."""
        self._companions.away()
        if self._shards is not None:
            self._shards.gather_no_more()
        roll = self._iteration.meet(finishing=finishing)
        if self.distance is not None:
            self.distance.meet()
        self._companions.back()
        return roll

    def before_save(self) -> None:
        """Let what is under way come to rest; nothing but the strategy takes part."""
        self._strategy.before_save(self._worker, lambda: self._iteration.meet(finishing=False))

    def surely_before_save(self) -> None:
        """Likewise, again in the next view if a worker is lost meanwhile."""
        self._surely(self.before_save)

    def consensus(self) -> Own:
        """Put the mean of all models into this one; returns what ``restore`` takes."""
        return self._surely(lambda: self._take(self._meet(finishing=False)))

    def _take(self, roll: Roll) -> Own:
        worker = self._worker
        own = worker.replica.snapshot(), self._beside.snapshot()
        steps, news = worker.steps_since_sync, worker.has_news
        try:
            self._average(roll, final=False)
        except BaseException:
            self.restore(own)
            raise
        worker.steps_since_sync, worker.has_news = steps, news
        return own

    def _average(self, roll: Roll, *, final: bool) -> None:
        self._strategy.consensus(self._worker, roll, final=final)
        copy_rank_0(self._worker.team, self._worker.replica.other_buffers())
        self._beside.average(final=final)

    def restore(self, own: Own) -> None:
        """The own model again."""
        if self._shards is not None:
            self._shards.gather_no_more()
        self._worker.replica.restore(own[0])
        self._beside.restore(own[1])
        self.note_common()

    def finish(self) -> None:
        """The model becomes that of all, for good."""
        try:
            self._surely(self._come_to_the_end)
        except EndedError:
            if not self.ends:  # else the others have seen that all have come to the end
                raise
        self._companions.leave()

    def _come_to_the_end(self) -> None:
        worker, team, self.ends = self._worker, self._worker.team, False
        roll = self._meet(finishing=True)
        while roll.finishing < team.size:  # the others are in consensus(): help, and wait on
            with team.account.paused():
                self.restore(self._take(roll))
            roll = self._meet(finishing=True)
        self._average(roll, final=True)
        self.ends = True
        if self.views is not None:  # who leaves now is not missed by one that has to begin again
            worker.barrier("the end of training")
