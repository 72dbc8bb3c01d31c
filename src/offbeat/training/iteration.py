"""One iteration after the other: which optimizers have stepped, and when all of them have.

Hooks on the user's objects call ``prepare`` and ``complete``; the flow does the rest. An iteration
is one step of every optimizer, in any order.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from offbeat.averaging import AttachedOptimizer, Flow, Worker
from offbeat.averaging.votes import Round
from offbeat.errors import AttachError, CommunicationError, OffbeatError
from offbeat.nodes.gradients import NodeBuffers
from offbeat.training.background import BackgroundTasks
from offbeat.training.backward import Backward


class Guard:
    """Context around all communication. An interruption there leaves the workers out of step.

    Entering it again afterwards raises: the CommunicationError that an operation has raised; or,
    after another interruption (such as a Ctrl-C that a notebook caught), an OffbeatError, because
    this worker no longer knows which operation the others start next.

    In an elastic training a failed operation does not end it: all workers begin a new view.

    Attributes:
        failure: The exception that left the context.
        elastic: True if training continues after a CommunicationError.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.elastic = False

    def leave(self, error: BaseException | None) -> None:
        """The context was left with ``error``."""
        if error is not None and not (self.elastic and isinstance(error, CommunicationError)):
            self.failure = error

    def refuse(self) -> None:
        """Raise because of an earlier failure."""
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
    """Changes of membership in an elastic training."""

    def require_current_view(self) -> None:
        """Raise CommunicationError if the workers want another view."""

    def __call__(self, error: CommunicationError) -> bool:
        """End this view and begin the next one, or raise.

        Returns:
            True if the model is now the one after the current step, which other workers have taken.
        """


