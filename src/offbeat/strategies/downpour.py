"""Downpour SGD: workers push gradients to a server with its own optimizer, and fetch its model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from offbeat.fabric.shard import Rule
from offbeat.means.replica import as_real, unpack
from offbeat.strategies.base import Costs, Forecast, Part, Worker, setting, transient
from offbeat.strategies.server import ServerState, ServerStrategy


class _Optimize(Rule):
    """One step of an optimizer on the shard for each push."""

    def __init__(self, kind: str, lr: float) -> None:
        self._make: Any = torch.optim.Adagrad if kind == "adagrad" else torch.optim.SGD
        self._lr = lr
        self._optimizer: torch.optim.Optimizer | None = None
        self._parameter: nn.Parameter | None = None
        self._loaded: dict[str, Any] = {}

    @override
    def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
        if self._optimizer is None or self._parameter is None:
            self._parameter = nn.Parameter(shard)  # the same memory
            self._optimizer = self._make([self._parameter], lr=self._lr)
            if self._loaded:
                self._optimizer.load_state_dict(self._loaded)
        self._parameter.grad = values
        self._optimizer.step()
        self._parameter.grad = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._loaded if self._optimizer is None else self._optimizer.state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state
        if self._optimizer is not None and state:
            self._optimizer.load_state_dict(state)


@dataclass
class DownpourState(ServerState):
    """Gradients not pushed yet."""

    sum: Tensor = field(default_factory=lambda: torch.empty(0))
    places: dict[int, int] = transient(default_factory=dict)  # in the vector, by id of parameter
    steps: int = 0
    unpushed: int = 0  # own steps in ``sum``
    decayed: set[int] = transient(default_factory=set)  # optimizers whose λx is in ``sum`` already


@dataclass(frozen=True, kw_only=True, repr=False)
class Downpour(ServerStrategy):
    """Workers train by themselves, push accumulated gradients, and fetch the server's model.

    **Update**, at own step t, z the server's model, N workers, G the gradients since the last push:

        x ← T(x, g);  G ← G + η·(g + λx)/N        with server_lr: G ← G + (g + λx)
        every n_push steps:   send G;  G ← 0;  the server: z ← z − G
                                               with server_lr: one step of its optimizer on G
        every n_fetch steps:  x ← z

    The learning rate is applied once: by the worker, so that schedules and parameter groups keep
    their meaning (η is divided by N, which makes it mean what it means under BSP), or by the
    server, if ``server_lr`` is given. λ is the weight decay of the worker's optimizer.

    Args:
        push_every: n_push ≥ 1.
        fetch_every: n_fetch ≥ 1.
        server_optimizer: "sgd", or "adagrad", which needs ``server_lr``.
        server_lr: > 0, used as it is: N workers push N times as often as one. None: see above.
        servers: See ``ServerStrategy``; None is every rank.

    *Communication*: G every n_push steps, which nobody waits for unless the one before has not
    left; the model every n_fetch steps, which is waited for. *Memory*: two flat copies (G, what is
    sent or fetched), one for serving where all ranks serve, and the server optimizer's state.
    *State*: G, the counters, the shard and its optimizer.

    ``Stats.details`` tell the staleness of the pushes this rank served: how many pushes of others
    its server took in between the worker's download and its push.

    *Differs from the paper*: a fetch waits for its answer, so that it is clear which steps follow.
    A leftover G is pushed by ``finish``.

    Source: Dean et al., "Large scale distributed deep networks", NeurIPS 2012, §4.1 and
    Algorithm 7.1.
    """

    name: ClassVar[str] = "downpour"
    push_every: int = setting(1, least=1)
    fetch_every: int = setting(1, least=1)
    server_optimizer: Literal["sgd", "adagrad"] = "sgd"
    server_lr: float | None = setting(None, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server_lr is None and self.server_optimizer == "adagrad":
            raise ValueError(
                'server_optimizer="adagrad" needs server_lr, usually larger than the learning rate '
                "of SGD, for example 0.1"
            )

    @override
    def rule(self, worker: Worker) -> Rule:
        """One step of the server's optimizer."""
        return _Optimize(self.server_optimizer, 1.0 if self.server_lr is None else self.server_lr)

    @override
    def start(self, worker: Worker) -> DownpourState:
        """Nothing is accumulated."""
        base = self.serve(worker)
        places, offset = {}, 0
        for tensor in base.tensors:
            places[id(tensor)] = offset
            offset += as_real(tensor.detach()).numel()
        state = DownpourState(base.server, base.tensors, places=places)
        state.sum = torch.zeros_like(base.server.values)
        return state

    @override
    def gradients(self, worker: Worker, part: Part) -> None:
        """G ← G + η·λx/N, while x is still where the gradient was taken."""
        state: DownpourState = worker.state
        if part.index in state.decayed:
            return  # a GradScaler skipped the step: x has not moved since
        state.decayed.add(part.index)
        for group, parameter, scale in self._used(worker, part):
            decay = float(group.get("weight_decay", 0.0))
            if decay:
                value = as_real(parameter.detach())
                self._place(state, parameter, value).add_(value, alpha=scale * decay)

    @override
    def stepped(self, worker: Worker, part: Part) -> None:
        """G ← G + η·g/N, with the gradients that one optimizer has just used."""
        state: DownpourState = worker.state
        state.decayed.discard(part.index)
        for group, parameter, scale in self._used(worker, part):
            gradient = parameter.grad
            assert gradient is not None
            gradient = as_real(gradient.to_dense() if gradient.is_sparse else gradient)
            sign = -1 if group.get("maximize") else 1
            self._place(state, parameter, gradient).add_(gradient, alpha=sign * scale)

    def _used(
        self, worker: Worker, part: Part
    ) -> Iterator[tuple[dict[str, Any], nn.Parameter, float]]:
        """Parameters of one optimizer that have a gradient: their group, and η/N."""
        places = worker.state.places
        for group in part.optimizer.param_groups:
            scale = float(group["lr"]) / worker.size if self.server_lr is None else 1.0
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) in places:
                    yield group, parameter, scale

    @staticmethod
    def _place(state: DownpourState, parameter: nn.Parameter, like: Tensor) -> Tensor:
        """The part of G that belongs to ``parameter``, in the shape of ``like``."""
        offset = state.places[id(parameter)]
        return state.sum[offset : offset + like.numel()].view(like.shape)

    @override
    def iterated(self, worker: Worker) -> bool:
        """Push and fetch when it is time."""
        state: DownpourState = worker.state
        state.steps += 1
        state.unpushed += 1
        push = state.steps % self.push_every == 0
        fetch = state.steps % self.fetch_every == 0
        if push:
            self._stage(worker)
        if fetch:
            (state.server.push_pull() if push else state.server.pull()).wait()
            unpack(state.server.values, state.tensors)
            worker.steps_since_sync = 0
        elif push:
            state.server.push()
        self.report(worker)
        return fetch

    def _stage(self, worker: Worker) -> None:
        state: DownpourState = worker.state
        state.server.stage().copy_(state.sum)
        state.sum.zero_()
        state.unpushed = 0

    @override
    def flush(self, worker: Worker) -> None:
        """Push a leftover G."""
        if worker.state.unpushed:
            self._stage(worker)
            worker.state.server.push()

    @override
    def forecast(self, costs: Costs) -> Forecast:
        """Follows the pushes and fetches of one worker until both fall into the same step.

            at a push or a fetch:  w ← w + what the last push still needs
            both:     w ← w + exchange
            a fetch:  w ← w + pull
            step = t + w/steps

        At least what a server's link needs. The seconds are those of ``ServerCosts``.
        """
        server = costs.server(self.servers)
        steps = math.lcm(self.push_every, self.fetch_every)
        pushes = set(range(self.push_every, steps + 1, self.push_every))
        fetches = set(range(self.fetch_every, steps + 1, self.fetch_every))
        waited = arrives = 0.0
        for event in sorted(pushes | fetches):
            now = event * costs.step_seconds + waited
            waited += max(0.0, arrives - now)
            if event in pushes & fetches:
                waited += server.exchange_seconds()
            elif event in fetches:
                waited += server.pull_seconds()
            else:
                arrives = event * costs.step_seconds + waited + server.push_seconds()
        cycle = steps * costs.step_seconds + waited
        shown = costs.in_steps(server.push_seconds()), costs.in_steps(server.pull_seconds())
        return costs.forecast(
            self,
            step=max(cycle, server.busy_seconds(len(pushes), len(fetches))) / steps,
            apart=max(self.push_every, self.fetch_every),
            payload=server.sent_bytes(len(pushes), len(fetches - pushes)) / steps,
            copies=2 + server.copies + (self.server_optimizer == "adagrad") / server.servers,
            note="a push takes {}, a fetch {}".format(*shown),
        )
