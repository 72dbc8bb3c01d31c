"""A strategy at work: optimizer hooks call it, and the life cycle around them."""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from offbeat.agreement import copy_rank_0, describe, require_agreement
from offbeat.checkpoint import load, save
from offbeat.errors import AttachError
from offbeat.fabric import Accounting, Communicator, Wire
from offbeat.fabric.companion import Companions
from offbeat.fabric.compression import Precision
from offbeat.hooks import ScalerHooks, hook_optimizer
from offbeat.replica import Replica
from offbeat.significance import squared_norm
from offbeat.strategies.base import Part, Roll, Strategy, Worker
from offbeat.strategies.optimizer_state import OptimizerState
from offbeat.telemetry import Stats, open_sinks

attached: "weakref.WeakSet[Any]" = weakref.WeakSet()  # models and optimizers in use


class Synchronizer:
    """A strategy at work on one worker. Made by ``attach``."""

    def __init__(
        self,
        model: nn.Module,
        parts: list[Part],
        strategy: Strategy,
        communicator: Communicator,
        *,
        scaler: torch.amp.GradScaler | None = None,
        optimizer_state: str = "local",
        wire: Precision = "float32",
        log: object = None,
    ) -> None:
        self.strategy = strategy
        self._model = model
        self._fabric = Accounting(communicator)
        moved = {id(p) for part in parts for p in part.parameters}
        trainable = [p for p in model.parameters() if p.requires_grad or id(p) in moved]
        replica = Replica(model, trainable)
        self._worker = Worker(self._fabric, replica, parts)
        self._stats = Stats(details=self._worker.details)
        self.companions = Companions(self._fabric, self._worker.details, lambda: self.step)
        self._hooks: list[RemovableHandle] = []
        self._prepared: set[int] = set()  # parts whose before_step has run
        self._stepped: set[int] = set()  # parts that have stepped in this iteration
        self._extra: dict[str, Any] = {}  # what the user gave to record()
        self._active = True
        self._looking = False  # inside consensus()
        with self._fabric.paused():
            chosen = [f"optimizer_state {optimizer_state!r}", f"wire {wire!r}"]
            require_agreement(self._fabric, [*chosen, *describe(strategy, self._worker)])
            self._worker.wire = Wire(self._fabric, wire)
            copy_rank_0(self._fabric, self._worker.replica.everything())
        if optimizer_state == "average":
            optimizers = [part.optimizer for part in parts]
            self._worker.optimizer_state = OptimizerState(
                self._fabric, replica.parameters, optimizers
            )
        self._sinks = open_sinks(log, rank=self._fabric.rank)
        self._groups = [len(part.optimizer.param_groups) for part in parts]
        self._worker.state = strategy.start(self._worker)
        for index, part in enumerate(parts):
            self._hooks += hook_optimizer(part.optimizer, index, self)
        self._scaler = None if scaler is None else ScalerHooks(scaler, self)
        self._things = (model, *(part.optimizer for part in parts))
        attached.update(self._things)
        self._fabric.watch(lambda: self._stats)
        self._clock = self._fabric.now()
        self._seen = (self._fabric.wait_seconds, self._fabric.payload_bytes)

    # -- what the user reads -----------------------------------------------------------------

    @property
    def step(self) -> int:
        """Iterations so far: steps of the optimizers, skipped ones of a GradScaler included."""
        return self._worker.step

    @property
    def stats(self) -> Stats:
        """Totals since ``attach``, up to the last completed step."""
        return self._stats

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._fabric.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._fabric.size

    def record(self, **values: object) -> None:
        """Add ``values`` (``loss=loss``, say) to the telemetry record of the coming step.

        Tensors are read only when the record is written, and only if there is a sink.
        """
        self._extra.update(values)

    # -- every step --------------------------------------------------------------------------

    def prepare(self, index: int) -> None:
        """Run the strategy's ``before_step`` for optimizer ``index``, once an iteration.

        Called by the hooks; ``clip_grad_norm_`` calls it earlier.
        """
        if not self._active or index in self._prepared:
            return
        self._require_own_model("a training step")
        worker = self._worker
        if len(worker.parts[index].optimizer.param_groups) != self._groups[index]:
            raise AttachError(
                "a parameter group was added to the optimizer after attach(): detach() and attach "
                "again so that all workers agree on what is averaged"
            )
        if not self._stepped and not self._prepared:
            self._fabric.computed()
        worker.part = index
        coming = self._stepped | self._prepared | {index}
        worker.completes_iteration = len(coming) == len(worker.parts)
        with self.companions:
            self.strategy.before_step(worker)
        self._prepared.add(index)  # not before: a step after a failure must fail, too

    def complete(self, index: int, *, skipped: bool = False) -> None:
        """Optimizer ``index`` has stepped, or a GradScaler has ``skipped`` its step."""
        if not self._active:
            return
        worker = self._worker
        if not skipped:
            worker.part = index
            self.strategy.after_part(worker)
        self._prepared.discard(index)
        self._stepped.add(index)
        if len(self._stepped) < len(worker.parts):
            return
        self._stepped.clear()
        worker.has_news = True
        worker.steps_since_sync += 1
        worker.norm_squared = None
        with self.companions:
            synced = self.strategy.after_step(worker)
        worker.step += 1
        self._account(synced)

    def awaits_step(self, index: int) -> bool:
        """Whether optimizer ``index`` was prepared and has not stepped since."""
        return index in self._prepared

    def index_of(self, optimizer: Optimizer) -> int | None:
        """The index of an attached optimizer; None for any other."""
        parts = self._worker.parts
        return next((i for i, part in enumerate(parts) if part.optimizer is optimizer), None)

    def _account(self, synced: bool) -> None:
        stats, fabric, worker = self._stats, self._fabric, self._worker
        now = fabric.now()
        waited = fabric.wait_seconds - self._seen[0]
        sent = fabric.payload_bytes - self._seen[1]
        computed = max(0.0, now - self._clock - waited)
        self._clock, self._seen = now, (fabric.wait_seconds, fabric.payload_bytes)
        stats.steps += 1
        stats.syncs += synced
        stats.flags += bool(worker.record.get("flag"))
        stats.wait_seconds += waited
        stats.compute_seconds += computed
        stats.payload_bytes += sent
        if self._sinks:
            record = {
                "step": worker.step,
                "rank": fabric.rank,
                "decision": "sync" if synced else "local",
                "compute_seconds": computed,
                "wait_seconds": waited,
                "payload_bytes": sent,
                **worker.record,
                **self._extra,
            }
            for sink in self._sinks:
                sink.write(record)
        worker.record.clear()
        self._extra.clear()

    def clip_grad_norm_(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Scale the gradients so that their total L2 norm is at most ``max_norm``.

        Use it in place of ``torch.nn.utils.clip_grad_norm_``: the strategy sees the gradients
        before they are clipped (SelSync's trigger) or averages them first (BSP), and the norm is
        measured once for both. With a GradScaler call ``scaler.unscale_(optimizer)`` before, as
        always.

        Args:
            max_norm: The largest norm that stays as it is.
            optimizer: Clip the gradients of this optimizer alone, by their own norm. Needed where
                optimizers step in turn, each after a backward pass of its own, as in a GAN.

        Returns:
            The total norm before clipping, a 0-dimensional tensor.

        Raises:
            AttachError: without ``optimizer``, when one has stepped and others have not yet.
        """
        worker = self._worker
        indices = range(len(worker.parts))
        if optimizer is not None:
            index = self.index_of(optimizer)
            if index is None:
                raise AttachError("clip_grad_norm_() was given an optimizer that is not attached")
            indices = range(index, index + 1)
        elif self._stepped:
            raise AttachError(
                "one optimizer has stepped already in this iteration, so its gradients are spent: "
                "use clip_grad_norm_(max_norm, optimizer) with the one that is about to step"
            )
        for index in indices:
            self.prepare(index)
        parts = [worker.parts[index] for index in indices]
        squared = worker.norm_squared
        if squared is None or len(parts) < len(worker.parts):
            squared = squared_norm(g for part in parts for g in part.gradients())
        parameters = [p for part in parts for p in part.parameters if p.grad is not None]
        double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
        norm = torch.tensor(squared, dtype=torch.float64).sqrt()
        norm = norm if double else norm.float()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    # -- meeting the others ------------------------------------------------------------------

    def _arrive(self, *, finishing: bool) -> Roll:
        """Answer the others' rounds with weight 0 until nobody steps any more."""
        self.companions.away()
        while True:
            roll = self.strategy.answer(self._worker, finishing=finishing)
            if roll is not None and roll.stepping == 0:
                self.companions.back()
                return roll

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Inside, the model holds the mean of all workers; afterwards this worker's own again.

        A collective: every worker enters it, each after any number of steps. Evaluate and save
        inside. Its time and bytes do not count in ``stats``. Needs one model copy of memory.

        Raises:
            AttachError: after ``finish`` or ``detach``, or inside another ``consensus``.
        """
        self._require_active("consensus()")
        self._require_own_model("consensus()")
        start = self._fabric.now()
        with self._fabric.paused():
            roll = self._arrive(finishing=False)
            own = self._meet(roll)
        self._looking = True
        try:
            yield
        finally:
            self._looking = False
            self._worker.replica.restore(own)
            self._clock += self._fabric.now() - start

    def _meet(self, roll: Roll) -> list[Tensor]:
        """Take the mean of all models; returns the own one."""
        worker = self._worker
        own = worker.replica.snapshot()
        steps, news = worker.steps_since_sync, worker.has_news
        try:
            self.strategy.consensus(worker, roll)
        except BaseException:
            worker.replica.restore(own)
            raise
        worker.steps_since_sync, worker.has_news = steps, news
        return own

    def finish(self) -> None:
        """End training: all workers get the same parameters and buffers, and hooks are removed.

        A collective: every worker calls it, each after any number of steps. One that is early
        answers the others with weight 0 until all have come. Calling it again does nothing.
        """
        if not self._active:
            return
        self._require_own_model("finish()")
        worker = self._worker
        while True:
            roll = self._arrive(finishing=True)
            if roll.finishing == self._fabric.size:
                break
            with self._fabric.paused():  # the others are in consensus(): help, and go on waiting
                worker.replica.restore(self._meet(roll))
        self.strategy.drain(worker, roll)
        self.companions.leave()
        stats, fabric = self._stats, self._fabric
        stats.wait_seconds += fabric.wait_seconds - self._seen[0]
        stats.payload_bytes += fabric.payload_bytes - self._seen[1]
        self.detach()

    def detach(self) -> None:
        """Remove all hooks and leave this worker's model as it is. Not a collective."""
        if not self._active:
            return
        self._active = False
        self.companions.close()
        self.strategy.stop(self._worker)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._scaler is not None:
            self._scaler.remove()
        for thing in self._things:
            attached.discard(thing)
        for sink in self._sinks:
            sink.close()

    def _require_active(self, what: str) -> None:
        if not self._active:
            raise AttachError(f"{what} after finish() or detach(): attach again first")

    def _require_own_model(self, what: str) -> None:
        if self._looking:
            raise AttachError(
                f"{what} inside consensus(): there the model holds the mean of all workers for "
                "evaluation; leave the block first"
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
        optimizer are saved by their own ``state_dict``.
        """
        worker = self._worker
        self.strategy.settle(worker)
        return {
            "strategy": repr(self.strategy),
            "step": worker.step,
            "steps_since_sync": worker.steps_since_sync,
            "has_news": worker.has_news,
            "stats": dataclasses.asdict(self._stats),
            "state": save(worker.state),
            "wire": worker.wire_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``. Load the model's and the optimizer's state after attach.

        Raises:
            ValueError: it was saved under another strategy or wire.
        """
        if state["strategy"] != repr(self.strategy):
            raise ValueError(
                f"the state was saved under {state['strategy']}, this is {self.strategy!r}"
            )
        worker = self._worker
        worker.load_wire_state(state["wire"])
        worker.step = state["step"]
        worker.steps_since_sync = state["steps_since_sync"]
        worker.has_news = state["has_news"]
        totals = dict(state["stats"])
        worker.details.update(totals.pop("details"))
        self._stats = Stats(**totals, details=worker.details)
        load(worker.state, state["state"])
        self.strategy.resume(worker)
