"""One iteration after the other: which optimizer is at work, and when all of them have stepped.

Hooks on the user's own objects call ``prepare`` and ``complete``; what happens then is the
strategy's. An iteration is one step of every optimizer, in whatever order.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from offbeat.errors import AttachError, CommunicationError, OffbeatError
from offbeat.strategies.base import Part, Strategy, Worker
from offbeat.strategies.roll import Roll
from offbeat.training.backward import Backward
from offbeat.training.change import GradientChange
from offbeat.training.companion import Companions
from offbeat.training.finite import Finite
from offbeat.training.node import NodeBuffers
from offbeat.training.rounds import Rounds


class Guard:
    """Around all that communicates: what is interrupted there leaves the workers out of step.

    Entering it after that raises the CommunicationError again that an operation has raised; or, if
    something else came (a Ctrl-C that a notebook caught, say), an OffbeatError: this worker no
    longer knows which operation is everybody's next one.

    Where training goes on after a loss, an operation that failed leaves nobody out of step: all
    begin anew.

    Attributes:
        failure: What came out of it.
        continues: Whether training goes on after a loss.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.continues = False

    def leave(self, error: BaseException | None) -> None:
        """It is left with ``error``."""
        if error is not None and not (self.continues and isinstance(error, CommunicationError)):
            self.failure = error

    def refuse(self) -> None:
        """Raise on account of an earlier failure."""
        failure = self.failure
        if isinstance(failure, OffbeatError):
            raise failure
        raise OffbeatError(
            f"a synchronization was interrupted by {type(failure).__name__}, so this worker is out "
            "of step with the others: detach() and attach again, on all workers"
        ) from failure

    def __enter__(self) -> None:
        if self.failure is not None:
            self.refuse()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave(error)


class Recovery(Protocol):
    """What training does where it goes on after a loss."""

    def look(self) -> None:
        """Raise CommunicationError if another view is wanted."""

    def __call__(self, error: CommunicationError) -> bool:
        """End this view, and begin the next one, or raise.

        Returns whether the model is that of after the step at hand, which others have taken.
        """


