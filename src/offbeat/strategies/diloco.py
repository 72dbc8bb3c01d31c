"""DiLoCo: the workers take many local steps, then an outer optimizer applies the mean update."""

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from offbeat.strategies.base import GlobalModel, Outer, Strategy, SummedVotes, WorkerView, setting


@dataclass(frozen=True, kw_only=True, repr=False)
class DiLoCo(Strategy):
    """Each worker takes ``period`` steps, then an outer Nesterov step moves the global model.

    **Update**. θ is the global model, which is equal on all workers. x is the model of one worker
    (initially θ), g its gradient, and T the step of its optimizer, the inner optimizer:

        x ← T(x, g)                         H times
        Δ = Σ w·(θ − x) / Σ w               w = 1, or 0 for a worker without new steps
        v ← μ·v + Δ
        θ ← θ − η_o·(Δ + μ·v)
        x ← θ

    The inner optimizer is not reset. With ``outer_lr=1, outer_momentum=0`` and the other defaults
    this is local SGD.

    Streaming DiLoCo: the parameters, sorted by name, are divided into F ``fragments`` of about
    equal bytes. The workers *launch* (start to average) fragment f = 1 … F after
    the steps ⌊f·H/F⌋, ⌊f·H/F⌋ + H, ⌊f·H/F⌋ + 2H and so on. For example, with H = 100 and F = 2,
    fragment 1 is launched after steps 50, 150, …, and fragment 2 after steps 100, 200, …. With
    ``overlap`` k a launch at step t *lands* (is applied) at step t + k. The local steps since the
    launch are kept:

        x_f ← θ_f + (x_f(t+k) − x_f(t))

    Args:
        period: H, steps between two launches of the same fragment (≥ 1).
        outer_lr: Outer learning rate η_o > 0.
        outer_momentum: Outer momentum μ in [0, 1).
        fragments: Number of fragments F, from 1 to ``period``.
        overlap: Local steps k from launch to landing, from 0 to ``period`` − 1.

    *Communication*: every H steps one sum of the updates θ − x over the workers, fragment by
    fragment, and one mean of the buffers. The workers wait for a sum that has not arrived k steps
    after its launch.

    *Memory*, in copies of the model: two for θ and v, in the dtype of the parameters (float32 for
    float16 and bfloat16 parameters, and 2 bytes for the rounding error of each). Without overlap
    1/F more, for the fragment that is averaged. With overlap 2/F more for each fragment in flight,
    for its update and the sum. *State* in checkpoints: θ, v and the rounding errors. Saving first
    lands the fragments in flight.

    *Differs from the papers*: Streaming DiLoCo mixes θ with the worker's model in a fixed
    proportion; here all local steps are kept. Its fragments are strided layers; here they are
    contiguous, and may begin inside a tensor.

    Source: Douillard et al., "DiLoCo", arXiv 2311.08105, Algorithm 1; Douillard et al., "Streaming
    DiLoCo with overlapping communication", arXiv 2501.18512, Algorithm 2.
    """

    name: ClassVar[str] = "diloco"
    period: int = setting(100, least=1)
    outer_lr: float = setting(0.7, above=0)
    outer_momentum: float = setting(0.9, least=0, below=1)
    fragments: int = setting(1, least=1)
    overlap: int = setting(0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fragments > self.period:
            raise ValueError(
                "fragments must be at most period, because each fragment is launched after a "
                f"different step: got fragments={self.fragments} and period={self.period}"
            )
        if self.overlap >= self.period:
            raise ValueError(
                "overlap must be less than period, so that a fragment lands before it is launched "
                f"again: got overlap={self.overlap} and period={self.period}"
            )

    @override
    def averages(self) -> GlobalModel:
        return GlobalModel(
            parts=self.fragments,
            lands=self.overlap,
            outer=Outer(self.outer_lr, self.outer_momentum),
        )

    @override
    def due(self, worker: WorkerView) -> bool:
        """Return True if launch j = 1, 2, … is due, which is after ⌊j·H/F⌋ steps."""
        j, parts, period = worker.launches + 1, worker.count, self.period
        return worker.since_launch >= j * period // parts - (j - 1) * period // parts

    @override
    def decide(self, worker: WorkerView, sums: SummedVotes) -> float:
        return 1
