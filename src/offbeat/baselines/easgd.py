"""EASGD, elastic averaging SGD: workers and a centre on a server move towards each other.

x is a worker's local model, and z the *centre*, a model on the parameter server.
``server_strategy.py`` explains the terms of parameter servers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from offbeat.averaging.buckets import add_to, pack_mixed
from offbeat.averaging.worker import AttachedOptimizer
from offbeat.baselines.server_strategy import ServerFlow, ServerState, ServerStrategy
from offbeat.baselines.shard import Rule
from offbeat.strategies.base import (
    setting,
    transient,
)


@dataclass(eq=False)
class ElasticRule(Rule):
    """On a push of x: d = α(x − z), z ← z + d. A request that also pulls is answered with d.

    Attributes:
        differences: d of each worker's last push, by rank, until it is sent as the answer.
    """

    alpha: float = transient(default=0.0)
    differences: dict[int, Tensor] = transient(default_factory=dict)

    @override
    def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
        self.differences[source] = (values - shard).mul_(self.alpha)
        self._add_difference(shard, source)

    def _add_difference(self, shard: Tensor, source: int) -> None:
        """z ← z + d, where d is the difference of rank ``source``."""
        shard.add_(self.differences[source])

    @override
    def answer(self, shard: Tensor, *, source: int) -> Tensor:
        return self.differences.pop(source)


@dataclass(eq=False)
class SynchronousElasticRule(ElasticRule):
    """As ``ElasticRule``, but z changes only when all workers have pushed: z ← z + Σ d.

    So all workers compute d with the same z. The rule does not wait for workers at a barrier.

    Attributes:
        pending: (rank, d) of each push whose d was not added to z yet.
    """

    pending: list[tuple[int, Tensor]] = transient(default_factory=list)

    @override
    def _add_difference(self, shard: Tensor, source: int) -> None:
        self.pending.append((source, self.differences[source]))

    @override
    def clock_advanced(self, shard: Tensor) -> None:
        # The order of the ranks makes the rounding the same in every run.
        for _, difference in sorted(self.pending, key=lambda item: item[0]):
            shard.add_(difference)
        self.pending.clear()


@dataclass
class EASGDState(ServerState):
    """State of an ``EASGDFlow``: numbers of local steps and of exchanges with the centre."""

    steps: int = 0
    exchanges: int = 0


class EASGDFlow(ServerFlow):
    """Handles the events of a training step for ``EASGD``."""

    strategy: "EASGD"
    state: EASGDState
    _staged = False  # True if the vector to push contains the x before this local step

    @override
    def rule(self, shard: Tensor) -> Rule:
        kind = SynchronousElasticRule if self.strategy.synchronous else ElasticRule
        return kind(self.strategy.alpha_of(self.worker.size))

    @override
    def initial_state(self, model: Tensor) -> EASGDState:
        return EASGDState()

    @override
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        """Copy x, if the exchange at the end of this step needs the x before the step."""
        exchange = (self.state.steps + 1) % self.strategy.period == 0
        # With several optimizers, x is copied before the first one steps.
        if exchange and self.strategy.difference == "before_step" and not self._staged:
            pack_mixed(self.tensors, self.server.vector)
            self._staged = True
        return False

    @override
    def step_ended(self) -> bool:
        """At the end of a period: push x, wait for d, set x ← x − d, and return True."""
        state, server = self.state, self.server
        state.steps += 1
        state.unpushed += 1
        if state.steps % self.strategy.period:
            return False
        state.exchanges += 1
        if not self._staged:
            pack_mixed(self.tensors, server.vector)
        self.check_push(server.vector)
        if self.strategy.synchronous:
            server.start("push_pull", clock=state.exchanges, min_clock=state.exchanges)
        else:
            server.start("push_pull")
        server.take(wait=True)
        add_to(self.tensors, server.vector, -1.0)
        state.unpushed = int(self._staged)  # 1: the pushed x lacks this step
        self._staged = False
        self.report()
        return True

    @override
    def flush(self) -> None:
        """Push x once more: z moves towards x, and x does not change."""
        pack_mixed(self.tensors, self.server.vector)
        self.check_push(self.server.vector)
        self.state.unpushed = 0
        self.server.start("push")


@dataclass(frozen=True, kw_only=True, repr=False)
class EASGD(ServerStrategy):
    """Every ``period`` steps a worker and the centre z on the server move towards each other.

    **Update** of worker n of N with the local model x. T is the step of its optimizer with the
    gradient g. A step is x ← T(x, g). Every ``period``-th step also moves worker and centre by d, a
    fraction of their difference:

        d = α(x − z);  x ← T(x, g) − d;  z ← z + d
        synchronous:  d_n = α(x_n − z);  z ← z + Σ d_n            all workers use the same z

    With ``synchronous=True``, plain SGD and ``period=1`` these are Equations 3 and 4 of the paper.
    EAMSGD is EASGD with Nesterov momentum on the worker: ``torch.optim.SGD(..., momentum=δ,
    nesterov=True)``. An exchange does not change the momentum buffers.

    ``consensus`` replaces the local models by z temporarily, ``finish`` permanently.

    Args:
        period: τ ≥ 1, steps between two exchanges.
        alpha: α in (0, 1), the fraction of their difference by which worker and centre each move.
            None: 0.9/N.
        synchronous: True if all workers exchange at the same time and wait for each other. Requires
            α·N ≤ 1, because z would overshoot with a larger α.
        difference: "before_step": d is computed from the x before the step, as in the paper.
            "after_step": from the x after the step. This is stable for larger α. For example, with
            one worker, SGD with η < 2 and a quadratic loss of curvature 1, "before_step" requires
            α < (4 − 2η)/(4 − η), and "after_step" allows any α < 1.
        servers: See ``ServerStrategy``.

    *Communication*: the model to the server, and d back, every ``period`` steps; blocking.
    *Memory*: one flat copy of the model, one for serving if all ranks serve, and on a serving rank
    one copy of its shard for each exchange in flight. *State*: the counters and the centre.

    *Differs from the paper*: workers exchange at the last step of a period, in the paper at the
    first. ``finish`` moves z once more towards each worker that has steps since the x that it
    pushed last.

    Source: Zhang, Choromanska & LeCun, "Deep learning with elastic averaging SGD", NeurIPS 2015,
    Equations 3-4 (synchronous), Algorithms 1 (EASGD) and 2 (EAMSGD).
    """

    name: ClassVar[str] = "easgd"
    flow: ClassVar[type[ServerFlow]] = EASGDFlow
    period: int = setting(10, least=1)
    alpha: float | None = setting(None, above=0, below=1)
    synchronous: bool = False
    difference: Literal["before_step", "after_step"] = "before_step"

    @override
    def _check_run(self, workers: int, optimizers: Sequence[Optimizer]) -> None:
        super()._check_run(workers, optimizers)
        self.alpha_of(workers)

    def alpha_of(self, workers: int) -> float:
        """Return α for this number of workers."""
        alpha = 0.9 / workers if self.alpha is None else self.alpha
        if self.synchronous and alpha * workers > 1 + 1e-9:
            raise ValueError(
                f"synchronous EASGD requires alpha·N ≤ 1: at most {1 / workers:.4g} on {workers} "
                f"workers, got {alpha:g}"
            )
        return alpha
