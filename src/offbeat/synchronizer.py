"""The synchronizer: what ``attach`` returns and a training loop holds.

Long because of its many short methods with descriptions. The work is done elsewhere: steps in
``training.iteration``, totals in ``training.ledger``, consensus in ``training.consensus``,
checkpoints in ``training.state``.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.arguments import require_integer
from offbeat.averaging import AttachedOptimizer, NonFinite, Replica, Worker, flow_of
from offbeat.checkpoint.synchronizer_state import (
    answer_of,
    check_state,
    consensus_of,
    load_state,
    require_all,
    state_of,
)
from offbeat.elastic.views import Views, open_wire
from offbeat.errors import AttachError, CheckpointError
from offbeat.nodes.gradients import NodeBuffers, NodeMean
from offbeat.nodes.shards import Shards
from offbeat.quantization.wire import Precision, Wire
from offbeat.strategies.base import Strategy
from offbeat.telemetry import Stats
from offbeat.training.agreement import copy_rank_0, describe, require_agreement, settings_of
from offbeat.training.background import BackgroundTasks
from offbeat.training.between_steps import BetweenSteps
from offbeat.training.clipping import Clipping
from offbeat.training.compatibility import repeatable
from offbeat.training.consensus import Consensus
from offbeat.training.hooks import Removable, ScalerHooks, hook_optimizer
from offbeat.training.iteration import Iteration
from offbeat.training.ledger import Ledger
from offbeat.training.monitors import Distance, GradientChange
from offbeat.training.optimizers import unwrapped_optimizer
from offbeat.transport.communicator import Communicator
from offbeat.transport.team import Team

attached: "weakref.WeakSet[Any]" = weakref.WeakSet()  # models and optimizers in use


class Synchronizer:
    """Drives a strategy on one worker. Made by ``attach``."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[AttachedOptimizer],
        strategy: Strategy,
        team: Team,
        *,
        scaler: torch.amp.GradScaler | None = None,
        wire: Precision = "float32",
        log: object = None,
        non_finite: NonFinite = "raise",
        min_workers: int | None = None,
        hooks: Sequence[Removable] = (),
        shards: Shards | None = None,
        connect: Callable[[], Communicator] | None = None,
    ) -> None:
        self._strategy, self._team, self._active = strategy, team, True
        self._finished = False
        self._host = team.host
        self._shards, held = shards, model if shards is None else shards
        self._connect = connect
        whole = Replica(model, [p for p in model.parameters() if p.requires_grad])
        replica = whole
        if shards is not None:
            replica = Replica(shards, [p for p in shards.parameters() if p.requires_grad])
        lines = [f"wire {wire!r}", f"non_finite {non_finite!r}", f"min_workers {min_workers}"]
        lines += describe(strategy, whole, optimizers)
        began = team.view == 0
        opened = Wire(team)
        with team.account.paused():
            if began:
                require_agreement(team.everyone, lines, settings_of(model, optimizers))
                copy_rank_0(team, replica.everything())
                opened = open_wire(team, strategy, wire)
        worker = self._worker = Worker(team, replica, optimizers, opened, non_finite)
        worker.scaled = scaler is not None and scaler.is_enabled()
        self._tasks = BackgroundTasks(team, worker.details, lambda: self.step)
        node: NodeBuffers | None = None
        if team.node is not None:
            inside = team.node.inside
            node = NodeBuffers(inside, held) if shards else NodeMean(inside, model, optimizers)
            self._tasks.refuse = "node_group cannot be combined with data injection"
        flow = flow_of(strategy, worker)
        self._iteration = Iteration(flow, worker, self._tasks, self._completed, node)
        self._ledger = Ledger(worker, log)
        self._consensus = Consensus(worker, self._iteration, self._tasks, shards)
        self._views: Views | None = None
        if began:
            flow.start()
        if min_workers is not None:
            self._make_elastic(wire, lines, min_workers, began=began)
        self._iteration.watch_backward()
        self._clipping = Clipping(self._iteration, worker)
        self._hooks: list[Removable] = [*hooks, self._clipping]
        for one in optimizers:
            self._hooks += hook_optimizer(
                one.optimizer, one.index, self._iteration, self._clipping, self._ledger.record_loss
            )
        self._scaler = None if scaler is None else ScalerHooks(scaler, self._iteration)
        self._things: tuple[Any, ...] = (model, *(one.optimizer for one in optimizers))
        attached.update(self._things)
        self._host.watch(lambda: self.stats)
        self._ledger.restart()
        self._consensus.note_parameters()

    def _make_elastic(
        self, wire: Precision, lines: Sequence[str], min_workers: int, *, began: bool
    ) -> None:
        """Continue after the loss of a worker. A worker that joins begins where the others are."""
        views = self._views = Views(
            self._strategy,
            self._worker,
            wire,
            lambda: self.stats,
            lines,
            min_workers=min_workers,
        )
        views.iteration, views.report_seconds = self._iteration, self._ledger.passed
        self._consensus.change_view = self._iteration.recover = views
        self._iteration.guard.elastic = True
        self._tasks.refuse = "min_workers cannot be combined with data injection"
        if began:
            views.record()
        else:
            with self._team.account.paused():
                views.join()

    # -- figures -----------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Number of iterations: steps of all optimizers, including those a GradScaler skipped."""
        return self.stats.steps

    @property
    def stats(self) -> Stats:
        """Totals since ``attach``, up to the last completed step."""
        return self._ledger.stats

    @property
    def rank(self) -> int:
        """Number of this worker."""
        return self._team.everyone.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._team.everyone.size

    def _repr_html_(self) -> str:
        state = "active" if self._active else "finished" if self._finished else "detached"
        who = f"worker {self.rank} of {self.size}, {state}: {self._strategy}"
        return self.stats.table(who).html()

    def record(self, **values: object) -> None:
        """Add ``values`` (``loss=loss``, say) to the telemetry record of the coming step.

        Tensors are read only when the record is written, and only if there is a sink.

        Raises:
            TypeError: a value is not a number, a text, or a list of them. No value is then added.
            ValueError: a name that every record has, such as ``step``.
        """
        self._ledger.record(values)

    def _completed(self, synced: bool) -> None:
        """An iteration has ended."""
        self._ledger.completed(synced=synced)
        self._consensus.step_ended()

    # -- every step --------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Scale the gradients so that their total L2 norm is at most ``max_norm``.

        ``torch.nn.utils.clip_grad_norm_`` does the same on an attached model: the strategy sees the
        gradients before they are clipped (SelSync's trigger), or averages them first (BSP). This
        method measures the norm once for both. With a GradScaler call
        ``scaler.unscale_(optimizer)`` before, as always.

        Args:
            max_norm: Largest norm that is left unchanged.
            optimizer: Clip the gradients of this optimizer alone, by their own norm. Needed if
                optimizers step in turn, each after its own backward pass, as in a GAN.

        Returns:
            The total norm before clipping, a 0-dimensional tensor.

        Raises:
            AttachError: without ``optimizer``, if one has stepped and others have not yet.
        """
        chosen = self._worker.optimizers
        if optimizer is not None:
            index = self._iteration.index_of(unwrapped_optimizer(optimizer))
            if index is None:
                raise AttachError("clip_grad_norm_() was given an optimizer that is not attached")
            chosen = chosen[index : index + 1]
        elif self._iteration.begun:
            raise AttachError(
                "one optimizer has already stepped in this iteration, so its gradients are used: "
                "call clip_grad_norm_(max_norm, optimizer) with the one that is about to step"
            )
        return self._clipping.clip(chosen, max_norm)

    # -- additions ---------------------------------------------------------------------------

    def monitor(self, *, distance_every: int | None = None, gradient_change: bool = False) -> None:
        """Measure more of the training, in the telemetry records.

        Call it before the first step. A collective if ``distance_every`` is given.

        Args:
            distance_every: Measure how far apart the workers' models are every so many local steps
                (≥ 1), in the background: ``distance``, ``distance_largest`` and ``distance_step``
                in the records and in ``Stats.details``. Sends the model once, which is not counted,
                and takes two copies of the parameters; see ``offbeat.training.monitors.Distance``.
            gradient_change: Measure SelSync's Δ of this worker's gradient in each step:
                ``relative_change`` in the records. Reads the gradients once and sends nothing.

        Raises:
            AttachError: after the first step, ``finish`` or ``detach``; ``distance_every`` with
                ``node_group`` or ``min_workers``, or a second time.
        """
        self._require_active("monitor()")
        if gradient_change:
            self._iteration.watches_gradients.append(GradientChange(self._worker))
            self._clipping.watch()
        if distance_every is None:
            return
        require_integer("distance_every", distance_every, least=1)
        if self.step or self._consensus.distance is not None:
            raise AttachError("monitor(distance_every=…): call it once, before the first step")
        if self._team.node is not None or self._views is not None or self._connect is None:
            raise AttachError(
                "monitor(distance_every=…) with node_group or min_workers: its messages follow the "
                "timing of each worker; leave one of them out"
            )
        in_step = repeatable(self._strategy)
        distance = Distance(
            self._worker, distance_every, in_step=in_step, communicator=self._connect()
        )
        self._consensus.distance = distance

        def measure() -> None:
            with self._ledger.paused():  # its time does not belong to the training
                distance.step_ended()

        self._iteration.measures.append(measure)

    def follow(self, *modules: nn.Module) -> None:
        """Average further modules together with the model, such as an average of its weights.

        All workers get rank 0's now. Each then has its own, and in ``consensus`` and after
        ``finish`` they are the mean over all workers. ``save`` does not hold them: give their
        ``state_dict()`` as ``extra``. A collective.

        Raises:
            AttachError: after ``finish`` or ``detach``; with ``min_workers`` or a model that
                ``fully_shard`` has divided; a module that shares tensors with the model.
            MismatchError: another worker gave other modules.
        """
        self._require_active("follow()")
        if self._views is not None or self._shards is not None:
            raise AttachError(
                "follow() with min_workers, or with a model that fully_shard has divided: a worker "
                "that joins would not get the modules, and no worker holds them whole"
            )
        self._consensus.followers.check(self._things[0], modules)
        with self._iteration.guard, self._team.account.paused():
            self._consensus.followers.add(modules)

    # -- all workers together ----------------------------------------------------------------

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean of all workers; afterwards this worker's own again.

        A collective: every worker enters it, each after any number of steps. Evaluate and save
        inside. Floating-point and complex buffers are averaged, too; signed integers take the
        maximum; all others (masks, bytes) are those of rank 0. Its time and bytes do not count in
        ``stats``. Needs one model copy of memory.

        Collectives of your own, such as ``dist.barrier()``, belong here: all workers are present.
        A worker that calls one between two steps takes part in no round until it returns, and
        another worker may wait for that round.

        Raises:
            AttachError: after ``finish`` or ``detach``, inside another ``consensus``, or if a
                parameter of the model was replaced by another one.
        """
        self._require_active("consensus()")
        self._iteration.require_own_model("consensus()")
        self._consensus.check_parameters()
        with self._ledger.paused():
            with self._iteration.guard, self._team.account.paused():
                own = self._consensus.show()
            try:
                with self._iteration.forbidden("consensus()"):
                    yield
            finally:
                self._consensus.restore(own)

    def finish(self) -> None:
        """End training: all workers get the same parameters and buffers, and hooks are removed.

        ``consensus`` says how buffers are combined. A collective: every worker calls it, each after
        any number of steps. An early worker votes with weight 0 until all have called it. Calling
        it again does nothing.
        """
        if not self._active:
            return
        self._iteration.require_own_model("finish()")
        self._consensus.check_parameters()
        with self._iteration.guard:
            self._consensus.finish()
        self._ledger.finished()
        self._finished = True
        self._end(together=True)

    def detach(self) -> None:
        """Remove all hooks and leave this worker's model as it is. Not a collective.

        Connections, threads and descriptors are released. Workers that wait for this one fail at
        once.
        """
        if self._active:
            self._end(together=False)

    def _end(self, *, together: bool) -> None:
        self._active = False
        self._iteration.close()
        self._tasks.close()
        if self._consensus.distance is not None:
            self._consensus.distance.close(together=together)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._scaler is not None:
            self._scaler.remove()
        for thing in self._things:
            attached.discard(thing)
        try:
            self._ledger.close()
        finally:
            if self._team.membership is not None and self._views is not None:
                self._team.membership.leave(ended=together)
            self._team.close(together=together)

    def _require_active(self, what: str) -> None:
        if not self._active:
            advice = "attach again first"
            if what == "offbeat.save()":  # of a model attached anew it would save too little
                advice = "call it before, or inside consensus()"
            raise AttachError(f"{what} after finish() or detach(): {advice}")

    def __enter__(self) -> "Synchronizer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The other workers do not know of an exception here: a collective would hang them.
        if kind is None:
            self.finish()
        else:
            self.detach()

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counters, totals and the strategy's state, as plain values for ``torch.save``.

        Every worker saves its own, between two steps, all at the same step. The model and the
        optimizer are saved by their own ``state_dict``; ``offbeat.save`` does all of it. The state
        names its owner and holds a digest, which takes about half a millisecond a megabyte.

        Inside ``consensus`` and after ``finish`` it is the state of the consensus, which belongs to
        the model that all workers then hold, and fits any strategy, wire and number of workers.

        Raises:
            AttachError: after ``detach``, or in the middle of an iteration.
        """
        flow = self._iteration.flow
        if self._finished or (self._active and self._iteration.shows_consensus):
            return consensus_of(flow, self.stats)
        self._require_active("state_dict()")
        self._iteration.require_boundary("state_dict()")
        with self._iteration.guard:
            self._consensus.before_save()
        return state_of(self._iteration.flow, self.stats)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``. Load the model's and the optimizer's state before.

        A collective: all workers load, or none does, and then they continue as before. A state of
        the consensus is loaded before the first step: the workers start from the model that rank 0
        holds now, and only the totals of ``stats`` continue.

        Raises:
            CheckpointError: on every worker, if one was given a state of another strategy, wire,
                number of workers, rank, model or step, or a damaged one. It says what differs.
            AttachError: after ``finish`` or ``detach``, inside ``consensus``, or in the middle of
                an iteration.
        """
        self._require_active("load_state_dict()")
        self._iteration.require_own_model("load_state_dict()")
        self._iteration.require_boundary("load_state_dict()")
        flow, refused = self._iteration.flow, None
        try:
            check_state(state, flow, self.stats)
        except CheckpointError as error:
            refused = error
        with self._iteration.guard, self._team.account.paused():
            # Nothing of the old state may arrive after it was replaced.
            self._consensus.settle()
            answers = self._team.everyone.gather_bytes(
                answer_of(state, refused), what="load_state_dict()"
            )
        if refused is not None:
            raise refused
        require_all(answers)
        with self._iteration.guard, self._team.account.paused():
            self._ledger.stats = load_state(state, flow)
        if self._views is not None:
            self._views.record()
        self._ledger.restart()
        self._consensus.note_parameters()


@contextlib.contextmanager
def between_steps(sync: Synchronizer, what: str, *, loads: bool = False) -> Iterator[BetweenSteps]:
    """Context between two steps, whose time and bytes do not count in ``stats``.

    Args:
        sync: What ``attach`` returned.
        what: Name of the caller, for errors.
        loads: True if the model must be this worker's own.

    Raises:
        TypeError: ``sync`` is not a synchronizer.
        AttachError: see ``Synchronizer.state_dict`` and ``load_state_dict``.
    """
    require_synchronizer(sync)
    sync._require_active(what)
    if sync._shards is not None:
        if sync._iteration.shows_consensus:
            raise AttachError(
                f"{what} inside consensus() with a model that fully_shard has divided: no worker's "
                "file would hold all of it; save there with torch.distributed.checkpoint"
            )
        sync._shards.reshard()
    if loads:
        sync._iteration.require_own_model(what)
    sync._iteration.require_boundary(what)
    worker = sync._worker

    def check(state: Any) -> None:
        check_state(state, sync._iteration.flow, sync.stats)

    try:
        with sync._ledger.paused(), sync._team.account.paused():
            if loads:  # what is in flight could arrive after what is loaded
                with sync._iteration.guard:
                    sync._consensus.settle()
            guard, divided = sync._iteration.guard, sync._shards is not None
            yield BetweenSteps(sync._things[0], worker, guard, sync.state_dict, check, divided)
    finally:
        if loads:
            sync._ledger.restart()


def background_tasks_of(sync: Synchronizer) -> BackgroundTasks:
    """The background tasks of ``sync``, to which a component can add itself.

    Raises:
        TypeError: ``sync`` is not a synchronizer.
    """
    require_synchronizer(sync)
    return sync._tasks


def require_synchronizer(sync: object) -> None:
    """Raise TypeError unless ``sync`` is what ``attach`` returned."""
    if not isinstance(sync, Synchronizer):
        raise TypeError(f"sync must be what offbeat.attach() returned, got {sync!r}")
