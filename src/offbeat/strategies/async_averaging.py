"""Asynchronous averaging: workers keep computing while their models are averaged."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from typing_extensions import override

from offbeat.strategies.base import Outer, SharedModel, Strategy, WorkerView, setting


@dataclass(frozen=True, kw_only=True, repr=False)
class AsyncAveraging(Strategy):
    """Workers keep computing while their models are averaged. The staleness is bounded.

    **Update**. P is the last shared model, u the update of a worker since then. A worker launches
    its snapshot s = P + u. When the mean of all snapshots lands, some local steps later:

        P ← Σ w·s / Σ w                       = P + mean(u), the paper's next P (Lemma 3.1)
        x ← x + (P − s)                       = x + mean(u) − u (Algorithm 2)

    With outer momentum, and over a lossy ``wire``, workers send updates instead of snapshots:

        m = Σ w·(s − P) / Σ w
        v ← μ·v + m;  P ← P + η_o·(m + μ·v)   Nesterov

    ``schedule="cyclic"`` (Algorithm 2): the workers launch every β = τ/2 local steps. A launch
    lands β steps later, just before the next one. The workers wait if it has not arrived by then.

    ``schedule="eager"`` (Algorithm 1): the workers launch as soon as the last launch has landed and
    every worker has taken a step since. A small sum, for which no worker waits, tells them so. A
    launch lands at the first step boundary after its arrival. A worker waits when it is τ local
    steps past P.

    Args:
        staleness: τ, the largest number of local steps past the shared model (cyclic: even, ≥ 2;
            eager: ≥ 1).
        schedule: Time of the launches: "cyclic" (periodic) or "eager" (as often as possible).
        outer_lr: Outer learning rate η_o > 0.
        outer_momentum: Outer momentum μ in [0, 1).

    *Communication*: one mean of the model and seven numbers a launch, overlapped with τ/2 steps.
    *Memory*: two flat copies of the model (the snapshot and the sum in flight), and a third inside
    ``consensus``. Outer momentum adds two, P and v. A lossy wire adds P and the quantization
    errors. ``non_finite="exclude"`` adds P, as does "raise" with the eager schedule. *State*: all
    of these.

    *Differs from the paper*: over an exact wire workers send models instead of updates. This is the
    same in exact arithmetic, needs no copy of x_init, and gives all workers the same P, so rounding
    errors cannot drive the workers apart. Line 22 of Algorithm 1 would discard local steps; here
    they are kept. Outer momentum and the eager schedule without a master are ours.

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
    def averages(self) -> SharedModel:
        outer = Outer(self.outer_lr, self.outer_momentum)
        if self.schedule == "cyclic":
            return SharedModel(lands=self.staleness // 2, outer=outer)
        return SharedModel(lands="arrived", bound=self.staleness, outer=outer)

    @override
    def due(self, worker: WorkerView) -> float:
        if self.schedule == "cyclic":
            return float(2 * worker.since_launch >= self.staleness)
        return float(worker.since_launch > 0 and worker.ready)
