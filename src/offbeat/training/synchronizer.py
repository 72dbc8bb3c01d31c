"""A strategy at work, as the user sees it: figures, consensus, the end, checkpoints.

Long because each of these is a short method with a long description; the work is done elsewhere.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.errors import AttachError, CheckpointError, CommunicationError
from offbeat.fabric import Communicator, Team
from offbeat.fabric.membership import EndedError
from offbeat.means import Replica
from offbeat.strategies.base import NonFinite, Part, Roll, Strategy, Worker
from offbeat.telemetry import Records, Stats, open_sinks
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

T = TypeVar("T")

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
        self._stats = Stats(details=worker.details)
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
        self._records = Records(open_sinks(log, rank=team.member), rank=team.member)
        self._views: Views | None = None
        self._ends = False  # whether the model is the final one
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
        self._host.watch(lambda: self._stats)
        self._clock = self._host.now()
        self._seen = (team.account.wait_seconds, team.account.payload_bytes)
        self._note_common()

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
        self._views = iteration.recover = views = Views(
            self._strategy,
            self._worker,
            means,
            lambda: self._stats,
            lines,
            min_workers=min_workers,
            non_finite=non_finite,
        )
        views.iteration, views.lasted = iteration, self._pass
        iteration.guard.continues = True
        self._companions.refuse = (
            'on_failure="continue" cannot take anything else along that has messages of its own'
        )
        if began:
            views.tell()
        else:
            with self._team.account.paused():
                views.join()

    def _pass(self, seconds: float) -> None:
        """Some time is not the training's."""
        self._clock += seconds

    def _hook(self, scaler: torch.amp.GradScaler | None) -> None:
        for part in self._worker.parts:
            self._hooks += hook_optimizer(
                part.optimizer, part.index, self._iteration, self._clipping, self._record_loss
            )
        self._iteration.watch_backward()
        self._scaler = None if scaler is None else ScalerHooks(scaler, self._iteration)

    # -- what the user reads -----------------------------------------------------------------

    @property
    def step(self) -> int:
        """Iterations so far: steps of the optimizers, skipped ones of a GradScaler included."""
        return self._stats.steps

    @property
    def stats(self) -> Stats:
        """Totals since ``attach``, up to the last completed step."""
        return self._stats

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
        return self._stats.table(who).html()

    def record(self, **values: object) -> None:
        """Add ``values`` (``loss=loss``, say) to the telemetry record of the coming step.

        Tensors are read only when the record is written, and only if there is a sink.

        Raises:
            TypeError: a value that is no number (nor a text, nor a list of them). None of the
                ``values`` is taken then.
            ValueError: one of the names that every record has, such as ``step``.
        """
        self._records.add(values)

    def _record_loss(self, loss: object) -> None:
        """What a closure has returned, if it is a number: the optimizer takes anything."""
        with contextlib.suppress(TypeError):
            self._records.add({"loss": loss})

    def _completed(self, synced: bool) -> None:
        """An iteration has ended."""
        stats, account, worker = self._stats, self._team.account, self._worker
        self._ends = False
        now = self._host.now()
        waited = account.wait_seconds - self._seen[0]
        sent = account.payload_bytes - self._seen[1]
        computed = max(0.0, now - self._clock - waited)
        self._clock, self._seen = now, (account.wait_seconds, account.payload_bytes)
        stats.steps += 1
        stats.syncs += synced
        stats.wait_seconds += waited
        stats.compute_seconds += computed
        stats.payload_bytes += sent
        more = dict(worker.record)
        worker.record.clear()
        self._note_common()
        decision = "sync" if synced else "local"
        self._records.write(
            stats.steps, self._team.member, decision, computed, waited, sent, more=more
        )

    def _note_common(self) -> None:
        """Note the parameters, if this worker has nothing that the others have not."""
        worker = self._worker
        worker.touched = False
        self._common = None if worker.has_news else worker.replica.versions()

    def _look_at_parameters(self) -> None:
        """What was changed between two steps, as by schedule-free optimizers, is news, too."""
        worker = self._worker
        worker.touched = self._common is not None and self._common != worker.replica.versions()
        worker.has_news = worker.has_news or worker.touched

    def _measure(self) -> None:
        """Go on with measurements of the distance, whose time is not the training's."""
        assert self._distance is not None
        start = self._host.now()
        self._distance.stepped()
        self._clock += self._host.now() - start

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

    def _surely(self, function: Callable[[], T]) -> T:
        """Call ``function``, again in the next view if a worker is lost meanwhile."""
        while True:
            try:
                return function()
            except CommunicationError as error:
                if self._views is None or isinstance(error, EndedError):
                    raise
                self._views(error)

    def _meet(self, *, finishing: bool) -> Roll:
        """Take part in the others' rounds with weight 0 until nobody steps any more."""
        self._companions.away()
        if self._shards is not None:
            self._shards.gather_no_more()
        roll = self._iteration.meet(finishing=finishing)
        if self._distance is not None:
            self._distance.meet()
        self._companions.back()
        return roll

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
        self._require_parameters()
        self._look_at_parameters()
        start = self._host.now()
        with self._iteration.guard, self._team.account.paused():
            own = self._surely(lambda: self._take_consensus(self._meet(finishing=False)))
        try:
            with self._iteration.forbidden("consensus()"):
                yield
        finally:
            self._restore(own)
            self._clock += self._host.now() - start

    def _take_consensus(self, roll: Roll) -> tuple[list[Tensor], list[Tensor]]:
        """Put the mean of all models into this one; returns the own one, and the companions."""
        worker = self._worker
        own = worker.replica.snapshot(), self._beside.snapshot()
        steps, news = worker.steps_since_sync, worker.has_news
        try:
            self._strategy.consensus(worker, roll, final=False)
            copy_rank_0(self._team, worker.replica.other_buffers())
            self._beside.average(final=False)
        except BaseException:
            self._restore(own)
            raise
        worker.steps_since_sync, worker.has_news = steps, news
        return own

    def _restore(self, own: tuple[list[Tensor], list[Tensor]]) -> None:
        if self._shards is not None:
            self._shards.gather_no_more()
        self._worker.replica.restore(own[0])
        self._beside.restore(own[1])
        self._note_common()

    def finish(self) -> None:
        """End training: all workers get the same parameters and buffers, and hooks are removed.

        What they get of which buffers, see ``consensus``.

        A collective: every worker calls it, each after any number of steps. One that is early
        answers the others with weight 0 until all have come. Calling it again does nothing.
        """
        if not self._active:
            return
        self._iteration.require_own_model("finish()")
        self._require_parameters()
        self._look_at_parameters()
        team = self._team
        with self._iteration.guard:
            try:
                self._surely(self._come_to_the_end)
            except EndedError:
                if not self._ends:  # else the others have seen that all have come to the end
                    raise
            self._companions.leave()
        self._stats.wait_seconds += team.account.wait_seconds - self._seen[0]
        self._stats.payload_bytes += team.account.payload_bytes - self._seen[1]
        self._finished = True
        self._end(together=True)

    def _come_to_the_end(self) -> None:
        worker, team, self._ends = self._worker, self._team, False
        roll = self._meet(finishing=True)
        while roll.finishing < team.size:  # the others are in consensus(): help, and wait on
            with team.account.paused():
                self._restore(self._take_consensus(roll))
            roll = self._meet(finishing=True)
        self._strategy.consensus(worker, roll, final=True)
        copy_rank_0(team, worker.replica.other_buffers())
        self._beside.average(final=True)
        self._ends = True
        if self._views is not None:  # who leaves now is not missed by one that has to begin again
            worker.barrier("the end of training")

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
            self._records.close()
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

    def _require_parameters(self) -> None:
        replaced = self._worker.replica.replaced()
        if replaced:
            raise AttachError(
                f"parameter {replaced[0]!r} of the model was replaced after attach(), so that it "
                "is synchronized no more: detach() and attach again"
            )

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
            return consensus_of(worker, self._stats)
        self._require_active("state_dict()")
        self._iteration.require_boundary("state_dict()")
        with self._iteration.guard:
            self._surely(lambda: self._strategy.before_save(worker, self._meet_quietly))
        return state_of(self._strategy, worker, self._stats)

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
            check_state(state, self._strategy, worker, self._stats)
        except CheckpointError as error:
            refused = error
        with self._iteration.guard, self._team.account.paused():
            # Nothing of before may still be on its way when it is replaced.
            self._strategy.before_save(worker, self._meet_quietly)
            answers = self._team.everyone.gather_bytes(
                answer_of(state, refused), what="load_state_dict()"
            )
        if refused is not None:
            raise refused
        require_all(answers)
        with self._iteration.guard, self._team.account.paused():
            self._stats = put_back(state, self._strategy, worker)
        if self._views is not None:
            self._views.tell()
        self._clock = self._host.now()
        self._seen = (self._team.account.wait_seconds, self._team.account.payload_bytes)
        self._note_common()

    def _meet_quietly(self) -> Roll:
        return self._iteration.meet(finishing=False)


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
    start, worker = sync._host.now(), sync._worker

    def check(state: Any) -> None:
        check_state(state, sync._strategy, worker, sync._stats)

    try:
        with sync._team.account.paused():
            if loads:  # what is in flight could overtake what is done here
                with sync._iteration.guard:
                    sync._strategy.before_save(worker, sync._meet_quietly)
            guard, divided = sync._iteration.guard, sync._shards is not None
            yield Aside(sync._things[0], worker, guard, sync.state_dict, check, divided)
    finally:
        now = sync._host.now()
        sync._clock = now if loads else sync._clock + now - start


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