class _GuardedStep:
    """The guard around a step. It also tells background tasks that the worker may block."""

    def __init__(self, guard: Guard, tasks: BackgroundTasks) -> None:
        self._guard, self._tasks = guard, tasks

    def __enter__(self) -> None:
        if self._guard.failure is not None:
            self._guard.refuse()
        if self._tasks.any:
            self._tasks.set_blocking(True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._guard.leave(error)
        if self._tasks.any:
            self._tasks.set_blocking(False)


def _parameters_of(optimizer: Optimizer) -> list[list[Tensor]]:
    return [list(group["params"]) for group in optimizer.param_groups]


def _holds(optimizer: Optimizer, known: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the parameter groups hold the ``known`` parameters and no others."""
    groups = optimizer.param_groups
    if len(groups) != len(known):
        return False
    for group, parameters in zip(groups, known, strict=True):
        held = group["params"]
        if len(held) != len(parameters) or not all(map(operator.is_, held, parameters)):
            return False
    return True


class Iteration:
    """Where one worker stands in its current iteration.

    Args:
        flow: Drives the strategy.
        worker: This worker.
        tasks: Background tasks, told when the worker may block.
        completed: Called after each iteration, with True if it synchronized the workers.
        node: Averages the gradients inside the node. None: the node has one worker.

    Attributes:
        active: False once training has ended; the hooks then do nothing.
        guard: Context around all communication.
        recover: Begins the next view after a failure. None: a failure ends training.
        watches_gradients: Called with an optimizer and its loss scale when its gradients are ready,
            before the strategy changes them.
        measures: Called when all optimizers have stepped, before the strategy synchronizes.
    """

    def __init__(
        self,
        flow: Flow,
        worker: Worker,
        tasks: BackgroundTasks,
        completed: Callable[[bool], None],
        node: NodeBuffers | None = None,
    ) -> None:
        self.flow, self._worker, self.node = flow, worker, node
        self._completed = completed
        self.active = True
        self.guard = Guard()
        self.measures: list[Callable[[], None]] = []
        self.watches_gradients: list[Callable[[AttachedOptimizer, float, bool], None]] = []
        self._guarded_step = _GuardedStep(self.guard, tasks)
        self._host = worker.team.host
        self.recover: Recovery | None = None
        self._lost: CommunicationError | None = None  # a failure during backward
        self._prepared: set[int] = set()  # optimizers that are about to step
        self._stepped: set[int] = set()  # optimizers that have stepped in this iteration
        self._averaged: set[int] = set()  # optimizers whose gradients are the node's mean
        self._synced = False
        self._skipped = True  # a GradScaler has skipped all steps of this iteration so far
        self._order: list[int] = []  # optimizers in the order of their gradients
        self._last_order = [one.index for one in worker.optimizers]
        self._groups = [_parameters_of(one.optimizer) for one in worker.optimizers]
        held = [p for groups in self._groups for group in groups for p in group]
        self._frozen = [p for p in held if not p.requires_grad]
        self._forbidden = ""
        self._backward: Backward | None = None
        self.choose_overlap()

    def choose_overlap(self) -> None:
        """Decide whether gradients may be averaged during backward, before a flow starts.

        Not inside a node, where the strategy's gradients exist only after backward.
        """
        worker, alone = self._worker, self.node is None
        worker.overlaps_backward = worker.size > 1 and len(worker.optimizers) == 1 and alone

    def watch_backward(self) -> None:
        """Report buckets to the flow, or to the node, while backward runs, if either wants them.

        Not with several optimizers: one backward pass may fill the gradients of another optimizer,
        and the order of the buckets would depend on autograd.
        """
        wants = self.flow.wants_buckets and self._worker.overlaps_backward
        if self.node is not None:
            wants = self.node.overlap
        optimizer = self._worker.optimizers[0]
        if wants and len(optimizer.buckets) > 1:
            self._backward = Backward(optimizer, self._host, self._bucket_ready)

    def play_backward(self) -> None:
        """Do what the hooks do while backward runs, for a model without one; see ``Backward``."""
        if self._backward is not None:
            self._backward.play()

    def _bucket_ready(self, bucket: int) -> bool:
        if not self.active or self._lost is not None:
            return False
        with self.guard:
            if self.node is not None:
                return self.node.start(bucket)
            try:
                return self.flow.bucket_ready(bucket)
            except CommunicationError as error:
                if self.recover is None:
                    raise
                self._lost = error  # the model must not change while backward runs
                return False

    # -- called by the hooks -----------------------------------------------------------------

    def index_of(self, optimizer: object) -> int | None:
        """Index of an attached optimizer; None for any other."""
        attached = self._worker.optimizers
        return next((one.index for one in attached if one.optimizer is optimizer), None)

    def awaits_step(self, index: int) -> bool:
        """Whether optimizer ``index`` was prepared and has not stepped since."""
        return index in self._prepared

    def average_inside(self, index: int) -> None:
        """Replace the gradients of optimizer ``index`` by the node's mean, once a step.

        Called before a GradScaler unscales them, so that the whole node sees the same overflow.
        """
        if self.node is None or not self.active or index in self._averaged:
            return
        self.require_own_model("a training step")
        with self._guarded_step:
            self._count_computing()
            self.node.average(index)
        self._averaged.add(index)

    def _count_computing(self) -> None:
        """Report that this step is computed, when its first gradients are used."""
        if not self._stepped and not self._prepared and not self._averaged:
            self._host.computed(1.0)

    def prepare(self, index: int, *, loss_scale: float = 1.0) -> None:
        """The gradients of optimizer ``index`` are ready. Acts once a step.

        Called by the hooks, and earlier by ``clip_grad_norm_``.

        Args:
            index: Which optimizer.
            loss_scale: Factor by which a GradScaler still scales the gradients.
        """
        if not self.active or index in self._prepared:
            return
        self.require_own_model("a training step")
        worker = self._worker
        optimizer = worker.optimizers[index]
        if not _holds(optimizer.optimizer, self._groups[index]):
            raise AttachError(
                "parameters were added to the optimizer, removed or replaced after attach(): "
                "detach() and attach again so that all workers agree on what is averaged"
            )
        if any(p.requires_grad for p in self._frozen):
            raise AttachError(
                "parameters that were frozen at attach() no longer are, and would not be averaged: "
                "detach() and attach again"
            )
        self.average_inside(index)
        with self._guarded_step:
            self._count_computing()
            self._order.append(index)
            count = len(worker.optimizers)
            last = count == 1 or len({*self._stepped, *self._prepared, index}) == count
            if last:
                worker.step += 1
            for watch in self.watches_gradients:
                watch(optimizer, loss_scale, last)
            synced = self._gradients_ready(optimizer, last=last)
            self._synced = self._synced or synced
            if self._backward is not None:
                self._backward.end_step()
        self._prepared.add(index)  # only now: after a failure the next call must fail, too

    def _gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        while True:
            try:
                if self._lost is not None:
                    raise self._lost
                if self.recover is not None:
                    self.recover.require_current_view()
                return self.flow.gradients_ready(optimizer, last=last)
            except CommunicationError as error:
                if self.recover is None:
                    raise
                if self._overtaken(error, optimizer, last=last):
                    return True

    def _overtaken(
        self, error: CommunicationError, optimizer: AttachedOptimizer, *, last: bool
    ) -> bool:
        """Begin the next view before a step. Returns True if its model contains this step."""
        assert self.recover is not None
        worker = self._worker
        worker.step -= last  # the view begins before this step
        overtaken = self.recover(error)
        worker.step += last
        if overtaken:
            for parameter in optimizer.parameters:
                parameter.grad = None  # so that the optimizer does nothing
        return overtaken

    def complete(self, index: int, *, skipped: bool = False) -> None:
        """Optimizer ``index`` has stepped.

        Args:
            index: Which optimizer.
            skipped: True if a GradScaler has skipped the step. It counts as an iteration.
        """
        if not self.active:
            return
        worker = self._worker
        with self._guarded_step:
            if not skipped:
                self._skipped = False
                self.flow.optimizer_stepped(worker.optimizers[index])
            self._prepared.discard(index)
            self._averaged.discard(index)
            self._stepped.add(index)
            if len(self._stepped) < len(worker.optimizers):
                return
            self._stepped.clear()
            self._last_order, self._order = self._order, []
            worker.norm_squared = None
            if self._skipped:
                self.flow.step_skipped()
            self._skipped = True
            for measure in self.measures:
                measure()
            try:
                synced = self.flow.step_ended() or self._synced
            except CommunicationError as error:
                if self.recover is None:
                    raise
                self.recover(error)
                synced = True
            self._synced = False
        self._completed(synced)

    # -- called by the synchronizer ----------------------------------------------------------

    def begin_view(self, flow: Flow) -> None:
        """The team has another composition, and ``flow`` drives the strategy from now on."""
        self.flow = flow
        self._lost, self._host = None, self._worker.team.host
        if self._backward is not None:
            self._backward.close()
            self._backward = None
        self.watch_backward()

    @property
    def begun(self) -> bool:
        """True if one optimizer has stepped and others have not yet."""
        return bool(self._stepped)

    @property
    def shows_consensus(self) -> bool:
        """True while the model is not this worker's own; see ``forbidden``."""
        return bool(self._forbidden)

    def require_boundary(self, what: str) -> None:
        """Raise AttachError between the first and the last optimizer step of an iteration."""
        if self._stepped or self._prepared:
            raise AttachError(
                f"{what} in the middle of an iteration: call it after all optimizers have stepped, "
                "and before gradients are clipped or unscaled for the next step"
            )

    def wait_for_all(self, *, finishing: bool) -> Round:
        """Vote in the others' rounds until no worker steps any more; see ``Flow.wait_for_all``."""
        if self.node is not None:
            self.node.pause(self._last_order[0])
        return self.flow.wait_for_all(self._last_order, finishing=finishing)

    @contextlib.contextmanager
    def forbidden(self, where: str) -> Iterator[None]:
        """Context in which the model is not this worker's own, and nothing may change it."""
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
        """Do nothing from now on, and hold no reference to objects that may hold this one."""
        self.active = False
        if self._backward is not None:
            self._backward.close()
            self._backward = None
        self.measures, self.watches_gradients = [], []
        self._completed, self.recover = lambda synced: None, None
