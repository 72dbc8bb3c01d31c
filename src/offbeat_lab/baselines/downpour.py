"""Downpour SGD: workers push gradients to a parameter server and fetch its model.

Symbols: x is a worker's local model, z the server's model. η and λ are the worker's learning rate
and weight decay. N is the number of workers. G is the sum of the scaled gradients that a worker has
not pushed yet. ``server_strategy.py`` explains the terms of parameter servers.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from offbeat import AttachError
from offbeat.extend import AttachedOptimizer, as_real, setting
from offbeat_lab.baselines.server_strategy import ServerFlow, ServerStrategy
from offbeat_lab.baselines.shard import Rule
from offbeat_lab.methods.tunable import Axis, Tunable


def _require_unchanged_gradients(group: dict[str, Any]) -> None:
    """Raise AttachError if SGD with Nesterov momentum overwrites the gradients that G needs.

    Its loops over all tensors at once do, which are torch's default on a GPU.
    """
    on_gpu = any(parameter.is_cuda for parameter in group["params"])
    if group.get("foreach") or (on_gpu and not group.get("fused")):
        raise AttachError(
            "downpour cannot read the gradients of SGD(nesterov=True, foreach=True), which "
            "overwrites them: give foreach=False"
        )


class OptimizerRule(Rule):
    """The server's optimizer, as in ``torch.optim``.

    SGD: z ← z − lr·G. Adagrad: q ← q + G²;  z ← z − lr·G/(√q + 1e-10).
    """

    def __init__(self, strategy: "Downpour") -> None:
        self._adagrad = strategy.server_optimizer == "adagrad"
        self._lr = 1.0 if strategy.server_lr is None else strategy.server_lr
        self._squares: Tensor | None = None  # q

    @override
    def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
        if not self._adagrad:
            shard.add_(values, alpha=-self._lr)
            return
        if self._squares is None:
            self._squares = torch.zeros_like(shard)
        self._squares.addcmul_(values, values)
        shard.addcdiv_(values, self._squares.sqrt().add_(1e-10), value=-self._lr)


class DownpourFlow(ServerFlow):
    """Futures the events of a training step for ``Downpour``.

    Attributes:
        gradients: G as one vector.
        requested: x at the last request for z.
        requested_step: ``steps`` at the last request for z.
        steps: Number of local steps.
        push_due: True if the next request must push G.
        fetch_due: True if the next request must pull z.
        fetching: True if the last request pulls z.
    """

    strategy: "Downpour"
    gradients: Tensor
    requested: Tensor
    requested_step = steps = 0
    push_due = fetch_due = fetching = False

    @override
    def start(self) -> None:
        super().start()
        self.requested = self.server.vector.clone()
        self.gradients = torch.zeros_like(self.requested)
        self._decayed: set[int] = set()  # indices of optimizers whose λx was added in this step
        offsets = itertools.accumulate(self.model.lengths, initial=0)
        # Offset in G of each parameter, by its id().
        self._offsets = dict(zip(map(id, self.tensors), offsets, strict=False))

    @override
    def rule(self) -> Rule:
        return OptimizerRule(self.strategy)

    # -- gradients -------------------------------------------------------------------------------

    @override
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        """Add the weight decay term λx to G, before the optimizer changes x."""
        # If a GradScaler skipped the previous step, λx was already added then.
        if optimizer.index not in self._decayed:
            self._decayed.add(optimizer.index)
            for group, parameter, scale in self._with_gradient(optimizer):
                decay = float(group.get("weight_decay", 0.0))
                if decay:
                    value = as_real(parameter.detach())
                    self._add(parameter, value, scale * decay)
        return False

    @override
    def optimizer_stepped(self, optimizer: AttachedOptimizer) -> None:
        """Add the gradients that the optimizer has just used to G."""
        self._decayed.discard(optimizer.index)
        for group, parameter, scale in self._with_gradient(optimizer):
            gradient = parameter.grad
            assert gradient is not None
            gradient = as_real(gradient.to_dense() if gradient.is_sparse else gradient)
            sign = -1 if group.get("maximize") else 1
            self._add(parameter, gradient, sign * scale)

    def _with_gradient(
        self, optimizer: AttachedOptimizer
    ) -> Iterator[tuple[dict[str, Any], nn.Parameter, float]]:
        """Yield (parameter group, parameter, factor in G) for each parameter with a gradient.

        The factor is 1 with ``server_lr``, and otherwise η/N.
        """
        for group in optimizer.optimizer.param_groups:
            if group.get("nesterov") and group.get("foreach") is not False:
                _require_unchanged_gradients(group)
            scale = 1.0
            if self.strategy.server_lr is None:
                scale = float(group["lr"]) / self.worker.size
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) in self._offsets:
                    yield group, parameter, scale

    def _add(self, parameter: nn.Parameter, value: Tensor, factor: float) -> None:
        """Add ``factor · value`` to the part of G, on the CPU, that belongs to ``parameter``."""
        offset = self._offsets[id(parameter)]
        part = self.gradients[offset : offset + value.numel()].view(value.shape)
        part.add_(value.to(part.device), alpha=factor)

    # -- requests --------------------------------------------------------------------------------

    @override
    def step_ended(self) -> bool:
        """Start a request if one is due, without waiting for answers. True if z has arrived."""
        strategy = self.strategy
        self.steps += 1
        self.unpushed += 1
        self.push_due = self.push_due or self.steps % strategy.push_every == 0
        self.fetch_due = self.fetch_due or self.steps % strategy.fetch_every == 0
        fetched = self._take()
        self._send()
        # The answer has arrived already if this rank holds the only shard.
        fetched = self._take() or fetched
        self.report()
        return fetched

    def _take(self) -> bool:
        """If z has arrived, x ← z + (x − x at the request), and return True."""
        server = self.server
        if server.take() is None or not self.fetching:
            return False
        model = self.model
        if self.steps == self.requested_step:
            model.write(0, server.vector)
            return True
        for start, stop in model.ranges():
            values = torch.empty_like(server.vector[start:stop])
            model.read(start, values)
            values.sub_(self.requested[start:stop]).add_(server.vector[start:stop])
            model.write(start, values)
        return True

    def _send(self) -> None:
        """Start a request if a push or a fetch is due and no request is in flight."""
        server = self.server
        push, fetch = self.push_due, self.fetch_due
        if not server.idle or not (push or fetch):
            return
        if push:
            self.stage_push(self.gradients)
        if fetch:
            self.model.read(0, self.requested)
            self.requested_step = self.steps
        server.start("push" if not fetch else "push_pull" if push else "pull")
        self.fetching, self.push_due, self.fetch_due = fetch, False, False

    @override
    def flush(self) -> None:
        """Wait for the answer to the request in flight, then start a push of the rest of G."""
        if self.unpushed:
            self.server.await_answer()
            self._take()
            self.stage_push(self.gradients)
            self.server.start("push")
            self.fetching = False


@dataclass(frozen=True, kw_only=True, repr=False)
class Downpour(ServerStrategy):
    """Workers train locally, push accumulated gradients to a server, and fetch its model.

    **Update** of a worker with the local model x. T is the step of its optimizer with the gradient
    g, the learning rate η and the weight decay λ. z is the server's model, N the number of workers,
    and G the sum of the scaled gradients since the last push:

        x ← T(x, g);  G ← G + η·(g + λx)/N        with server_lr: G ← G + (g + λx)
        if z has arrived:     x ← z + (x − x at the request for z)
        every n_push steps:   send G;  G ← 0;  the server: z ← z − G
                                               with server_lr: one step of its optimizer on G
        every n_fetch steps:  request z

    The worker computes while a request is in flight. At most one request is in flight. Pushes and
    fetches that become due meanwhile are part of the next request, and G continues to grow.

    By default G contains the factor η, so that schedules and the learning rates of parameter groups
    take effect. The division by N gives η the same meaning as under BSP, where the gradients of all
    workers are averaged in every step. With ``server_lr`` only the server applies a learning rate.

    Args:
        push_every: Steps between two pushes, n_push ≥ 1.
        fetch_every: Steps between two fetches, n_fetch ≥ 1.
        server_optimizer: "sgd", or "adagrad", which requires ``server_lr``.
        server_lr: Learning rate of the server's optimizer, > 0. It is not divided by N, although N
            workers push N times as often as one. None: the worker applies its learning rate.
        servers: See ``ServerStrategy``.

    *Communication*: G every n_push steps and the model every n_fetch steps, or less often if the
    network is too slow. *Memory*: three flat copies of the model: G, the buffer of the request,
    and x at the last request. If all ranks are servers, a rank's shard and its buffers add up to
    one more copy. A server also stores the state of its optimizer.

    On ranks with a shard, ``Stats.details`` contains the staleness of the pushes to it. The
    staleness of a push is the number of pushes by other workers since the last fetch of the worker
    that pushes.

    *Differs from the paper*: a worker adds to z the steps that it has taken while z was in flight.
    In the paper z replaces x, which loses these steps. ``finish`` pushes the rest of G. There is no
    warm-up with a single worker.

    Source: Dean et al., "Large scale distributed deep networks", NeurIPS 2012, §4.1 and
    Algorithm 7.1.
    """

    name: ClassVar[str] = "downpour"
    flow: ClassVar[type[ServerFlow]] = DownpourFlow
    tunable: ClassVar[Tunable] = Tunable((Axis("push_every"),))
    push_every: int = setting(1, least=1)
    fetch_every: int = setting(1, least=1)
    server_optimizer: Literal["sgd", "adagrad"] = "sgd"
    server_lr: float | None = setting(None, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.server_lr is None and self.server_optimizer == "adagrad":
            raise ValueError(
                'server_optimizer="adagrad" requires server_lr, usually larger than the learning '
                "rate of SGD, for example 0.1"
            )
