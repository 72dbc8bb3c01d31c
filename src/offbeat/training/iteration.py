"""Iterations of a training loop. One iteration is one step of every optimizer, in any order.

Hooks on the user's optimizers call ``prepare`` before and ``complete`` after each optimizer step.
``Iteration`` passes these events to the *flow*, the code that runs the strategy.

``offbeat.strategies.base`` explains the terms.
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
from offbeat.training.backward_hooks import BackwardHooks
from offbeat.training.guard import Guard


class Recovery(Protocol):
    """Begins the next view in elastic training. ``elastic.views.Views`` implements it."""

    def require_current_view(self) -> None:
        """Raise CommunicationError if a new view must begin, e.g. because a worker asks to join."""

    def __call__(self, error: CommunicationError) -> bool:
        """End this view because of ``error`` and begin the next one, or raise.

        Returns True if another worker had made more progress and has sent its model to this worker.
        The local gradients then belong to the old model, so the current step must be skipped.
        """


def _holds(optimizer: Optimizer, known: Sequence[Sequence[Tensor]]) -> bool:
    """Return True if the optimizer's parameter groups hold exactly the ``known`` parameters."""
    groups = optimizer.param_groups
    if len(groups) != len(known):
        return False
    for group, parameters in zip(groups, known, strict=True):
        held = group["params"]
        if len(held) != len(parameters) or not all(map(operator.is_, held, parameters)):
            return False
    return True


