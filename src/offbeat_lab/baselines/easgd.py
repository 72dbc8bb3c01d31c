"""EASGD, elastic averaging SGD: workers and a centre on a server move towards each other.

x is a worker's local model, and z the *centre*, a model on the parameter server.
``server_strategy.py`` explains the terms of parameter servers.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from offbeat.extend import AttachedOptimizer, setting
from offbeat_lab.baselines.server_strategy import ServerFlow, ServerStrategy
from offbeat_lab.baselines.shard import Rule
from offbeat_lab.methods.tunable import Axis, Tunable


class ElasticRule(Rule):
    """On a push of x: d = α(x − z), z ← z + d. A request that also pulls is answered with d."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._differences: dict[int, Tensor] = {}  # d by rank, until it is sent as the answer

    @override
    def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
        difference = self._differences[source] = (values - shard).mul_(self._alpha)
        shard.add_(difference)

    @override
    def answer(self, shard: Tensor, *, source: int) -> Tensor:
        return self._differences.pop(source)


class EASGDFlow(ServerFlow):
    """Handles the events of a training step for ``EASGD``.

    Attributes:
        steps: Number of local steps.
    """

    strategy: "EASGD"
    steps = 0
    _staged = False  # True if the vector to push contains the x before this local step

    @override
    def rule(self) -> Rule:
        alpha = self.strategy.alpha
        return ElasticRule(0.9 / self.worker.size if alpha is None else alpha)

    @override
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        """Copy x for the exchange at the end of this step, which needs the x before the step."""
        # With several optimizers, x is copied before the first one steps.
        if (self.steps + 1) % self.strategy.period == 0 and not self._staged:
            self.model.read(0, self.server.vector)
            self._staged = True
        return False

    @override
    def step_ended(self) -> bool:
        """At the end of a period: push x, wait for d, set x ← x − d, and return True."""
        server = self.server
        self.steps += 1
        self.unpushed += 1
        if self.steps % self.strategy.period:
            return False
        if not self._staged:
            self.model.read(0, server.vector)
        self.check_push(server.vector)
        server.start("push_pull")
        server.take(wait=True)
        self.model.add(0, -server.vector)
        self.unpushed = int(self._staged)  # 1: the pushed x lacks this step
        self._staged = False
        self.update_details()
        return True

    @override
    def flush(self) -> None:
        """Push x once more: z moves towards x, and x does not change."""
        self.model.read(0, self.server.vector)
        self.check_push(self.server.vector)
        self.unpushed = 0
        self.server.start("push")


@dataclass(frozen=True, kw_only=True, repr=False)
class EASGD(ServerStrategy):
    """Every ``period`` steps a worker and the centre z on the server move towards each other.

    **Update** of worker n of N with the local model x. T is the step of its optimizer with the
    gradient g. A step is x ← T(x, g). Every ``period``-th step also moves worker and centre by d, a
    fraction of their difference:

        d = α(x − z);  x ← T(x, g) − d;  z ← z + d

    EAMSGD is EASGD with Nesterov momentum on the worker: ``torch.optim.SGD(..., momentum=δ,
    nesterov=True)``. An exchange does not change the momentum buffers.

    ``consensus`` replaces the local models by z temporarily, ``finish`` permanently.

    Args:
        period: τ ≥ 1, steps between two exchanges.
        alpha: α in (0, 1), the fraction of their difference by which worker and centre each move.
            None: 0.9/N.

    *Communication*: the model to the server, and d back, every ``period`` steps; blocking.
    *Memory*: one flat copy of the model, one for serving, and one copy of the rank's shard for each
    exchange in flight.

    *Differs from the paper*: workers exchange at the last step of a period, in the paper at the
    first. There is no synchronous exchange. ``finish`` moves z once more towards each worker that
    has steps since the x that it pushed last.

    Source: Zhang, Choromanska & LeCun, "Deep learning with elastic averaging SGD", NeurIPS 2015,
    Algorithms 1 (EASGD) and 2 (EAMSGD).
    """

    name: ClassVar[str] = "easgd"
    flow: ClassVar[type[ServerFlow]] = EASGDFlow
    tunable: ClassVar[Tunable] = Tunable((Axis("period"),))
    period: int = setting(10, least=1)
    alpha: float | None = setting(None, above=0, below=1)
