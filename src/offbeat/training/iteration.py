"""Iterations of a training loop. One iteration is one step of every optimizer, in any order.

Hooks on the parameters call ``backward_ended`` at the end of each backward pass, where gradients
are averaged or measured. Hooks on the user's optimizers call ``before_step`` before and
``complete`` after each optimizer step. ``Iteration`` passes these events to the *flow*, the code
that runs the strategy.

``offbeat.strategies.base`` explains the terms.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat.averaging import AttachedOptimizer, Flow, Worker
from offbeat.errors import AttachError, CommunicationError
from offbeat.nodes.gradients import NodeMean
from offbeat.nodes.shards import unsharded
from offbeat.training.backward_hooks import BackwardHooks
from offbeat.training.guard import Guard
from offbeat.training.optimizer_gradients import NOT_HANDLED, OptimizerGradients
from offbeat.training.optimizers import unwrapped_optimizer

_synchronizes = operator.attrgetter("require_backward_grad_sync")


class Recovery(Protocol):
    """Begins the next generation in elastic training; see ``MembershipChanges``."""

    def require_current_generation(self) -> None:
        """Raise CommunicationError if a new generation must begin, e.g. if a worker joins."""

    def __call__(self, error: CommunicationError) -> bool:
        """End this generation because of ``error`` and begin the next one, or raise.

        Returns True if another worker had made more progress and has sent its model to this worker.
        The local gradients then belong to the old model, so the current step must be skipped.
        """


class Iteration:
    """Tracks the current iteration of one worker.

    Args:
        flow: Runs the strategy.
        worker: This worker.
        completed: Called after each iteration, with True if the workers synchronized in it.
        node: Averages inside the node. None: this worker is a node by itself.
        wrappers: The DistributedDataParallel wrappers of the model.

    Attributes:
        active: False once training has ended. The hooks then do nothing.
        guard: Context around communication. It raises if it is entered after a failure.
        trained: Identities of the averaged parameters.
        in_step: True inside the step of an attached optimizer.
        recover: Begins the next generation after a failure. None: a failure ends training.
    """

    def __init__(
        self,
        flow: Flow,
        worker: Worker,
        completed: Callable[[bool], None],
        node: NodeMean | None,
        wrappers: Sequence[DistributedDataParallel],
    ) -> None:
        self.flow, self._worker, self.node, self._wrappers = flow, worker, node, wrappers
        self._completed = completed
        self.active, self.in_step = True, False
        self.trained = {id(unsharded(p)) for _, p in worker.replica.parameters}
        self.guard = Guard()
        self.recover: Recovery | None = None
        self._failure: CommunicationError | None = None  # raised during backward, handled later
        # Indices of optimizers in this iteration:
        self._prepared: set[int] = set()  # passed to the flow, but not complete yet
        self._stepped: set[int] = set()  # complete: stepped, or skipped their step
        self._gradients = [OptimizerGradients(each) for each in worker.optimizers]
        self._computed = False  # True once the computation of this iteration is complete
        self._no_sync = 0  # number of ``no_sync`` contexts around the present code
        self._synced = False  # True if the workers synchronized before a step of this iteration
        self._skipped = True  # False once an optimizer has really stepped in this iteration
        self._forbidden = ""  # inside ``forbid_steps``: its argument, e.g. "consensus()"
        self._backward: BackwardHooks | None = None

    def watch_backward(self) -> None:
        """Install hooks on the parameters, if gradients are averaged or measured."""
        if self._backward is not None:
            self._backward.close()
            self._backward = None
        flow, node, optimizers = self.flow, self.node, self._worker.optimizers
        if not (flow.replicates or flow.measures or node is not None):
            return
        buckets: Sequence[Sequence[Tensor]] = []
        if node is not None:
            buckets = optimizers[0].buckets if node.overlap else []
        elif self._worker.overlaps_backward:
            buckets = flow.backward_buckets(optimizers[0])
        self._backward = BackwardHooks([each.parameters for each in optimizers], buckets, self)

    # -- called by the hooks on the parameters -----------------------------------------------

    @property
    def accumulates(self) -> bool:
        """True if backward passes only add to the gradients, for example inside ``no_sync``."""
        if self._no_sync or self._forbidden or not self.active:
            return True
        return not all(map(_synchronizes, self._wrappers))  # inside no_sync() of DDP

    def computed(self, progress: float) -> None:
        """Let a simulated clock advance. ``progress`` is 1 at the end of the last backward pass.

        After that, nothing more of this iteration takes time.
        """
        if not self._computed:
            with self.guard:  # a simulation may end here
                self._worker.team.host.computed(progress)
            self._computed = progress == 1

    def bucket_ready(self, bucket: int) -> None:
        """Pass a bucket to the node or the flow."""
        if self._failure is not None:
            return
        with self.guard:
            if self.node is not None:
                self.node.start(bucket)
                return
            try:
                self.flow.bucket_ready(bucket)
            except CommunicationError as error:
                if self.recover is None:
                    raise
                # The next generation replaces the model, which must not change while backward
                # computes.
                self._failure = error  # handled in ``_prepare``

    def backward_ended(self, received: set[int]) -> None:
        """Average or measure the gradients of the optimizers ``received``. May block."""
        # Without those that stepped in this pass, and removed their gradients.
        received = {index for index in received if self._gradients[index].newest() is not None}
        # The pass of a generator also computes gradients of the discriminator, which has stepped.
        for index in sorted(received - self._stepped or received):
            self._handle(index)

    # -- called by the hooks on the optimizers -----------------------------------------------

    def index_of(self, optimizer: object) -> int | None:
        """Return the index of an attached optimizer, or None for any other object."""
        attached = self._worker.optimizers
        return next((each.index for each in attached if each.optimizer is optimizer), None)

    def handle_gradients(self, index: int) -> None:
        """Average or measure the gradients of optimizer ``index``, unless backward has done so.

        The training loop may have set them without ``backward()``. If gradients are neither
        averaged nor measured, this only raises AttachError if the model is the consensus.
        """
        if not self.active:
            return
        self.require_own_model("a training step")
        if self._backward is None:
            return
        if self._backward.unfinished:
            raise AttachError(
                "all gradients were computed inside the backward of a custom function, so they "
                "were not averaged: give torch.utils.checkpoint use_reentrant=False"
            )
        gradients = self._gradients[index]
        # They also differ if the loop has skipped a step, and computed the next gradients.
        if not self.accumulates and gradients.handled is not gradients.newest():
            self._handle(index)

    def unscaled(self, index: int) -> None:
        """Handle the gradients of optimizer ``index``, which a GradScaler has just unscaled."""
        if self.active and self._worker.scaled and not self.flow.replicates:
            self._pass_on(index)

    def before_step(self, index: int) -> None:
        """Pass the gradients of optimizer ``index`` to the flow, unless this was done. May block.

        Raises AttachError inside ``no_sync``, or as ``handle_gradients`` does.
        """
        if not self.active:
            return
        if self._backward is not None:
            self.handle_gradients(index)
        if self.accumulates:
            self.require_own_model("a training step")
            raise AttachError(
                "optimizer.step() inside no_sync(): the gradients were not averaged; leave the "
                "context before the last backward pass of each step"
            )
        if index not in self._prepared:
            if self._backward is None:
                self._gradients[index].require_trainable()
            self._prepare(index)

    def _handle(self, index: int) -> None:
        """Average in the node, and pass the gradients on, at once or after they are unscaled.

        With a GradScaler, the workers of a node average the scaled gradients. All of them then
        detect the same overflow and skip the same steps.
        """
        gradients = self._gradients[index]
        gradients.require_trainable()
        self.computed(1.0)
        if self.node is not None:
            with self.guard:
                self.node.average(index)
        if self.flow.replicates or not self._worker.scaled:
            self._pass_on(index)
        gradients.handled = gradients.newest()

    def _pass_on(self, index: int) -> None:
        flow = self.flow
        if flow.replicates:
            self._prepare(index)
        elif flow.measures:
            with self.guard:
                flow.measure(self._worker.optimizers[index])

    def _prepare(self, index: int) -> None:
        """Pass the gradients of optimizer ``index`` to the flow. May block."""
        worker, again = self._worker, index in self._prepared
        optimizer = worker.optimizers[index]
        with self.guard:
            if not self._computed:
                worker.team.host.computed(1.0)  # a simulation may end here
                self._computed = True
            last = len({*self._stepped, *self._prepared, index}) == len(worker.optimizers)
            worker.step += last and not again
            if self.recover is None:
                synced = self.flow.gradients_ready(optimizer, last=last and not again)
            else:
                synced = self._elastic_gradients_ready(optimizer, last=last, again=again)
            self._synced = self._synced or synced
        self._prepared.add(index)  # not earlier: after a failure, the next call must fail, too

    def _elastic_gradients_ready(
        self, optimizer: AttachedOptimizer, *, last: bool, again: bool
    ) -> bool:
        """Call the flow's ``gradients_ready``. After a failure, retry in the next generation."""
        assert self.recover is not None
        worker = self._worker
        while True:
            try:
                if self._failure is not None:
                    raise self._failure
                self.recover.require_current_generation()
                return self.flow.gradients_ready(optimizer, last=last and not again)
            except CommunicationError as error:
                worker.step -= last  # the next generation begins before this step
                skip = self.recover(error)
                worker.step += last
            if skip:  # the optimizer does not change a parameter without gradient
                for parameter in optimizer.parameters:
                    parameter.grad = None
                return True

    def complete(self, index: int, *, skipped: bool = False) -> None:
        """Report a step of optimizer ``index`` to the flow. The last optimizer ends the iteration.

        ``skipped`` is True if a GradScaler or the training loop skipped the step. A skipped step
        counts like any other. Does nothing unless the optimizer is prepared: the hooks fire twice
        if a ``step`` calls ``super().step()`` and torch has wrapped both. The inner step counts.
        """
        if not self.active or index not in self._prepared:
            return
        worker = self._worker
        with self.guard:
            if not skipped:
                self._skipped = False
            self._prepared.discard(index)
            self._gradients[index].handled = NOT_HANDLED
            self._stepped.add(index)
            if len(self._stepped) < len(worker.optimizers):
                return
            self._stepped.clear()
            self._computed = False
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

    def begin_generation(self, flow: Flow) -> None:
        """Begin the next generation, in which ``flow`` runs the strategy."""
        self.flow = flow
        self._failure = None
        self.watch_backward()

    def clip_grad_norm(self, max_norm: float, optimizer: Optimizer | None) -> Tensor:
        """Implement ``Synchronizer.clip_grad_norm_``."""
        chosen = self._worker.optimizers
        if optimizer is not None:
            index = self.index_of(unwrapped_optimizer(optimizer))
            if index is None:
                raise AttachError("clip_grad_norm_() was given an optimizer that is not attached")
            chosen = [chosen[index]]
        elif self._stepped:
            raise AttachError(
                "one optimizer has already stepped in this iteration, so its gradients are used: "
                "call clip_grad_norm_(max_norm, optimizer) with the one that is about to step"
            )
        for each in chosen:
            self.handle_gradients(each.index)
        squared = self._worker.squared_norm(g for each in chosen for g in each.gradients())
        parameters = [p for each in chosen for p in each.parameters if p.grad is not None]
        double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        norm = torch.tensor(squared, dtype=torch.float64, device="cpu").sqrt()
        norm = norm if double else norm.float()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    @property
    def shows_consensus(self) -> bool:
        """True while the model is the consensus (inside ``forbid_steps``)."""
        return bool(self._forbidden)

    def require_step_end(self, what: str) -> None:
        """Raise AttachError in the middle of an iteration. ``what`` names the rejected call."""
        if self._stepped or self._prepared:
            raise AttachError(
                f"{what} in the middle of an iteration: call it after all optimizers have stepped, "
                "and before the backward pass of the next step"
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Implement ``Synchronizer.no_sync``."""
        self._no_sync += 1
        try:
            yield
        finally:
            self._no_sync -= 1

    @contextlib.contextmanager
    def forbid_steps(self, where: str) -> Iterator[None]:
        """Context for the time in which the model is the consensus: training steps raise an error.

        Values can be loaded into the model. ``where`` is the call that the error names.
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

    def require_replaceable(self) -> None:
        """Raise AttachError outside of ``forbid_steps``, where values are loaded into the model."""
        if not self._forbidden:
            raise AttachError(
                f"rank {self._worker.rank}: model.load_state_dict() on an attached model, whose "
                "strategy would not know the loaded values. To train from them, load before "
                "attach(), or use offbeat.load() or sync.load_state_dict(); to evaluate them, load "
                "inside consensus() or after finish()"
            )

    def close(self) -> None:
        """Ignore all further steps, and drop references that would keep the model in memory."""
        self.active = False
        if self._backward is not None:
            self._backward.close()
            self._backward = None
        self._completed, self.recover = lambda synced: None, None