class _AtWork:
    """The guard around a step, in which companions know that the strategy is at work."""

    def __init__(self, guard: Guard, companions: Companions) -> None:
        self._guard, self._companions = guard, companions

    def __enter__(self) -> None:
        if self._guard.failure is not None:
            self._guard.refuse()
        if self._companions.any:
            self._companions.busy(True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._guard.leave(error)
        if self._companions.any:
            self._companions.busy(False)


def _parameters_of(optimizer: Optimizer) -> list[list[Tensor]]:
    return [list(group["params"]) for group in optimizer.param_groups]


def _holds(optimizer: Optimizer, known: Sequence[Sequence[Tensor]]) -> bool:
    """Whether its groups hold the ``known`` parameters and no others. Asked in every step."""
    groups = optimizer.param_groups
    if len(groups) != len(known):
        return False
    for group, parameters in zip(groups, known, strict=True):
        held = group["params"]
        if len(held) != len(parameters) or not all(map(operator.is_, held, parameters)):
            return False
    return True


class Iteration:
    """Where one worker stands in its iteration.

    Args:
        strategy: What is called.
        worker: What it is called with.
        companions: Told when the strategy is at work.
        finite: Looks at what is contributed.
        completed: Called after each iteration with whether it synchronized.
        node: Averages the gradients inside the node; None: it has one worker.

    Attributes:
        active: Whether hooks do anything; false after the end.
        guard: Around all that communicates.
        recover: Begins the next view of the team after a failure; None: training ends with it.
        stepped: Called when all optimizers have stepped, before the strategy synchronizes.
        change: Told of the gradients, before the strategy changes them.
    """

    def __init__(
        self,
        strategy: Strategy,
        worker: Worker,
        companions: Companions,
        finite: Finite,
        completed: Callable[[bool], None],
        node: NodeBuffers | None = None,
    ) -> None:
        self.strategy, self._worker, self.node = strategy, worker, node
        self._completed = completed
        self.active = True
        self.guard = Guard()
        self.stepped: Callable[[], None] = lambda: None
        self.change: GradientChange | None = None
        self._at_work = _AtWork(self.guard, companions)
        self._host = worker.team.host
        self.recover: Recovery | None = None
        self._lost: CommunicationError | None = None  # what has failed during backward
        self._rounds = Rounds(strategy, worker, finite)
        self._prepared: set[int] = set()  # optimizers that are about to step
        self._stepped: set[int] = set()  # that have stepped in this iteration
        self._averaged: set[int] = set()  # whose gradients are the node's
        self._synced = False
        self._order: list[int] = []  # of the gradients in this iteration
        self._last_order = [part.index for part in worker.parts]  # in the one before
        self._groups = [_parameters_of(part.optimizer) for part in worker.parts]
        held = [p for groups in self._groups for group in groups for p in group]
        self._frozen = [p for p in held if not p.requires_grad]
        self._forbidden = ""
        alone = node is None  # else the strategy's gradients are not there before backward ends
        worker.overlaps_backward = worker.size > 1 and len(worker.parts) == 1 and alone
        self._backward: Backward | None = None

    def watch_backward(self) -> None:
        """Tell the strategy, or the node, of buckets while backward runs, if it wants to know.

        With several optimizers one backward may fill the gradients of another's parameters, and
        the order of the buckets would depend on autograd: not then.
        """
        wants = type(self.strategy).bucket_ready is not Strategy.bucket_ready
        part = self._worker.parts[0]
        wants = wants and self._worker.overlaps_backward
        if self.node is not None:
            wants = self.node.overlap
        if wants and len(part.buckets) > 1:
            self._backward = Backward(part, self._host, self._bucket_ready)

    def play_backward(self) -> None:
        """Do what the hooks do while backward runs, for a model without one; see ``Backward``."""
        if self._backward is not None:
            self._backward.play()

    def _bucket_ready(self, bucket: int) -> bool:
        if not self.active or self._lost is not None:
            return False
        with self.guard:
            part = self._worker.parts[0]
            if self.node is not None:
                return self.node.start(bucket)
            try:
                return self.strategy.bucket_ready(self._worker, part, bucket)
            except CommunicationError as error:
                if self.recover is None:
                    raise
                self._lost = error  # the model must stay as it is while backward runs
                return False

    # -- called by the hooks -----------------------------------------------------------------

    def index_of(self, optimizer: object) -> int | None:
        """The index of an attached optimizer; None for any other."""
        parts = self._worker.parts
        return next((part.index for part in parts if part.optimizer is optimizer), None)

    def awaits_step(self, index: int) -> bool:
        """Whether optimizer ``index`` was prepared and has not stepped since."""
        return index in self._prepared

    def average_inside(self, index: int) -> None:
        """The gradients of optimizer ``index`` become those of the node. Once a step.

        Called before a GradScaler unscales them, so that the whole node sees the same overflow.
        """
        if self.node is None or not self.active or index in self._averaged:
            return
        self.require_own_model("a training step")
        with self._at_work:
            self._gradients_are_there()
            self.node.average(index)
        self._averaged.add(index)

    def _gradients_are_there(self) -> None:
        """The step has been computed, if nothing of it was used before."""
        if not self._stepped and not self._prepared and not self._averaged:
            self._host.computed(1.0)

    def prepare(self, index: int, *, loss_scale: float = 1.0) -> None:
        """The gradients of optimizer ``index`` are ready, but for a ``loss_scale``. Once a step.

        Called by the hooks; ``clip_grad_norm_`` calls it earlier.
        """
        if not self.active or index in self._prepared:
            return
        self.require_own_model("a training step")
        worker = self._worker
        part = worker.parts[index]
        if not _holds(part.optimizer, self._groups[index]):
            raise AttachError(
                "parameters were added to the optimizer, taken away or replaced after attach(): "
                "detach() and attach again so that all workers agree on what is averaged"
            )
        if any(p.requires_grad for p in self._frozen):
            raise AttachError(
                "parameters that were frozen at attach() are not any more, and would not be "
                "averaged: detach() and attach again"
            )
        self.average_inside(index)
        with self._at_work:
            self._gradients_are_there()
            self._order.append(index)
            count = len(worker.parts)
            last = count == 1 or len({*self._stepped, *self._prepared, index}) == count
            if last:
                worker.step += 1
                worker.steps_since_sync += 1
            if self.change is not None:
                self.change.add(part, loss_scale)
                if last:
                    self.change.end()
            synced = self._synchronize(part, last=last)
            self._synced = self._synced or synced
            if self._backward is not None:
                self._backward.end_step()
        self._prepared.add(index)  # not before: a step after a failure must fail, too

    def _synchronize(self, part: Part, *, last: bool) -> bool:
        """What happens between gradients and step. Returns whether it synchronized."""
        while True:
            try:
                if self._lost is not None:
                    raise self._lost
                if self.recover is not None:
                    self.recover.look()
                self.strategy.gradients(self._worker, part)
                return self._rounds.at_gradients(part.index, last=last)
            except CommunicationError as error:
                if self.recover is None:
                    raise
                if self._overtaken(error, part, last=last):
                    return True

    def _overtaken(self, error: CommunicationError, part: Part, *, last: bool) -> bool:
        """Begin the next view before a step; whether it has brought this step along."""
        assert self.recover is not None
        worker = self._worker
        worker.step -= last  # what the view begins with knows nothing of it
        overtaken = self.recover(error)
        worker.step += last
        worker.steps_since_sync = int(last)
        if overtaken:
            for parameter in part.parameters:
                parameter.grad = None  # with which the optimizer does nothing
        return overtaken

    def complete(self, index: int, *, skipped: bool = False) -> None:
        """Optimizer ``index`` has stepped, or a GradScaler has ``skipped`` its step."""
        if not self.active:
            return
        worker = self._worker
        with self._at_work:
            if not skipped:
                self.strategy.stepped(worker, worker.parts[index])
            self._prepared.discard(index)
            self._averaged.discard(index)
            self._stepped.add(index)
            if len(self._stepped) < len(worker.parts):
                return
            self._stepped.clear()
            self._last_order, self._order = self._order, []
            worker.has_news = True
            worker.norm_squared = None
            self.stepped()
            try:
                synced = self._rounds.at_boundary() or self._synced
            except CommunicationError as error:
                if self.recover is None:
                    raise
                self.recover(error)
                synced = True
            self._synced = False
        self._completed(synced)

    # -- called by the synchronizer ----------------------------------------------------------

    def begin_view(self, finite: Finite) -> None:
        """The team has another view: rounds are counted from here, and nothing is under way."""
        self._rounds = Rounds(self.strategy, self._worker, finite)
        self._lost, self._host = None, self._worker.team.host
        if self._backward is not None:
            self._backward.close()
            self._backward = None
        self.watch_backward()

    @property
    def acted(self) -> int:
        """Rounds of this view that were acted on."""
        return self._rounds.acted

    @property
    def begun(self) -> bool:
        """Whether one optimizer has stepped, and others have not yet."""
        return bool(self._stepped)

    @property
    def shows_consensus(self) -> bool:
        """Whether the model is not this worker's own; see ``forbidden``."""
        return bool(self._forbidden)

    def require_boundary(self, what: str) -> None:
        """Raise AttachError between the first and the last step of an iteration's optimizers."""
        if self._stepped or self._prepared:
            raise AttachError(
                f"{what} in the middle of an iteration: call it after all optimizers have stepped, "
                "and before gradients are clipped or unscaled for the next step"
            )

    def meet(self, *, finishing: bool) -> Roll:
        """Take part in the others' rounds until nobody steps any more; see ``Rounds.meet``."""
        if self.node is not None:
            self.node.meet(self._last_order[0])
        return self._rounds.meet(self._last_order, finishing=finishing)

    @contextlib.contextmanager
    def forbidden(self, where: str) -> Iterator[None]:
        """Inside, the model is not this worker's own, and nothing may move it."""
        self._forbidden = where
        try:
            yield
        finally:
            self._forbidden = ""

    def require_own_model(self, what: str) -> None:
        """Raise AttachError inside ``forbidden``."""
        if self._forbidden:
            raise AttachError(
                f"{what} inside {self._forbidden}: there the model holds the mean of all workers "
                "for evaluation; leave the block first"
            )

    def close(self) -> None:
        """Do nothing from now on, and hold nobody who may hold this iteration."""
        self.active = False
        if self._backward is not None:
            self._backward.close()
            self._backward = None
        self.stepped, self._completed, self.recover = lambda: None, lambda synced: None, None
