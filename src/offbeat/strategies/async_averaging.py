"""Asynchronous averaging: workers keep computing while their models are averaged."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from typing_extensions import override

from offbeat.strategies.base import GlobalModel, Outer, Strategy, WorkerView, setting


@dataclass(frozen=True, kw_only=True, repr=False)
class AsyncAveraging(Strategy):
    """Workers keep computing while their models are averaged, up to a bound on the staleness.

    P is the global model, which has the same bits on all workers. x is the local model of one
    worker. In a *launch* every worker takes a snapshot s of x, and the workers start to average
    their snapshots. The launch *lands* some local steps later: the mean moves P and x.

    **Update**. u = s − P is a worker's update. Its weight w is 1, or 0 for a worker without new
    steps. At the landing, in this order:

        P ← Σ w·s / Σ w                       = P + mean(u), the paper's next P (Lemma 3.1)
        x ← x + (P − s)                       = x + mean(u) − u (Algorithm 2)

    With ``outer_lr`` or ``outer_momentum``, an outer step moves P:

        D = Σ w·u / Σ w
        v ← μ·v + D;  P ← P + η_o·(D + μ·v)   Nesterov; P ← P + D by default

    ``schedule="cyclic"`` (Algorithm 2): the workers launch every β = τ/2 local steps. A launch
    lands β steps later, just before the next launch. If the mean has not arrived by then, the
    worker waits for it.

    ``schedule="eager"`` (Algorithm 1): a launch lands at the end of the local step in which its
    mean has arrived, and the worker launches again at once. The mean starts when the last worker
    has launched. During training a worker waits while its newest landed snapshot is τ local steps
    old, and for a twentieth of the time at most for a mean that is about to arrive.

    Args:
        staleness: τ, the largest age of a worker's newest landed snapshot, in local steps (cyclic:
            even, ≥ 2; eager: ≥ 1).
        schedule: Times of the launches: "cyclic" (periodic) or "eager" (as often as possible).
        outer_lr: Outer learning rate η_o > 0.
        outer_momentum: Outer momentum μ in [0, 1).

    *Communication*: for each launch one sum of the models over the workers, and eight numbers per
    worker, its vote. Both overlap with local steps.

    *Memory*, in copies of the model: one for s, one for the sum in flight, and one for P if it is
    stored. P is stored with an outer step, with a ``wire`` other than "float32", and in the eager
    schedule, which needs another copy while a mean lands. Outer momentum adds v, and a quantized
    wire the quantization errors of the sums (at most 1/N of a copy). *State* in checkpoints: P, v
    and these errors. Saving first lands what is in flight.

    *Differs from the paper*: a worker that does not store P sends s instead of u. The result is the
    same in exact arithmetic. Line 22 of Algorithm 1 discards local steps, which are kept here. The
    paper has neither outer momentum nor an eager schedule without a master.

    Source: "Asynchronous SGD without gradient delay for efficient distributed training", ICLR 2019
    submission, Algorithms 1 and 2.
    """

    name: ClassVar[str] = "async"
    staleness: int = setting(16, least=1)
    schedule: Literal["cyclic", "eager"] = "cyclic"
    outer_lr: float = setting(1.0, above=0)
    outer_momentum: float = setting(0.0, least=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule == "cyclic" and (self.staleness < 2 or self.staleness % 2):
            raise ValueError(
                "staleness must be even and at least 2 with the cyclic schedule, because a cycle "
                f"has staleness/2 steps; got {self.staleness}"
            )

    @override
    def averages(self) -> GlobalModel:
        outer = Outer(self.outer_lr, self.outer_momentum)
        if self.schedule == "cyclic":
            return GlobalModel(lands=self.staleness // 2, outer=outer)
        return GlobalModel(lands="arrived", bound=self.staleness, outer=outer)

    @override
    def due(self, worker: WorkerView) -> bool:
        return self.schedule == "eager" or 2 * worker.since_launch >= self.staleness
