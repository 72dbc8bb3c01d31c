"""Iterations of a training loop. One iteration is one step of every optimizer, in any order.

The hooks on the user's objects call ``prepare`` before an optimizer steps and ``complete`` after
it. ``Iteration`` finds out when all optimizers have stepped, and passes both events to the flow,
which runs the strategy.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from offbeat.averaging import AttachedOptimizer, Flow, Worker
from offbeat.averaging.votes import Round
from offbeat.errors import AttachError, CommunicationError
from offbeat.nodes.gradients import NodeBuffers
from offbeat.training.background import BackgroundTasks
from offbeat.training.backward_hooks import BackwardHooks
from offbeat.training.guard import Guard, StepGuard


class Recovery(Protocol):
    """Change of membership in elastic training. ``elastic.views.Views`` implements it."""

    def require_current_view(self) -> None:
        """Raise CommunicationError if another view is due, for example because a worker joins."""

    def __call__(self, error: CommunicationError) -> bool:
        """End this view and begin the next one, or raise.

        Returns:
            True if the model now contains the current step, because other workers have taken it.
        """


def _parameters_of(optimizer: Optimizer) -> list[list[Tensor]]:
    return [list(group["params"]) for group in optimizer.param_groups]


def _holds(optimizer: Optimizer, known: Sequence[Sequence[Tensor]]) -> bool:
    """Return True if the parameter groups hold exactly the ``known`` parameters."""
    groups = optimizer.param_groups
    if len(groups) != len(known):
        return False
    for group, parameters in zip(groups, known, strict=True):
        held = group["params"]
        if len(held) != len(parameters) or not all(map(operator.is_, held, parameters)):
            return False
    return True


class Iteration:
    """The current iteration of one worker.

    Args:
        flow: Runs the strategy.
        worker: This worker.
        tasks: Background tasks, which are notified when the worker may block.
        completed: Called after each iteration, with True if it synchronized the workers.
        node: Averages the gradients inside the node. None: the node has one worker.

    Attributes:
        active: False once training has ended; the hooks then do nothing.
        guard: Context around all communication.
        recover: Begins the next view after a failure. None: a failure ends training.
        gradient_monitors: Functions called with an optimizer, its loss scale, and True for the last
            optimizer of the step, when its gradients are ready and before the strategy changes
            them.
        model_monitors: Functions called after all optimizers have stepped and before the strategy
            synchronizes.
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
        self.model_monitors: list[Callable[[], None]] = []
        self.gradient_monitors: list[Callable[[AttachedOptimizer, float, bool], None]] = []
        self._step_guard = StepGuard(self.guard, tasks)
        self._host = worker.team.host
        self.recover: Recovery | None = None
        self._failure: CommunicationError | None = None  # raised during backward
        self._prepared: set[int] = set()  # optimizers that are about to step
        self._stepped: set[int] = set()  # optimizers that have stepped in this iteration
        self._averaged: set[int] = set()  # optimizers whose gradients are the node's mean
        self._synced = False
        self._skipped = True  # a GradScaler has skipped all steps of this iteration so far
        self._order: list[int] = []  # optimizers in the order of their gradients
        self._last_order = [each.index for each in worker.optimizers]
        self._groups = [_parameters_of(each.optimizer) for each in worker.optimizers]
        parameters = [p for groups in self._groups for group in groups for p in group]
        self._frozen = [p for p in parameters if not p.requires_grad]
        self._forbidden = ""  # name of the context in which the model may not change
        self._backward: BackwardHooks | None = None
        self.choose_overlap()

    def choose_overlap(self) -> None:
        """Set ``worker.overlaps_backward``: whether gradients may be averaged during backward.

        Called before a flow starts. In a node of several workers the answer is False, because the
        gradients that the strategy averages exist only after backward.
        """
        worker, alone = self._worker, self.node is None
        worker.overlaps_backward = worker.size > 1 and len(worker.optimizers) == 1 and alone

    def watch_backward(self) -> None:
        """Report buckets of gradients to the flow or the node during backward, if one wants them.

        Only with a single optimizer: with several, one backward pass may fill gradients of another
        optimizer, and autograd would determine the order of the buckets.
        """
        wants = self.flow.wants_buckets and self._worker.overlaps_backward
        if self.node is not None:
            wants = self.node.overlap
        optimizer = self._worker.optimizers[0]
        if wants and len(optimizer.buckets) > 1:
            self._backward = BackwardHooks(optimizer, self._host, self._bucket_ready)

    def report_buckets(self) -> None:
        """Report the buckets of one backward pass, for a model without autograd."""
        if self._backward is not None:
            self._backward.report_all()

    def _bucket_ready(self, bucket: int) -> bool:
        """Report a bucket. Returns True if further buckets of this step should be reported."""
        if not self.active or self._failure is not None:
            return False
        with self.guard:
            if self.node is not None:
                return self.node.start(bucket)
            try:
                return self.flow.bucket_ready(bucket)
            except CommunicationError as error:
                if self.recover is None:
                    raise
                # Recovery replaces the model, which must not change while backward runs.
                self._failure = error
                return False

    # -- called by the hooks -----------------------------------------------------------------

    def index_of(self, optimizer: object) -> int | None:
        """Return the index of an attached optimizer, or None for any other object."""
        attached = self._worker.optimizers
        return next((each.index for each in attached if each.optimizer is optimizer), None)

    def is_prepared(self, index: int) -> bool:
        """Return True if optimizer ``index`` was prepared and has not stepped since."""
        return index in self._prepared

    def average_in_node(self, index: int) -> None:
        """Replace the gradients of optimizer ``index`` by their mean over the node, once per step.

        Called before a GradScaler unscales them, so that all workers of a node detect the same
        overflow.
        """
        if self.node is None or not self.active or index in self._averaged:
            return
        self.require_own_model("a training step")
        with self._step_guard:
            self._count_computing()
            self.node.average(index)
        self._averaged.add(index)

    def _count_computing(self) -> None:
        """Let virtual time pass for the computation of this step, at its first gradients."""
        if not self._stepped and not self._prepared and not self._averaged:
            self._host.computed(1.0)

    def prepare(self, index: int, *, loss_scale: float = 1.0) -> None:
        """Pass the gradients of optimizer ``index`` to the flow. Further calls do nothing.

        The hooks call it before the optimizer steps; ``clip_grad_norm_`` calls it before clipping.

        Args:
            index: Index of the optimizer.
            loss_scale: Factor by which a GradScaler has scaled the gradients.

        Raises:
            AttachError: the optimizer's parameters have changed since ``attach``.
        """
        if not self.active or index in self._prepared:
            return
        if self._forbidden:
            self.require_own_model("a training step")
        worker = self._worker
        optimizer = worker.optimizers[index]
        if not _holds(optimizer.optimizer, self._groups[index]):
            raise AttachError(
                "parameters were added to the optimizer, removed or replaced after attach(): "
                "detach() and attach again so that all workers agree on what is averaged"
            )
        if self._frozen and any(p.requires_grad for p in self._frozen):
            raise AttachError(
                "parameters that were frozen at attach() no longer are, and would not be averaged: "
                "detach() and attach again"
            )
        if self.node is not None:
            self.average_in_node(index)
        with self._step_guard:
            self._count_computing()
            self._order.append(index)
            count = len(worker.optimizers)
            last = count == 1 or len({*self._stepped, *self._prepared, index}) == count
            if last:
                worker.step += 1
            for monitor in self.gradient_monitors:
                monitor(optimizer, loss_scale, last)
            synced = self._gradients_ready(optimizer, last=last)
            self._synced = self._synced or synced
            if self._backward is not None:
                self._backward.end_step()
        self._prepared.add(index)  # last, so that a call after a failure fails again

    def _gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        while True:
            try:
                if self._failure is not None:
                    raise self._failure
                if self.recover is not None:
                    self.recover.require_current_view()
                return self.flow.gradients_ready(optimizer, last=last)
            except CommunicationError as error:
                if self.recover is None:
                    raise
                if self._recover_before_step(error, optimizer, last=last):
                    return True

    def _recover_before_step(
        self, error: CommunicationError, optimizer: AttachedOptimizer, *, last: bool
    ) -> bool:
        """Begin the next view. Returns True if its model already contains the current step."""
        assert self.recover is not None
        worker = self._worker
        worker.step -= last  # the view begins before this step
        contains_step = self.recover(error)
        worker.step += last
        if contains_step:
            for parameter in optimizer.parameters:
                parameter.grad = None  # the optimizer then skips the parameter
        return contains_step

    def complete(self, index: int, *, skipped: bool = False) -> None:
        """Report a step of optimizer ``index`` to the flow, and the iteration if it was the last.

        Args:
            index: Index of the optimizer.
            skipped: True if a GradScaler skipped the step. The step still counts.
        """
        if not self.active:
            return
        worker = self._worker
        with self._step_guard:
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
            for monitor in self.model_monitors:
                monitor()
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
        """Use ``flow`` from now on, after a change of membership."""
        self.flow = flow
        self._failure, self._host = None, self._worker.team.host
        if self._backward is not None:
            self._backward.close()
            self._backward = None
        self.watch_backward()

    @property
    def begun(self) -> bool:
        """True if some optimizers have stepped in this iteration and others have not."""
        return bool(self._stepped)

    @property
    def shows_consensus(self) -> bool:
        """True while the model is the consensus and not the local model; see ``forbidden``."""
        return bool(self._forbidden)

    def require_boundary(self, what: str) -> None:
        """Raise AttachError in the middle of an iteration, when some optimizers have stepped."""
        if self._stepped or self._prepared:
            raise AttachError(
                f"{what} in the middle of an iteration: call it after all optimizers have stepped, "
                "and before gradients are clipped or unscaled for the next step"
            )

    def wait_for_all(self, *, finishing: bool) -> Round:
        """Vote in the rounds of the others until no worker steps; see ``Flow.wait_for_all``."""
        if self.node is not None:
            self.node.pause(self._last_order[0])
        return self.flow.wait_for_all(self._last_order, finishing=finishing)

    @contextlib.contextmanager
    def forbidden(self, where: str) -> Iterator[None]:
        """Return a context in which the model is the consensus and no step may change it."""
        self._forbidden = where
        try:
            yield
        finally:
            self._forbidden = ""

    def require_own_model(self, what: str) -> None:
        """Raise AttachError inside ``forbidden``, where the model is not the local one."""
        if self._forbidden:
            raise AttachError(
                f"{what} inside {self._forbidden}: there the model holds the mean of all workers "
                "for evaluation; leave the block first"
            )

    def close(self) -> None:
        """Ignore all further calls, and drop references that would keep the model alive."""
        self.active = False
        if self._backward is not None:
            self._backward.close()
            self._backward = None
        self.model_monitors, self.gradient_monitors = [], []
        self._completed, self.recover = lambda synced: None, None
