"""Elastic averaging SGD: workers and a centre pull at each other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from typing_extensions import override

from offbeat.fabric.link import Pushes
from offbeat.fabric.shard import Rule
from offbeat.means.replica import add_to, read
from offbeat.strategies.base import Part, Worker, setting, transient
from offbeat.strategies.server import ServerState, ServerStrategy


class _Elastic(Rule):
    """z ← z + d, d = α(x − z), answered with d, by which the worker moves, too.

    What the worker will get rounded is rounded before z moves, so that both move alike.
    """

    def __init__(self, alpha: Callable[[], float]) -> None:
        self._alpha = alpha  # asked each time: it may depend on how many workers there are
        self._moves: dict[int, Tensor] = {}  # d of each worker

    @override
    def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
        shard.add_(self._move(shard, values, source))

    def _move(self, shard: Tensor, values: Tensor, source: int) -> Tensor:
        """d, which is kept for the answer."""
        move = (values - shard).mul_(self._alpha())
        if source in self.links:
            self.links[source].round(move)
        self._moves[source] = move
        return move

    @override
    def answer(self, shard: Tensor, *, source: int) -> Tensor:
        return self._moves.pop(source)


class _ElasticTogether(_Elastic):
    """z ← z + Σ d once all workers have pushed, d = α(x − z) with the z before."""

    def __init__(self, alpha: Callable[[], float]) -> None:
        super().__init__(alpha)
        self._new: list[tuple[int, Tensor]] = []  # by which z has not moved yet, and whose

    @override
    def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
        self._new.append((source, self._move(shard, values, source)))

    @override
    def advance(self, shard: Tensor) -> None:
        for _, move in sorted(self._new, key=lambda one: one[0]):  # not as they arrived: rounding
            shard.add_(move)
        self._new.clear()


@dataclass
class EASGDState(ServerState):
    """Own steps and exchanges."""

    steps: int = 0
    exchanges: int = 0
    staged: bool = transient(default=False)  # whether this step's x is there


@dataclass(frozen=True, kw_only=True, repr=False)
class EASGD(ServerStrategy):
    """Every ``period`` steps a worker and the centre z on the server move towards each other.

    **Update** of worker n, N workers; all own steps but every ``period``-th are x ← T(x, g), and
    that one, with the gradient g and the difference d at the same x:

        d = α(x − z);  x ← T(x, g) − d;  z ← z + d                x + z is conserved but for T
        synchronous:  d_n = α(x_n − z), z ← z + Σ d_n             all at once, from the same z

    With plain SGD and period 1 these are Equations 3 and 4. They bear less α than an exchange of
    the model that has stepped already (``difference="after_step"``), which has the same fixed
    point: one worker on a quadratic of curvature 1 at learning rate η needs α < (4 − 2η)/(4 − η),
    the other any α < 1.

    Over a lossy ``wire`` the server takes d at x̂, a mirror of x that moves by C(x − x̂), and both
    move by C(d): x + z is conserved all the same.

    ``consensus`` and ``finish`` give z. EAMSGD is this with Nesterov momentum on the worker:
    ``torch.optim.SGD(..., momentum=δ, nesterov=True)``; an exchange leaves the velocity alone.

    Args:
        period: τ ≥ 1, steps between two exchanges.
        alpha: α in (0, 1), how far each moves. None is 0.9/N.
        synchronous: All workers exchange at once, and wait for each other. Needs α·N ≤ 1, or z
            would move past them.
        difference: "before_step": d is taken at the x of the gradient, as in the paper.
            "after_step": at the x after the step, x ← T(x, g), then d = α(x − z), x ← x − d.
        servers: See ``ServerStrategy``; None is every rank.

    *Communication*: the model to the server, and d back, every ``period`` steps; waited for.
    *Memory*: one flat copy of the model, one for serving where all ranks serve, and one of the
    shard for each exchange under way; over a lossy wire one for x̂, beside x, and payloads. *State*:
    the counters and the centre; over a lossy wire x̂, at both ends.

    *Differs from the paper*: exchanges come at the last step of a period, there at the first. A
    last one by ``finish`` brings into z the steps since; it moves z alone.

    Source: Zhang, Choromanska & LeCun, "Deep learning with elastic averaging SGD", NeurIPS 2015,
    Equations 3-4 (synchronous), Algorithms 1 (EASGD) and 2 (EAMSGD).
    """

    name: ClassVar[str] = "easgd"
    pushes: ClassVar[Pushes] = "models"
    period: int = setting(10, least=1)
    alpha: float | None = setting(None, above=0, below=1)
    synchronous: bool = False
    difference: Literal["before_step", "after_step"] = "before_step"

    @property
    def continues(self) -> bool:  # type: ignore[override]
        """Whether any number of workers will do."""
        return not self.synchronous or self.alpha is None

    def _alpha(self, workers: int) -> float:
        alpha = 0.9 / workers if self.alpha is None else self.alpha
        if self.synchronous and alpha * workers > 1 + 1e-9:
            raise ValueError(
                f"synchronous EASGD needs alpha·N ≤ 1: at most {1 / workers:.4g} on {workers} "
                f"workers, got {alpha:g}"
            )
        return alpha

    @override
    def rule(self, worker: Worker) -> Rule:
        """How the centre moves."""
        kind, team = _ElasticTogether if self.synchronous else _Elastic, worker.team
        return kind(lambda: self._alpha(team.size))

    @override
    def start(self, worker: Worker) -> EASGDState:
        """The centre is the model that all hold.

        Raises:
            ValueError: α·N > 1 and synchronous.
        """
        self._alpha(worker.size)
        base = self.serve(worker)
        return EASGDState(base.server, base.tensors)

    @override
    def gradients(self, worker: Worker, part: Part) -> None:
        """Keep the x at which these gradients were taken, if its difference is to be."""
        state: EASGDState = worker.state
        exchange = (state.steps + 1) % self.period == 0
        if exchange and self.difference == "before_step" and not state.staged:
            read(state.tensors, state.server.stage())  # of several optimizers none has stepped yet
            state.staged = True

    @override
    def iterated(self, worker: Worker) -> bool:
        """Exchange with the centre at the last step of a period."""
        state: EASGDState = worker.state
        state.steps += 1
        if state.steps % self.period:
            return False
        state.exchanges += 1
        if not state.staged:
            read(state.tensors, state.server.stage())
        self.look(worker, state.server.values)
        before, state.staged = state.staged, False
        clock = state.exchanges if self.synchronous else -1
        state.server.push_pull(clock=clock, least=max(clock, 0)).wait()
        add_to(state.tensors, state.server.values, -1.0)
        # The step that followed the difference is not in z.
        worker.synchronized(steps_since=int(before), news=before)
        self.report(worker)
        return True

    @override
    def flush(self, worker: Worker) -> None:
        """The steps since the last difference move the centre, too."""
        read(worker.state.tensors, worker.state.server.stage())
        self.look(worker, worker.state.server.values)
        worker.state.server.push()