class Iteration:
    """Tracks the current iteration of one worker.

    Args:
        flow: Runs the strategy.
        worker: This worker.
        completed: Called after each iteration, with True if the workers synchronized in it.
        node: Averages inside the node. None: this worker is a node by itself.

    Attributes:
        active: False once training has ended. The hooks then do nothing.
        guard: Context around communication. It raises if it is entered after a failure.
        accept_loaded: Called before each step, with the name of the caller; see
            ``LoadDetection.accept``.
        recover: Begins the next view after a failure. None: a failure ends training.
    """

    def __init__(
        self,
        flow: Flow,
        worker: Worker,
        completed: Callable[[bool], None],
        node: NodeBuffers | None = None,
    ) -> None:
        self.flow, self._worker, self.node = flow, worker, node
        self._completed = completed
        self.accept_loaded: Callable[[str], None] = lambda what: None
        self.active = True
        self.guard = Guard()
        self._host = worker.team.host
        self.recover: Recovery | None = None
        self._failure: CommunicationError | None = None  # raised during backward, handled later
        # Indices of optimizers in this iteration:
        self._prepared: set[int] = set()  # prepared, but not complete yet
        self._stepped: set[int] = set()  # complete: stepped, or skipped their step
        self._averaged: set[int] = set()  # averaged in the node, but not complete yet
        self._order: list[int] = []  # in the order of their ``prepare``
        self._synced = False  # True if the workers synchronized before a step of this iteration
        self._skipped = True  # False once an optimizer has really stepped in this iteration
        self._last_order = [each.index for each in worker.optimizers]
        self._groups: list[list[list[Tensor]]] = [
            [list(group["params"]) for group in each.optimizer.param_groups]
            for each in worker.optimizers
        ]
        parameters = [p for groups in self._groups for group in groups for p in group]
        self._frozen = [p for p in parameters if not p.requires_grad]
        self._forbidden = ""  # inside ``forbid_steps``: its argument, e.g. "consensus()"
        self._backward: BackwardHooks | None = None
        self.choose_overlap()

    def choose_overlap(self) -> None:
        """Set ``worker.overlaps_backward``: True if the flow may average gradients during backward.

        False with one worker. False in a node: the flow averages the node's mean gradients, which
        exist only after backward. False with several optimizers, see ``watch_backward``.
        """
        worker, alone = self._worker, self.node is None
        worker.overlaps_backward = worker.size > 1 and len(worker.optimizers) == 1 and alone

    def watch_backward(self) -> None:
        """Install hooks that report complete buckets to the node or the flow during backward.

        With a single bucket there are no hooks, because the last bucket is not reported. With
        several optimizers there are none either. Backward might complete the buckets of different
        optimizers in a different order on each worker, but all workers must send in the same order.
        """
        optimizer = self._worker.optimizers[0]
        buckets: Sequence[Sequence[Tensor]] = []
        if self.node is not None:
            buckets = optimizer.buckets if self.node.overlap else []
        elif self._worker.overlaps_backward:
            buckets = self.flow.backward_buckets(optimizer)
        if len(buckets) > 1:
            self._backward = BackwardHooks(buckets, self._host, self._bucket_ready)

    def _bucket_ready(self, bucket: int) -> bool:
        """Pass a bucket to the node or the flow. Returns False to receive no further bucket."""
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
                # The next view replaces the model, which must not change during backward. So the
                # next view begins later, in ``prepare``.
                self._failure = error
                return False

    # -- called by the hooks -----------------------------------------------------------------

    def index_of(self, optimizer: object) -> int | None:
        """Return the index of an attached optimizer, or None for any other object."""
        attached = self._worker.optimizers
        return next((each.index for each in attached if each.optimizer is optimizer), None)

    def is_prepared(self, index: int) -> bool:
        """Return True between ``prepare`` and ``complete`` of optimizer ``index``."""
        return index in self._prepared

    def average_in_node(self, index: int) -> None:
        """Average inside the node, once per step of optimizer ``index``. Without a node do nothing.

        With a GradScaler, call this before the gradients are unscaled. All workers of the node then
        detect the same overflow and skip the same steps.
        """
        if self.node is None or not self.active or index in self._averaged:
            return
        self.require_own_model("a training step")
        with self.guard:
            self._count_computing()
            self.node.average(index)
        self._averaged.add(index)

    def _count_computing(self) -> None:
        """Let a simulated clock advance to the end of backward, once in each iteration."""
        if not self._stepped and not self._prepared and not self._averaged:
            self._host.computed(1.0)

    def prepare(self, index: int) -> None:
        """Pass the gradients of optimizer ``index`` to the flow. May block.

        Call this before the gradients are clipped, at the latest before the step. Further calls
        before ``complete`` do nothing.

        Raises AttachError if the optimizer has other parameters than at ``attach``, a frozen
        parameter became trainable, or the model is the consensus.
        """
        if not self.active or index in self._prepared:
            return
        if self._forbidden:
            self.require_own_model("a training step")
        self.accept_loaded("a training step")
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
        with self.guard:
            self._count_computing()
            self._order.append(index)
            count = len(worker.optimizers)
            last = count == 1 or len({*self._stepped, *self._prepared, index}) == count
            if last:
                worker.step += 1
            synced = self._gradients_ready(optimizer, last=last)
            self._synced = self._synced or synced
            if self._backward is not None:
                self._backward.end_step()
        self._prepared.add(index)  # not earlier: after a failure, the next call must fail, too

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
        """Begin the next view. Returns True if this worker must skip the current step."""
        assert self.recover is not None
        worker = self._worker
        worker.step -= last  # without this step, because the next view begins before it
        skip = self.recover(error)
        worker.step += last
        if skip:
            for parameter in optimizer.parameters:
                parameter.grad = None  # the optimizer does not change a parameter without gradient
        return skip

    def complete(self, index: int, *, skipped: bool = False) -> None:
        """Report a step of optimizer ``index`` to the flow. The last optimizer ends the iteration.

        ``skipped`` is True if a GradScaler or the training loop skipped the step. A skipped step
        counts like any other.
        """
        if not self.active:
            return
        worker = self._worker
        with self.guard:
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
        """Begin the next view, in which ``flow`` runs the strategy."""
        self.flow = flow
        self._failure, self._host = None, self._worker.team.host
        if self._backward is not None:
            self._backward.close()
            self._backward = None
        self.watch_backward()

    @property
    def partly_stepped(self) -> bool:
        """True in the middle of an iteration: some optimizers have stepped and others have not."""
        return bool(self._stepped)

    @property
    def shows_consensus(self) -> bool:
        """True while the model is the consensus (inside ``forbid_steps``)."""
        return bool(self._forbidden)

    def require_boundary(self, what: str) -> None:
        """Raise AttachError in the middle of an iteration, that is, after its first ``prepare``.

        ``what`` names the rejected call.
        """
        if self._stepped or self._prepared:
            raise AttachError(
                f"{what} in the middle of an iteration: call it after all optimizers have stepped, "
                "and before gradients are clipped or unscaled for the next step"
            )

    def wait_for_all(self, *, finishing: bool) -> Round:
        """Wait at a barrier until all workers have reached it.

        Until then other workers may still take steps. Each of their rounds needs a vote of this
        worker, which the flow sends. ``finishing`` is True at the end of training. Returns the last
        round, in which no worker takes a step.
        """
        if self.node is not None:
            self.node.pause(self._last_order[0])
        return self.flow.wait_for_all(self._last_order, finishing=finishing)

    @contextlib.contextmanager
    def forbid_steps(self, where: str) -> Iterator[None]:
        """Context for the time in which the model is the consensus: training steps raise an error.

        ``where`` is the user's call that the error names.
        """
        self._forbidden = where
        try:
            yield
        finally:
            self._forbidden = ""

    def require_own_model(self, what: str) -> None:
        """Raise AttachError inside ``forbid_steps``. ``what`` names the rejected call."""
        if self._forbidden:
            raise AttachError(
                f"{what} inside {self._forbidden}: there the model holds the mean of all workers "
                "for evaluation; leave the block first"
            )

    def close(self) -> None:
        """Ignore all further steps, and drop references that would keep the model in memory."""
        self.active = False
        if self._backward is not None:
            self._backward.close()
            self._backward = None
        self._completed, self.recover = lambda synced: None, None
        self.accept_loaded = lambda what: None
