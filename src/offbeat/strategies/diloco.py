"""DiLoCo: many local steps, then an outer optimizer's step on what they changed, on average."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from typing_extensions import override

from offbeat.means import InFlight, Outer
from offbeat.means.in_flight import cut
from offbeat.strategies.base import (
    Averages,
    NonFinite,
    Roll,
    Round,
    Strategy,
    Vote,
    Worker,
    setting,
)


@dataclass
class DiLoCoState:
    """All fragments, and where the worker stands in the schedule."""

    fragments: list[InFlight]
    launches: int = 0  # the same on all workers
    launched_step: int = 0  # own step of the last one
    applied: int = 0

    @property
    def next(self) -> int:
        """The fragment that is launched next."""
        return self.launches % len(self.fragments)


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
    and the model is θ. With ``non_finite="leave_out"`` a worker that is left out goes on from θ.

    *Differs from the papers*: Streaming DiLoCo mixes θ with a worker's own model in a fixed
    proportion; here own steps are kept whole. Its fragments are strided layers and its outer
    gradients are sent in 4 bits; here they are contiguous, and the wire's precision is an option
    of ``attach``. Floating-point buffers take their mean with the last fragment (with overlap
    shifted by it, within the bounds of their own value and the mean), integer ones the maximum.

    Source: Douillard et al., "DiLoCo", arXiv 2311.08105, Algorithm 1; Douillard et al., "Streaming
    DiLoCo with overlapping communication", arXiv 2501.18512, Algorithm 2.
    """

    name: ClassVar[str] = "diloco"
    averages: ClassVar[Averages] = "updates"
    adapts: ClassVar[bool] = True
    continues: ClassVar[bool] = True
    non_finite: ClassVar[tuple[NonFinite, ...]] = ("warn", "raise", "leave_out")
    period: int = setting(100, least=1)
    outer_lr: float = setting(0.7, above=0)
    outer_momentum: float = setting(0.9, least=0, below=1)
    fragments: int = setting(1, least=1)
    overlap: int = setting(0, least=0)
    outer_dtype: Literal["float32", "bfloat16", "float64"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fragments > self.period:
            raise ValueError(
                "fragments must be at most period, as each is sent after a step of its own: got "
                f"fragments={self.fragments} and period={self.period}; lower the one or raise "
                "the other"
            )
        if self.overlap >= self.period:
            raise ValueError(
                "overlap must be less than period, so that a fragment lands before it is sent "
                f"again: got overlap={self.overlap} and period={self.period}"
            )

    @property
    def averages_state(self) -> bool:  # type: ignore[override]
        """At every mean of the last fragment, unless it is overlapped."""
        return not self.overlap

    @property
    def divides(self) -> bool:  # type: ignore[override]
        """Into fragments, if there are several."""
        return self.fragments > 1

    @override
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
        dtype = None if self.outer_dtype is None else getattr(torch, self.outer_dtype)
        fragments = []
        for i, part in enumerate(cut(tensors, self.fragments)):
            last = i == self.fragments - 1  # it takes the buffers along
            fragments.append(
                InFlight(
                    worker.team,
                    worker.wire,
                    part,
                    name=f"fragment {i + 1}",
                    anchored=True,
                    outer=Outer(self.outer_lr, self.outer_momentum),
                    dtype=dtype,
                    keeps_steps=self.overlap > 0,
                    buffers=worker.replica.float_buffers if last else tuple,
                    integers=worker.replica.integer_buffers if last else tuple,
                    step=worker.step,
                )
            )
            self._release(fragments[-1])
        return DiLoCoState(fragments, launched_step=worker.step)

    def _release(self, fragment: InFlight) -> None:
        """Free the staging memory of a fragment that is not in flight, while others have theirs."""
        if self.fragments > 1:
            fragment.release()

    def _interval(self, launch: int) -> int:
        """Steps from the launch before to this one: launch j = 1, 2, … is after step ⌊j·H/P⌋."""
        return launch * self.period // self.fragments - (launch - 1) * self.period // self.fragments

    @override
    def due(self, worker: Worker) -> bool:
        state: DiLoCoState = worker.state
        return worker.step - state.launched_step >= self._interval(state.launches + 1)

    @override
    def vote(self, worker: Worker, part: int, *, stepping: bool, finishing: bool) -> Vote:
        """Whether this worker has own steps: in the next fragment, in any, or not yet applied."""
        state: DiLoCoState = worker.state
        news = self._news(worker)
        apart = news or any(fragment.flying for fragment in state.fragments)
        moved = worker.step > state.fragments[state.next].launched_step
        return Vote(weight=float(moved), flag=apart, measure=float(news))

    def _news(self, worker: Worker) -> bool:
        """Whether this worker has own steps that it has not sent."""
        state: DiLoCoState = worker.state
        unsent = (worker.step > fragment.launched_step for fragment in state.fragments)
        return worker.touched or any(unsent)

    @override
    def iterated(self, worker: Worker) -> bool:
        """Apply the fragment launched k steps ago."""
        state: DiLoCoState = worker.state
        applied = state.applied
        worker.wire.advance()
        for i, fragment in enumerate(state.fragments):
            if fragment.flying and worker.step - fragment.launched_step >= self.overlap:
                self._land(worker, i)
        return state.applied > applied

    @override
    def act(self, worker: Worker, round: Round) -> bool:
        """Launch the fragment that is due; without overlap, apply it at once."""
        state: DiLoCoState = worker.state
        i, applied = state.next, state.applied
        fragment = state.fragments[i]
        # On a worker that took part without stepping fewer than k own steps may have passed.
        self._land(worker, i)
        contribute = round.own.weight != 0
        if worker.left_out:
            self.restore(worker)
        fragment.launch(
            round.then(lambda roll: roll.weight),
            contribute=contribute,
            step=worker.step,
            what=f"fragment {i + 1} at step {worker.step}",
        )
        state.launched_step = worker.step
        state.launches += 1
        worker.details["launched"] = state.launches
        worker.record["fragment"] = i + 1
        if not self.overlap:
            self._land(worker, i)
            if fragment is state.fragments[-1]:
                worker.models.average_optimizer_state(float(contribute), fragment.weight)
        return state.applied > applied

    @override
    def restore(self, worker: Worker) -> None:
        """x ← θ, all of it: other fragments may not be finite either."""
        for fragment in worker.state.fragments:
            fragment.restore()
            if not fragment.flying:
                fragment.launched_step = worker.step  # there is nothing of its own in it
        worker.forget_not_finite()

    def _land(self, worker: Worker, i: int) -> None:
        """The outer step on a fragment in flight. Waits if its sum has not arrived."""
        state: DiLoCoState = worker.state
        fragment = state.fragments[i]
        if not fragment.land(worker.step):
            return
        self._release(fragment)
        state.applied += 1
        worker.synchronized(worker.step - fragment.launched_step, news=self._news(worker))
        worker.record["applied"] = i + 1
        worker.details["applied"] = state.applied

    @override
    def consensus(self, worker: Worker, roll: Roll, *, final: bool) -> None:
        """The mean of the models as they are; what is in flight stays so.

        At the end it is applied first; who has sent everything holds θ by then.
        """
        if not final:
            worker.average_all(float(roll.own.flag), roll.flag, final=False)
            return
        news = self._news(worker)
        for i, fragment in enumerate(worker.state.fragments):
            self._land(worker, i)
            fragment.release()
        worker.average_all(float(news), roll.measure, final=True)

    @override
    def before_save(self, worker: Worker, meet: Callable[[], object]) -> None:
        """Let the fragments in flight arrive, without applying them."""
        for fragment in worker.state.fragments:
            fragment.wait()
