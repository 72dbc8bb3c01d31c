"""Elastic averaging SGD: workers and a centre pull at each other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from offbeat.fabric.shard import Rule
from offbeat.means.replica import move_towards, read
from offbeat.strategies.base import Costs, Forecast, Worker, setting
from offbeat.strategies.server import ServerState, ServerStrategy


class _Elastic(Rule):
    """z ← z + α(x − z), answered with the z before, from which the worker computes the same."""

    def __init__(self, alpha: Callable[[], float]) -> None:
        self._alpha = alpha  # asked each time: it may depend on how many workers there are
        self._before: dict[int, Tensor] = {}  # what each worker is answered with

    @override
    def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
        self._before[source] = shard.clone()
        shard.add_((values - shard).mul_(self._alpha()))

    @override
    def answer(self, shard: Tensor, *, source: int) -> Tensor:
        return self._before.pop(source)


class _ElasticTogether(_Elastic):
    """z ← z + α Σ (x − z) once all workers have pushed; answered with the z before."""

    def __init__(self, alpha: Callable[[], float]) -> None:
        super().__init__(alpha)
        self._total: Tensor | None = None
        self._pushed: list[int] = []

    @override
    def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
        distance = values - shard
        self._total = distance if self._total is None else self._total.add_(distance)
        self._pushed.append(source)

    @override
    def advance(self, shard: Tensor) -> None:
        if self._total is not None:
            self._before |= dict.fromkeys(self._pushed, shard.clone())
            shard.add_(self._total, alpha=self._alpha())
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
    period: int = setting(10, least=1)
    alpha: float | None = setting(None, above=0, below=1)
    synchronous: bool = False

    def _alpha(self, worker: Worker) -> float:
        return 0.9 / worker.size if self.alpha is None else self.alpha

    @override
    def rule(self, worker: Worker) -> Rule:
        """How the centre moves."""
        kind = _ElasticTogether if self.synchronous else _Elastic
        return kind(lambda: self._alpha(worker))

    @override
    def start(self, worker: Worker) -> EASGDState:
        """The centre is the model that all hold."""
        base = self.serve(worker)
        return EASGDState(base.server, base.tensors)

    @override
    def iterated(self, worker: Worker) -> bool:
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
        worker.synchronized()
        self.report(worker)
        return True

    @override
    def flush(self, worker: Worker) -> None:
        """The steps since the last exchange move the centre, too."""
        read(worker.state.tensors, worker.state.server.stage())
        worker.state.server.push()

    @override
    def forecast(self, costs: Costs) -> Forecast:
        """An exchange every τ steps, which is waited for.

            step = (τ·t + exchange)/τ
            synchronous:  step = (W(τ) + meeting)/τ

        At least what a server's link needs. The seconds are those of ``ServerCosts``.
        """
        server, period = costs.server(self.servers), self.period
        exchange = server.meeting_seconds() if self.synchronous else server.exchange_seconds()
        steps = costs.slowest(period) if self.synchronous else period * costs.step_seconds
        alpha = 0.9 / costs.workers if self.alpha is None else self.alpha
        return costs.forecast(
            self,
            step=max(steps + exchange, server.busy_seconds(1, 1)) / period,
            apart=period / alpha,
            payload=server.sent_bytes(1) / period,
            copies=1 + server.copies + 3 / server.servers,
            note=f"spreads an exchange of {costs.in_steps(exchange)} over {period}",
        )
