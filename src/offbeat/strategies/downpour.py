"""Downpour SGD: workers push gradients to a server with its own optimizer, and fetch its model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from offbeat.fabric.shard import NEVER, RequestKind, Rule
from offbeat.means.replica import as_real, read, unpack
from offbeat.strategies.base import Part, Worker, setting, transient
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
        self._loaded, self._optimizer = state, None  # made anew with the next push


@dataclass
class DownpourState(ServerState):
    """Gradients not pushed yet, and what is on its way."""

    sum: Tensor = field(default_factory=lambda: torch.empty(0))
    asked: Tensor = field(default_factory=lambda: torch.empty(0))  # x at the last request for z
    asked_steps: int = 0
    asking: bool = False  # whether the request under way brings z
    push: bool = False  # whether it is time for it
    fetch: bool = False
    begun: bool = False  # whether this worker has waited for the warm-up
    places: dict[int, int] = transient(default_factory=dict)  # in the vector, by id of parameter
    steps: int = 0
    unpushed: int = 0  # own steps in ``sum``
    decayed: set[int] = transient(default_factory=set)  # optimizers whose λx is in ``sum`` already


@dataclass(frozen=True, kw_only=True, repr=False)
class Downpour(ServerStrategy):
    """Workers train by themselves, push accumulated gradients, and fetch the server's model.

    **Update**, at own step t, z the server's model, N workers, G the gradients since the last push:

        x ← T(x, g);  G ← G + η·(g + λx)/N        with server_lr: G ← G + (g + λx)
        when z has come:      x ← z + the own steps since it was asked for
        every n_push steps:   send C(G);  G ← G − C(G);  the server: z ← z − C(G)
                                               with server_lr: one step of its optimizer on C(G)
        every n_fetch steps:  ask for z

    A request travels while the worker computes, and there is one at a time: what is due meanwhile
    waits for its turn, and G goes on adding up. Nobody waits for anybody.

    The learning rate is applied once: by the worker, so that schedules and parameter groups keep
    their meaning (η is divided by N, which makes it mean what it means under BSP), or by the
    server, if ``server_lr`` is given. λ is the weight decay of the worker's optimizer. C is what
    the ``wire`` rounds to, so G ← 0 over an exact one; what rounding takes away waits in G, and
    ``finish`` sends it. z comes up to its rounding.

    Args:
        push_every: n_push ≥ 1.
        fetch_every: n_fetch ≥ 1.
        server_optimizer: "sgd", or "adagrad", which needs ``server_lr``.
        server_lr: > 0, used as it is: N workers push N times as often as one. None: see above.
        warmup_steps: Own steps that rank 0 takes alone before the others begin (≥ 0), with η in
            place of η/N. They wait in their first step, take z, and drop the gradient that they had
            taken at the initial model. They begin, too, when rank 0 looks at the consensus.
        servers: See ``ServerStrategy``; None is every rank.

    *Communication*: G every n_push steps and the model every n_fetch steps, or as often as the
    network allows; neither is waited for. *Memory*: three flat copies (G, what is sent or fetched,
    x at the request), one for serving where all ranks serve, and the server optimizer's state; over
    a lossy wire another N-th of one, and payloads. *State*: G, x at the request, a z that was not
    taken, the counters, the shard and its optimizer; over a lossy wire the mirrors.

    ``Stats.details`` tell the staleness of the pushes this rank served: how many pushes of others
    its server took in between its last answer to the worker and the worker's push.

    *Differs from the paper*: steps that a worker has taken while z was on its way stay in its
    model; there z replaces them. A leftover G is pushed by ``finish``. ``warmup_steps`` is its
    "warmstarting model training with only a single model replica".

    Source: Dean et al., "Large scale distributed deep networks", NeurIPS 2012, §4.1 and
    Algorithm 7.1.
    """

    name: ClassVar[str] = "downpour"
    push_every: int = setting(1, least=1)
    fetch_every: int = setting(1, least=1)
    server_optimizer: Literal["sgd", "adagrad"] = "sgd"
    server_lr: float | None = setting(None, above=0)
    warmup_steps: int = setting(0, least=0)

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
        before, base = worker.state, self.serve(worker)
        places, offset = {}, 0
        for tensor in base.tensors:
            places[id(tensor)] = offset
            offset += as_real(tensor.detach()).numel()
        state = DownpourState(base.server, base.tensors, places=places)
        state.sum, state.asked = torch.zeros_like(base.server.values), base.server.values.clone()
        if base.server.shard is not None:  # nobody waits for other clocks than that of rank 0
            base.server.shard.clocks[1:] = [NEVER] * (worker.size - 1)
        if worker.team.view:  # whoever has been lost, nobody trains alone again
            state.steps, state.begun = max(worker.step, self.warmup_steps), True
            state.asked_steps = state.steps
        if isinstance(before, DownpourState) and before.reunited:  # G is still to be pushed
            state.sum, state.unpushed = before.sum, before.unpushed
            worker.has_news = state.unpushed > 0 or state.server.lossy
        return state

    @override
    def carry(self, worker: Worker, place: slice, back: Tensor | None, *, lost: bool) -> None:
        """Steps that are not in z are in x."""
        state: DownpourState = worker.state
        if lost:
            state.sum[place] = 0
        elif back is not None:
            state.sum[place] += back
            state.unpushed = max(1, state.unpushed)

    @override
    def gradients(self, worker: Worker, part: Part) -> None:
        """G ← G + η·λx/N, while x is still where the gradient was taken."""
        state: DownpourState = worker.state
        if not state.begun:
            self._begin(worker)
        if part.index in state.decayed:
            return  # a GradScaler skipped the step: x has not moved since
        state.decayed.add(part.index)
        for group, parameter, scale in self._used(worker, part):
            decay = float(group.get("weight_decay", 0.0))
            if decay:
                value = as_real(parameter.detach())
                self._place(state, parameter, value).add_(value, alpha=scale * decay)

    def _begin(self, worker: Worker) -> None:
        """Let rank 0 train alone first, and go on from there."""
        state: DownpourState = worker.state
        state.begun = True
        if self.warmup_steps and worker.rank > 0:
            state.server.wait_for(self.warmup_steps)
            unpack(state.server.look(), state.tensors)
            for part in worker.parts:
                for parameter in part.parameters:
                    parameter.grad = None

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
        workers = 1 if worker.state.steps < self.warmup_steps and worker.rank == 0 else worker.size
        for group in part.optimizer.param_groups:
            scale = float(group["lr"]) / workers if self.server_lr is None else 1.0
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
        """Take z if it has come; push and ask when it is time and nothing is under way."""
        state: DownpourState = worker.state
        state.steps += 1
        state.unpushed += 1
        warm = state.steps == self.warmup_steps  # the others wait for this push
        state.push = state.push or warm or state.steps % self.push_every == 0
        state.fetch = state.fetch or state.steps % self.fetch_every == 0
        fetched = self._take(worker)
        self._send(worker)
        fetched = self._take(worker) or fetched  # a shard of one's own answers at once
        self.report(worker)
        return fetched

    def _take(self, worker: Worker) -> bool:
        """x ← z + own steps since the request, if z has come; whether it has."""
        state: DownpourState = worker.state
        if state.server.take() is None or not state.asking:
            return False
        if state.steps > state.asked_steps:
            _replace(state.tensors, state.asked, state.server.values)
        else:
            unpack(state.server.values, state.tensors)
        worker.steps_since_sync = state.steps - state.asked_steps
        return True

    def _send(self, worker: Worker) -> None:
        """Send what is due, unless something is under way."""
        state: DownpourState = worker.state
        if not state.server.free or not (state.push or state.fetch):
            return
        if state.push:
            self.look(worker, state.sum)
            state.server.hand_over(state.sum)
            state.unpushed = 0
        if state.fetch:
            read(state.tensors, state.asked)
            state.asked_steps = state.steps
        state.asking = state.fetch
        clock = state.steps if state.push and worker.rank == 0 else -1
        state.server.begin(_kind(state.push, state.fetch), clock=clock)
        state.push = state.fetch = False

    @override
    def flush(self, worker: Worker) -> None:
        """Push a leftover G, with all that rounding has kept in it."""
        state: DownpourState = worker.state
        if state.unpushed or state.server.lossy:
            state.server.settle()
            self._take(worker)
            self.look(worker, state.sum)
            state.server.stage().copy_(state.sum)
            state.sum.zero_()
            state.unpushed = 0
            state.server.push_last()


def _kind(push: bool, fetch: bool) -> RequestKind:
    """The request that does what is due."""
    return "push" if not fetch else "push_pull" if push else "pull"


def _replace(tensors: Sequence[Tensor], asked: Tensor, new: Tensor) -> None:
    """Tensors ← new + (tensors − asked), in the dtype of ``new``."""
    with torch.no_grad():
        offset = 0
        for tensor in tensors:
            target = as_real(tensor.detach())
            place = slice(offset, offset + target.numel())
            own = target.to(new) - asked[place].view(target.shape)
            target.copy_(own.add_(new[place].view(target.shape)))
            offset += target.numel()
