"""A strategy at work, as the user sees it: figures, consensus, the end, checkpoints.

Long because each of these is a short method with a long description; the work is done elsewhere:
steps in ``iteration``, totals in ``ledger``, meetings in ``meeting``, checkpoints in ``state``.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.errors import AttachError, CheckpointError
from offbeat.fabric import Communicator, Team
from offbeat.means import Replica
from offbeat.strategies.base import NonFinite, Part, Strategy, Worker
from offbeat.telemetry import Stats
from offbeat.training.agreement import (
    copy_rank_0,
    describe,
    require_agreement,
    settings_of,
)
from offbeat.training.aside import Aside
from offbeat.training.beside import Beside
from offbeat.training.change import GradientChange
from offbeat.training.clipping import Clipping
from offbeat.training.companion import Companions
from offbeat.training.distance import Distance
from offbeat.training.finite import Finite
from offbeat.training.hooks import Removable, ScalerHooks, hook_optimizer
from offbeat.training.iteration import Iteration
from offbeat.training.ledger import Ledger
from offbeat.training.meeting import Meeting
from offbeat.training.node import NodeBuffers, NodeMean
from offbeat.training.optimizers import unwrapped_optimizer
from offbeat.training.shards import Shards
from offbeat.training.state import (
    answer_of,
    check_state,
    consensus_of,
    put_back,
    require_all,
    state_of,
)
from offbeat.training.views import Means, Views, exact_means

attached: "weakref.WeakSet[Any]" = weakref.WeakSet()  # models and optimizers in use


class Synchronizer:
    """A strategy at work on one worker. Made by ``attach``."""

    def __init__(
        self,
        model: nn.Module,
        parts: list[Part],
        strategy: Strategy,
        team: Team,
        *,
        scaler: torch.amp.GradScaler | None = None,
        means: Means,
        log: object = None,
        distance_every: int | None = None,
        beside: Callable[[], Communicator] | None = None,
        gradient_change: bool = False,
        non_finite: NonFinite = "warn",
        max_grad_norm: float | None = None,
        companions: Sequence[nn.Module] = (),
        hooks: Sequence[Removable] = (),
        min_workers: int | None = None,
        shards: Shards | None = None,
    ) -> None:
        self._strategy, self._team, self._active = strategy, team, True
        self._finished = False
        self._host = team.host
        self._shards, held = shards, model if shards is None else shards
        seen = Replica(model, [p for p in model.parameters() if p.requires_grad])
        replica = seen
        if shards is not None:
            replica = Replica(shards, [p for p in shards.parameters() if p.requires_grad])
        self._beside = Beside(team, companions)
        chosen = [f"optimizer_state {means.optimizer_state!r}", f"wire {means.wire!r}"]
        chosen += [f"distance_every {distance_every}", f"non_finite {non_finite!r}"]
        chosen.append(f"max_grad_norm {max_grad_norm}")
        chosen += [] if min_workers is None else [f"min_workers {min_workers}"]
        lines = [*chosen, *describe(strategy, seen, parts), *self._beside.describe()]
        began = team.view == 0
        with team.account.paused():
            if began:
                require_agreement(team.everyone, lines, settings_of(model, parts))
                copy_rank_0(team, replica.everything())
                self._beside.begin()
                pair = means.open(team, strategy, replica, parts)
            else:
                pair = exact_means(team, replica)
        worker = self._worker = Worker(team, replica, parts, *pair)
        self._companions = Companions(team, worker.details, lambda: self.step)
        worker.scaled = scaler is not None and scaler.is_enabled()
        finite = Finite(strategy, worker, non_finite)
        node: NodeBuffers | None = None
        if team.node is not None:
            inside = team.node.inside
            node = NodeBuffers(inside, held) if shards else NodeMean(inside, model, parts)
        self._iteration = Iteration(
            strategy, worker, self._companions, finite, self._completed, node
        )
        if node is not None:
            self._companions.refuse = (
                "node_group cannot take anything else along that has messages of its own"
            )
        self._ledger = Ledger(worker, log)
        self._meeting = Meeting(
            strategy, worker, self._iteration, self._companions, self._beside, shards
        )
        self._views: Views | None = None
        if min_workers is not None:
            self._continue(means, lines, min_workers, non_finite, began=began)
        if began:
            worker.state = strategy.start(worker)
        self._distance: Distance | None = None
        if distance_every is not None and beside is not None:
            self._distance = Distance(worker, strategy, distance_every, beside())
            self._iteration.stepped = self._measure
        if gradient_change:
            self._iteration.change = GradientChange(worker)
        self._clipping = Clipping(self._iteration, strategy, worker, max_grad_norm)
        self._hooks: list[Removable] = [*hooks, self._clipping]
        self._hook(scaler)
        self._things: tuple[Any, ...] = (model, *(part.optimizer for part in parts))
        attached.update(self._things)
        self._host.watch(lambda: self.stats)
        self._meeting.distance = self._distance
        self._ledger.restart()
        self._meeting.note_common()

    def _continue(
        self,
        means: Means,
        lines: list[str],
        min_workers: int,
        non_finite: NonFinite,
        *,
        began: bool,
    ) -> None:
        """Go on after a loss; if this worker has joined, begin where the others are."""
        iteration = self._iteration
        self._views = self._meeting.views = iteration.recover = views = Views(
            self._strategy,
            self._worker,
            means,
            lambda: self.stats,
            lines,
            min_workers=min_workers,
            non_finite=non_finite,
        )
        views.iteration, views.lasted = iteration, self._ledger.passed
        iteration.guard.continues = True
        self._companions.refuse = (
            'on_failure="continue" cannot take anything else along that has messages of its own'
        )
        if began:
            views.tell()
        else:
            with self._team.account.paused():
                views.join()

    def _hook(self, scaler: torch.amp.GradScaler | None) -> None:
        for part in self._worker.parts:
            self._hooks += hook_optimizer(
                part.optimizer,
                part.index,
                self._iteration,
                self._clipping,
                self._ledger.record_loss,
            )
        self._iteration.watch_backward()
        self._scaler = None if scaler is None else ScalerHooks(scaler, self._iteration)

    # -- what the user reads -----------------------------------------------------------------

    @property
    def step(self) -> int:
        """Iterations so far: steps of the optimizers, skipped ones of a GradScaler included."""
        return self.stats.steps

    @property
    def stats(self) -> Stats:
        """Totals since ``attach``, up to the last completed step."""
        return self._ledger.stats

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._team.everyone.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._team.everyone.size

    def _repr_html_(self) -> str:
        state = "at work" if self._active else "finished" if self._finished else "detached"
        who = f"worker {self.rank} of {self.size}, {state}: {self._strategy}"
        return self.stats.table(who).html()

    def record(self, **values: object) -> None:
        """Add ``values`` (``loss=loss``, say) to the telemetry record of the coming step.

        Tensors are read only when the record is written, and only if there is a sink.

        Raises:
            TypeError: a value that is no number (nor a text, nor a list of them). None of the
                ``values`` is taken then.
            ValueError: one of the names that every record has, such as ``step``.
        """
        self._ledger.record(values)

    def _completed(self, synced: bool) -> None:
        """An iteration has ended."""
        self._ledger.completed(synced=synced)
        self._meeting.stepped()

    def _measure(self) -> None:
        """Go on with measurements of the distance, whose time is not the training's."""
        assert self._distance is not None
        with self._ledger.paused():
            self._distance.stepped()

    # -- every step --------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Scale the gradients so that their total L2 norm is at most ``max_norm``.

        As ``torch.nn.utils.clip_grad_norm_`` does on an attached model: the strategy sees the
        gradients before they are clipped (SelSync's trigger) or averages them first (BSP). Here the
        norm is measured once for both. With a GradScaler call ``scaler.unscale_(optimizer)``
        before, as always.

        Args:
            max_norm: The largest norm that stays as it is.
            optimizer: Clip the gradients of this optimizer alone, by their own norm. Needed where
                optimizers step in turn, each after a backward pass of its own, as in a GAN.

        Returns:
            The total norm before clipping, a 0-dimensional tensor.

        Raises:
            AttachError: without ``optimizer``, when one has stepped and others have not yet.
        """
        parts = self._worker.parts
        if optimizer is not None:
            index = self._iteration.index_of(unwrapped_optimizer(optimizer))
            if index is None:
                raise AttachError("clip_grad_norm_() was given an optimizer that is not attached")
            parts = parts[index : index + 1]
        elif self._iteration.begun:
            raise AttachError(
                "one optimizer has stepped already in this iteration, so its gradients are spent: "
                "use clip_grad_norm_(max_norm, optimizer) with the one that is about to step"
            )
        return self._clipping.clip(parts, max_norm)

    # -- meeting the others ------------------------------------------------------------------

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean of all workers; afterwards this worker's own again.

        A collective: every worker enters it, each after any number of steps. Evaluate and save
        inside. Floating-point and complex buffers are the mean, too, signed integers the maximum,
        all others (masks, bytes) those of rank 0. Its time and bytes do not count in ``stats``.
        Needs one model copy of memory.

        The place for collectives of your own, ``dist.barrier()`` among them: all workers have come,
        and nobody waits for a part of the training meanwhile. A worker that calls one between two
        steps takes part in no round until it ends; another one that has steps to take may wait for
        it at the staleness bound, and neither goes on.

        Raises:
            AttachError: after ``finish`` or ``detach``, inside another ``consensus``, or when a
                parameter of the model was replaced by another one.
        """
        self._require_active("consensus()")
        self._iteration.require_own_model("consensus()")
        self._meeting.look_at_parameters()
        with self._ledger.paused():
            with self._iteration.guard, self._team.account.paused():
                own = self._meeting.consensus()
            try:
                with self._iteration.forbidden("consensus()"):
                    yield
            finally:
                self._meeting.restore(own)

    def finish(self) -> None:
        """End training: all workers get the same parameters and buffers, and hooks are removed.

        What they get of which buffers, see ``consensus``.

        A collective: every worker calls it, each after any number of steps. One that is early
        answers the others with weight 0 until all have come. Calling it again does nothing.
        """
        if not self._active:
            return
        self._iteration.require_own_model("finish()")
        self._meeting.look_at_parameters()
        with self._iteration.guard:
            self._meeting.finish()
        self._ledger.finished()
        self._finished = True
        self._end(together=True)

    def detach(self) -> None:
        """Remove all hooks and leave this worker's model as it is. Not a collective.

        Connections, threads and descriptors are given back. Workers that still wait for this one
        fail at once.
        """
        if self._active:
            self._end(together=False)

    def _end(self, *, together: bool) -> None:
        self._active = False
        self._iteration.close()
        self._companions.close()
        if self._distance is not None:
            self._distance.close(together=together)
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
        # The others know nothing of an exception here: a collective now would hang them.
        if kind is None:
            self.finish()
        else:
            self.detach()

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counters, totals and the strategy's state, as plain values for ``torch.save``.

        Every worker saves its own, between two steps, all at the same step. The model and the
        optimizer are saved by their own ``state_dict``; ``offbeat.save`` does all of it. The state
        says whose it is, and holds a digest, which takes about half a millisecond a megabyte.

        Inside ``consensus`` and after ``finish`` it is the state of the consensus, which belongs to
        the model that all workers then hold, and fits any strategy, wire and number of workers.

        Raises:
            AttachError: after ``detach``, or in the middle of an iteration.
        """
        worker = self._worker
        if self._finished or (self._active and self._iteration.shows_consensus):
            return consensus_of(worker, self.stats)
        self._require_active("state_dict()")
        self._iteration.require_boundary("state_dict()")
        with self._iteration.guard:
            self._meeting.surely_before_save()
        return state_of(self._strategy, worker, self.stats)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``. Load the model's and the optimizer's state before.

        A collective: all workers load, or none does, and then they train on as before. A state of
        the consensus is loaded before the first step: the workers begin anew from the model that
        rank 0 holds now, and only the totals of ``stats`` go on.

        Raises:
            CheckpointError: on every worker, if one was given a state of another strategy, wire,
                number of workers, rank, model or step, or a damaged one. It says what differs.
            AttachError: after ``finish`` or ``detach``, inside ``consensus``, or in the middle of
                an iteration.
        """
        self._require_active("load_state_dict()")
        self._iteration.require_own_model("load_state_dict()")
        self._iteration.require_boundary("load_state_dict()")
        worker, refused = self._worker, None
        try:
            check_state(state, self._strategy, worker, self.stats)
        except CheckpointError as error:
            refused = error
        with self._iteration.guard, self._team.account.paused():
            # Nothing of before may still be on its way when it is replaced.
            self._meeting.before_save()
            answers = self._team.everyone.gather_bytes(
                answer_of(state, refused), what="load_state_dict()"
            )
        if refused is not None:
            raise refused
        require_all(answers)
        with self._iteration.guard, self._team.account.paused():
            self._ledger.stats = put_back(state, self._strategy, worker)
        if self._views is not None:
            self._views.tell()
        self._ledger.restart()
        self._meeting.note_common()


@contextlib.contextmanager
def aside_of(sync: Synchronizer, what: str, *, loads: bool = False) -> Iterator[Aside]:
    """Inside, time and bytes do not count in ``stats``.

    Args:
        sync: What ``attach`` returned.
        what: Who asks, for errors.
        loads: Whether the model must be this worker's own.

    Raises:
        TypeError: it is no synchronizer.
        AttachError: see ``Synchronizer.state_dict`` and ``load_state_dict``.
    """
    _require_synchronizer(sync)
    sync._require_active(what)
    if sync._shards is not None:
        if sync._iteration.shows_consensus:
            raise AttachError(
                f"{what} inside consensus() with a model that fully_shard has divided: no worker's "
                "file would hold all of it; save there with torch.distributed.checkpoint"
            )
        sync._shards.gather_no_more()
    if loads:
        sync._iteration.require_own_model(what)
    sync._iteration.require_boundary(what)
    worker = sync._worker

    def check(state: Any) -> None:
        check_state(state, sync._strategy, worker, sync.stats)

    try:
        with sync._ledger.paused(), sync._team.account.paused():
            if loads:  # what is in flight could overtake what is done here
                with sync._iteration.guard:
                    sync._meeting.before_save()
            guard, divided = sync._iteration.guard, sync._shards is not None
            yield Aside(sync._things[0], worker, guard, sync.state_dict, check, divided)
    finally:
        if loads:
            sync._ledger.restart()


def companions_of(sync: Synchronizer) -> Companions:
    """Where something that accompanies the training of ``sync`` joins it.

    Raises:
        TypeError: it is no synchronizer.
    """
    _require_synchronizer(sync)
    return sync._companions


def _require_synchronizer(sync: object) -> None:
    if not isinstance(sync, Synchronizer):
        raise TypeError(f"sync must be what offbeat.attach() returned, got {sync!r}")
