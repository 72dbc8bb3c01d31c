"""DiLoCo: many local steps, then an outer optimizer's step on what they changed, on average."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from offbeat.fabric import Handle
from offbeat.replica import Bucket, as_real, make_buckets, pack, staging_dtype, unpack
from offbeat.strategies.base import (
    Roll,
    Strategy,
    Worker,
    require_integer,
    require_number,
    transient,
)


@dataclass
class Fragment:
    """Parameters that are synchronized together. Lists hold one tensor a bucket."""

    theta: list[Tensor]  # θ, the same on all workers
    velocity: list[Tensor]  # v, likewise; with momentum
    sums: list[Tensor]  # the buckets' staging: Σ w·(θ − x), once arrived; with overlap
    own: list[Tensor]  # x at the launch; with overlap
    number: int = transient()  # from 1
    buckets: list[Bucket] = transient()
    flying: bool = False  # launched and not yet applied
    weight: float = 0.0  # Σ w, once known
    launched_step: int = 0  # own step of the last launch
    roll: Handle[Roll] | None = transient(default=None)
    handles: list[tuple[Tensor, Handle[Tensor]]] = transient(default_factory=list)


@dataclass
class DiLoCoState:
    """All fragments, and where the worker stands in the schedule."""

    fragments: list[Fragment]
    buffer_sums: list[Tensor]  # floating-point buffers, which travel with the last fragment
    buffer_own: list[Tensor]  # what they were at the launch
    largest: list[Tensor]  # maximum of the integer buffers: one tensor, or none
    steps: int = 0  # own steps
    launches: int = 0  # the same on all workers
    launched_step: int = 0  # own step of the last one
    applied: int = 0
    roll: Handle[Roll] | None = transient(default=None)  # called before this step

    @property
    def next(self) -> Fragment:
        """The fragment that is launched next."""
        return self.fragments[self.launches % len(self.fragments)]

    def news(self, fragment: Fragment) -> bool:
        """Whether this worker has taken a step since ``fragment`` was launched."""
        return self.steps > fragment.launched_step


@dataclass(frozen=True, kw_only=True, repr=False)
class DiLoCo(Strategy):
    """Each worker takes ``period`` steps, then an outer Nesterov step moves the common model.

    **Update**. θ is the common model, x a worker's own, which starts from it:

        x ← T(x, g)                         H times
        Δ = Σ w·(θ − x) / Σ w               w = 1; 0 for a worker that has no new step
        v ← μ·v + Δ
        θ ← θ − η_o·(Δ + μ·v)
        x ← θ

    The inner optimizer's state is kept. ``outer_lr=1, outer_momentum=0`` is local SGD.

    Streaming: with P ``fragments`` the parameters are cut, in name order, into P parts of about
    equal bytes. Fragment p = 1 … P is synchronized after the steps t ≡ ⌊p·H/P⌋ (mod H), so each
    exactly every H steps, and what is sent at a time shrinks by P. With ``overlap`` k the sum that
    starts after step t is waited for, and applied, after step t + k only:

        x_p ← θ_p + (x_p(t+k) − x_p(t))     the own steps since the launch are kept

    Args:
        period: H, steps between two synchronizations of the same parameters (≥ 1).
        outer_lr: η_o > 0.
        outer_momentum: μ in [0, 1).
        fragments: P, from 1 to ``period`` and at most the number of parameter tensors.
        overlap: k, steps for which a sum travels unnoticed, from 0 to ``period`` − 1.
        outer_dtype: In which θ and v are kept: "float32", "bfloat16" or "float64". None: that in
            which the parameters are summed, float32 for the half types, else their own.

    *Communication*: every H steps one sum over the model, in P parts, and one mean of its buffers;
    blocking, or overlapped with k steps. *Memory*: θ, v, and 1/P of the model while it is sent;
    with overlap the whole sums and a snapshot, four flat copies. *State*: all of these, counters;
    kept in checkpoints, those in flight too.

    ``consensus`` and ``finish`` take the mean of the models of all workers that have moved since
    they last sent everything; those that have not hold θ. ``finish`` applies what is in flight
    first. After a whole number of periods, with one fragment and no overlap, nobody has moved,
    and the model is θ.

    *Differs from the papers*: Streaming DiLoCo mixes θ with a worker's own model in a fixed
    proportion; here own steps are kept whole. Its fragments are strided layers and its outer
    gradients are sent in 4 bits; here they are contiguous, and the wire's precision is an option
    of ``attach``. Floating-point buffers take their mean with the last fragment (with overlap
    shifted by it, within the bounds of their own value and the mean), integer ones the maximum.

    Source: Douillard et al., "DiLoCo", arXiv 2311.08105, Algorithm 1; Douillard et al., "Streaming
    DiLoCo with overlapping communication", arXiv 2501.18512, Algorithm 2.
    """

    name: ClassVar[str] = "diloco"
    period: int = 100
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    overlap: int = 0
    outer_dtype: Literal["float32", "bfloat16", "float64"] | None = None

    def __post_init__(self) -> None:
        require_integer("period", self.period, least=1)
        require_number("outer_lr", self.outer_lr)
        if not 0 < self.outer_lr < float("inf"):
            raise ValueError(f"outer_lr must be positive and finite, got {self.outer_lr}")
        require_number("outer_momentum", self.outer_momentum)
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(f"outer_momentum must be in [0, 1), got {self.outer_momentum}")
        require_integer("fragments", self.fragments, least=1)
        if self.fragments > self.period:
            raise ValueError(
                "fragments must be at most period, as each is sent after a step of its own: got "
                f"fragments={self.fragments} and period={self.period}; lower the one or raise "
                "the other"
            )
        require_integer("overlap", self.overlap, least=0)
        if self.overlap >= self.period:
            raise ValueError(
                "overlap must be less than period, so that a fragment lands before it is sent "
                f"again: got overlap={self.overlap} and period={self.period}"
            )
        if self.outer_dtype not in (None, "float32", "bfloat16", "float64"):
            raise ValueError(
                'outer_dtype must be None, "float32", "bfloat16" or "float64", '
                f"got {self.outer_dtype!r}"
            )

    @property
    def averages_state(self) -> bool:
        """At every mean of the last fragment, unless it is overlapped."""
        return not self.overlap

    def start(self, worker: Worker) -> DiLoCoState:
        """θ is the model that every worker holds.

        Raises:
            ValueError: there are more fragments than parameter tensors.
        """
        tensors = [p for _, p in worker.replica.parameters if p.numel()]
        if self.fragments > len(tensors):
            raise ValueError(
                f"fragments must be at most {len(tensors)}, the number of parameter tensors of "
                f"this model, got {self.fragments}: a tensor is not divided"
            )
        parts = _divide([_staged_bytes(t) for t in tensors], self.fragments)
        buffers = [b.flat for b in make_buckets(worker.replica.float_buffers())]
        elements = sum(t.numel() for t in worker.replica.integer_buffers())
        device = worker.fabric.control_device
        return DiLoCoState(
            [self._fragment(n, tensors[part]) for n, part in enumerate(parts, 1)],
            buffer_sums=buffers,
            buffer_own=[torch.empty_like(b) for b in buffers],
            largest=[torch.empty(elements, dtype=torch.int64, device=device)] if elements else [],
        )

    def _fragment(self, number: int, tensors: Sequence[Tensor]) -> Fragment:
        buckets = make_buckets(tensors)
        dtype = None if self.outer_dtype is None else getattr(torch, self.outer_dtype)
        theta = [b.pack().to(dtype or b.flat.dtype, copy=True) for b in buckets]
        fragment = Fragment(
            theta,
            velocity=[torch.zeros_like(t) for t in theta] if self.outer_momentum else [],
            sums=[b.flat for b in buckets] if self.overlap else [],
            own=[torch.empty_like(b.flat) for b in buckets] if self.overlap else [],
            number=number,
            buckets=buckets,
        )
        self._release(fragment)
        return fragment

    def _release(self, fragment: Fragment) -> None:
        """Free the staging memory of a fragment that is not in flight, while others have theirs."""
        if self.fragments > 1 and not self.overlap:
            for bucket in fragment.buckets:
                bucket.release()

    def _interval(self, launch: int) -> int:
        """Steps from the launch before to this one: launch j = 1, 2, … is after step ⌊j·H/P⌋."""
        return launch * self.period // self.fragments - (launch - 1) * self.period // self.fragments

    def before_step(self, worker: Worker) -> None:
        """Call the roll while the optimizer steps, if a fragment is due after this step."""
        state: DiLoCoState = worker.state
        coming = state.steps + 1 - state.launched_step
        if worker.completes_iteration and coming >= self._interval(state.launches + 1):
            state.roll = worker.call_roll(stepping=True, weight=1.0)

    def after_step(self, worker: Worker) -> bool:
        """Apply the fragment launched k steps ago; launch the one that is due."""
        state: DiLoCoState = worker.state
        state.steps += 1
        applied = state.applied
        worker.wire.advance()
        for fragment in state.fragments:
            if fragment.flying and state.steps - fragment.launched_step >= self.overlap:
                self._land(worker, fragment)
                worker.record["applied"] = fragment.number
        if state.roll is not None:
            fragment = state.next
            roll, state.roll = state.roll, None
            self._launch(worker, roll, contribute=True)
            worker.record["fragment"] = fragment.number
            if not self.overlap:
                self._land(worker, fragment)
                self._average_state(worker, fragment, contribute=True)
                worker.record["applied"] = fragment.number
        return state.applied > applied

    def _launch(self, worker: Worker, roll: Handle[Roll], *, contribute: bool) -> None:
        """Start the sum of w·(θ − x) of the next fragment; w is whether to ``contribute``."""
        state: DiLoCoState = worker.state
        fragment = state.next
        # On a worker that answered for a while fewer than k own steps may have passed.
        self._land(worker, fragment)
        what = f"fragment {fragment.number} at step {worker.step}"
        for i, (bucket, theta) in enumerate(zip(fragment.buckets, fragment.theta, strict=True)):
            flat = bucket.pack()
            if self.overlap:
                fragment.own[i].copy_(flat)
            if contribute:
                torch.sub(theta, flat, out=flat)
            stream = f"fragment {fragment.number} bucket {i}"
            handle = worker.wire.sum(flat, stream=stream, what=what, contribute=contribute)
            fragment.handles.append((flat, handle))
        if fragment is state.fragments[-1]:
            fragment.handles += self._launch_buffers(worker, contribute)
        fragment.roll, fragment.flying = roll, True
        fragment.launched_step = state.launched_step = state.steps
        state.launches += 1
        worker.details["launched"] = state.launches

    def _launch_buffers(
        self, worker: Worker, contribute: bool
    ) -> list[tuple[Tensor, Handle[Tensor]]]:
        """Start the mean of the floating-point buffers and the maximum of the integer ones."""
        state: DiLoCoState = worker.state
        what = f"mean of the buffers at step {worker.step}"
        handles = []
        buckets = worker.replica.buckets("buffers")
        for bucket, flat, own in zip(buckets, state.buffer_sums, state.buffer_own, strict=True):
            pack(bucket.tensors, own)
            pack(bucket.tensors, flat, float(contribute))
            handles.append((flat, worker.fabric.sum(flat, what=what)))
        for flat in state.largest:
            parts = worker.replica.integer_buffers()
            torch.cat([t.reshape(-1).to(flat) for t in parts], out=flat)
            handles.append((flat, worker.fabric.maximum(flat, what=what)))
        return handles

    def settle(self, worker: Worker) -> None:
        """Let the fragments in flight arrive, without applying them."""
        for fragment in worker.state.fragments:
            self._await(fragment)

    def _await(self, fragment: Fragment) -> None:
        if fragment.roll is not None:
            roll, fragment.roll = fragment.roll.wait(), None
            fragment.weight = roll.weight
        for flat, handle in fragment.handles:
            flat.copy_(handle.wait())
        fragment.handles = []

    def _land(self, worker: Worker, fragment: Fragment) -> None:
        """The outer step on a fragment in flight. Waits if its sum has not arrived."""
        if not fragment.flying:
            return
        self._await(fragment)
        fragment.flying = False
        for i, (bucket, theta) in enumerate(zip(fragment.buckets, fragment.theta, strict=True)):
            dtype = torch.promote_types(theta.dtype, bucket.flat.dtype)
            step = bucket.flat.div_(fragment.weight).to(dtype)  # Δ
            if self.outer_momentum:
                velocity = fragment.velocity[i].to(dtype).mul_(self.outer_momentum).add_(step)
                fragment.velocity[i].copy_(velocity)
                step.add_(velocity, alpha=self.outer_momentum)
            theta.copy_(theta.to(dtype).sub_(step, alpha=self.outer_lr))
            if self.overlap:
                since = bucket.pack().sub_(fragment.own[i])
                unpack(since.to(dtype).add_(theta), bucket.tensors)
            else:
                unpack(theta, bucket.tensors)
        if fragment is worker.state.fragments[-1]:
            self._land_buffers(worker, fragment.weight)
        self._release(fragment)
        self._note(worker, fragment)

    def _land_buffers(self, worker: Worker, weight: float) -> None:
        """Float buffers ← mean + own change since the launch, between their own value and the mean.

        Where nothing has changed since, always so without overlap, that is the mean itself.
        """
        state: DiLoCoState = worker.state
        buckets = worker.replica.buckets("buffers")
        for bucket, mean, own in zip(buckets, state.buffer_sums, state.buffer_own, strict=True):
            mean.div_(weight)
            now = torch.empty_like(own)
            pack(bucket.tensors, now)
            low, high = torch.minimum(now, mean), torch.maximum(now, mean)
            shifted = (mean + (now - own)).clamp_(low, high)
            # Apart, because infinity − infinity, as in a mask, is no number.
            unpack(torch.where(now == own, mean, shifted), bucket.tensors)
        for largest in state.largest:
            tensors = worker.replica.integer_buffers()
            parts = largest.split([t.numel() for t in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(torch.maximum(tensor.to(part), part.view(tensor.shape)))

    def _note(self, worker: Worker, fragment: Fragment) -> None:
        state: DiLoCoState = worker.state
        state.applied += 1
        worker.steps_since_sync = state.steps - fragment.launched_step
        worker.has_news = any(map(state.news, state.fragments))
        worker.details["applied"] = state.applied

    def answer(self, worker: Worker, *, finishing: bool) -> Roll:
        """Join the sum that others launch, if they do; leave others in flight as they are."""
        state: DiLoCoState = worker.state
        contribute = state.news(state.next)
        news, apart = self._moved(state)
        called = worker.call_roll(
            stepping=False,
            finishing=finishing,
            flag=apart,
            measure=news,
            weight=float(contribute),
        )
        roll = called.wait()
        if roll.stepping:
            fragment = state.next
            self._launch(worker, called, contribute=contribute)
            if not self.overlap:
                self._land(worker, fragment)
                self._average_state(worker, fragment, contribute=contribute)
        return roll

    def _average_state(self, worker: Worker, fragment: Fragment, *, contribute: bool) -> None:
        """The inner optimizers' state, with the last fragment, if the user wants it averaged."""
        if fragment is worker.state.fragments[-1]:
            weights = Roll(fragment.weight, 0, 0, 0, 0.0, float(contribute))
            worker.average_optimizer_state(weights)

    def _moved(self, state: DiLoCoState) -> tuple[bool, bool]:
        """Whether there are own steps that were never sent; or these or some not yet applied."""
        news = any(map(state.news, state.fragments))
        return news, news or any(fragment.flying for fragment in state.fragments)

    def consensus(self, worker: Worker, roll: Roll) -> None:
        """The mean of the models as they are; what is in flight stays so."""
        _, apart = self._moved(worker.state)
        everyone = dataclasses.replace(roll, weight=roll.flag, own_weight=float(apart))
        worker.average(everyone, exact=True, lean=True, what="consensus")

    def drain(self, worker: Worker, roll: Roll) -> None:
        """Apply what is in flight, then take the mean; who sent everything holds θ by then."""
        news, _ = self._moved(worker.state)
        for fragment in worker.state.fragments:
            self._land(worker, fragment)
        everyone = dataclasses.replace(roll, weight=roll.measure, own_weight=float(news))
        worker.average(everyone, exact=True, lean=True, what="final mean")


def _staged_bytes(tensor: Tensor) -> int:
    return as_real(tensor.detach()).numel() * staging_dtype(tensor).itemsize


def _divide(sizes: Sequence[int], parts: int) -> list[slice]:
    """Contiguous, non-empty parts, cut at the places nearest to 1/P, 2/P, … of the total."""
    before = [0, *itertools.accumulate(sizes)]
    cuts = [0]
    for part in range(1, parts):
        target = before[-1] * part / parts
        places = range(cuts[-1] + 1, len(sizes) - parts + part + 1)
        cuts.append(min(places, key=lambda place: abs(before[place] - target)))
    return [slice(a, b) for a, b in itertools.pairwise([*cuts, len(sizes)])]
