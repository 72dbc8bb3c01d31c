"""Elastic averaging SGD: workers and a centre pull at each other."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from offbeat.fabric.shard import Rule
from offbeat.replica import move_towards, read
from offbeat.strategies.base import Worker, require_integer, require_number
from offbeat.strategies.server import ServerState, ServerStrategy


class _Elastic(Rule):
    """z ← z + α(x − z), answered with the z before, from which the worker computes the same."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._before: dict[int, Tensor] = {}  # what each worker is answered with

    def push(self, shard: Tensor, values: Tensor, *, source: int, value: float) -> None:
        self._before[source] = shard.clone()
        shard.add_((values - shard).mul_(self._alpha))

    def answer(self, shard: Tensor, *, source: int) -> Tensor:
        return self._before.pop(source)


class _ElasticTogether(_Elastic):
    """z ← z + α Σ (x − z) once all workers have pushed; answered with the z before."""

    def __init__(self, alpha: float) -> None:
        super().__init__(alpha)
        self._total: Tensor | None = None
        self._pushed: list[int] = []

    def push(self, shard: Tensor, values: Tensor, *, source: int, value: float) -> None:
        distance = values - shard
        self._total = distance if self._total is None else self._total.add_(distance)
        self._pushed.append(source)

    def advance(self, shard: Tensor) -> None:
        if self._total is not None:
            self._before |= dict.fromkeys(self._pushed, shard.clone())
            shard.add_(self._total, alpha=self._alpha)
            self._total, self._pushed = None, []


@dataclass
class EASGDState(ServerState):
    """Own steps and exchanges."""

    steps: int = 0
    exchanges: int = 0


@dataclass(frozen=True, kw_only=True, repr=False)
class EASGD(ServerStrategy):
    """Every ``period`` steps a worker and the centre z on the server move towards each other.

    **Update** of worker n, every ``period`` own steps, N workers:

        x ← T(x, g)
        d = α(x − z);  x ← x − d;  z ← z + d                     x + z is conserved
        synchronous:  d_n = α(x_n − z), z ← z + Σ d_n             all at once, from the same z

    ``consensus`` and ``finish`` give z. EAMSGD is this with Nesterov momentum on the worker:
    ``torch.optim.SGD(..., momentum=δ, nesterov=True)``; an exchange leaves the velocity alone.

    Args:
        period: τ ≥ 1, steps between two exchanges.
        alpha: α in (0, 1), how far each moves. None is 0.9/N.
        synchronous: All workers exchange at once, and wait for each other.
        servers: See ``ServerStrategy``; None is every rank.

    *Communication*: the model to the server and back every ``period`` steps; waited for. *Memory*:
    one flat copy of the model, one for serving where all ranks serve, and for each exchange under
    way three of the shard. *State*: the counters and the centre.

    *Differs from the paper*: a last exchange by ``finish`` brings a leftover period into z.

    Source: Zhang, Choromanska & LeCun, "Deep learning with elastic averaging SGD", NeurIPS 2015,
    Equations 3-4 (synchronous), Algorithms 1 (EASGD) and 2 (EAMSGD).
    """

    name: ClassVar[str] = "easgd"
    period: int = 10
    alpha: float | None = None
    synchronous: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("period", self.period, least=1)
        if self.alpha is not None:
            require_number("alpha", self.alpha)
            if not 0 < self.alpha < 1:
                raise ValueError(f"alpha must be between 0 and 1, got {self.alpha}")
        if not isinstance(self.synchronous, bool):
            raise TypeError(f"synchronous must be true or false, got {self.synchronous!r}")

    def _alpha(self, worker: Worker) -> float:
        return 0.9 / worker.size if self.alpha is None else self.alpha

    def rule(self, worker: Worker) -> Rule:
        """How the centre moves."""
        alpha = self._alpha(worker)
        return _ElasticTogether(alpha) if self.synchronous else _Elastic(alpha)

    def start(self, worker: Worker) -> EASGDState:
        """The centre is the model that all hold."""
        base = self.serve(worker)
        return EASGDState(base.server, base.tensors)

    def after_step(self, worker: Worker) -> bool:
        """Exchange with the centre at the end of a period."""
        state: EASGDState = worker.state
        state.steps += 1
        if state.steps % self.period:
            return False
        state.exchanges += 1
        read(state.tensors, state.server.stage())
        clock = state.exchanges if self.synchronous else -1
        state.server.push_pull(clock=clock, least=max(clock, 0)).wait()
        move_towards(state.tensors, state.server.values, self._alpha(worker))
        worker.steps_since_sync = 0
        worker.has_news = False
        self.report(worker)
        return True

    def flush(self, worker: Worker) -> None:
        """The steps since the last exchange move the centre, too."""
        read(worker.state.tensors, worker.state.server.stage())
        worker.state.server.push()
