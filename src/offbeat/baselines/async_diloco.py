"""Asynchronous DiLoCo: each worker sends its update to a server, which applies it on arrival.

θ is the server's model, x a worker's local model, and s the model from which the worker started its
current period. The *pseudo-gradient* s − x is the negative sum of the worker's local steps in this
period. ``server_strategy.py`` explains the terms of parameter servers.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.averaging.buckets import pack_mixed, unpack
from offbeat.baselines.server_strategy import ServerFlow, ServerState, ServerStrategy
from offbeat.baselines.shard import NO_CLOCK, Rule
from offbeat.strategies.base import (
    setting,
    transient,
)

_NOT_MEASURED = -1  # as the clock in a request, it leaves the worker's clock unchanged


@dataclass(eq=False)
class DelayedNesterovRule(Rule):
    """Algorithm 3 of the paper for one shard; see ``AsyncDiLoCo``.

    Attributes:
        lr: Outer learning rate η_o.
        momentum: Momentum μ.
        weight: Weight w of a pseudo-gradient.
        period: Number K of arrivals from one update of the momentum to the next.
        velocity: m, of the shape of the shard.
        buffer: D, the weighted sum of the pseudo-gradients since the last update of m.
        arrivals: Number of pseudo-gradients so far.
    """

    lr: float = transient(default=1.0)
    momentum: float = transient(default=0.0)
    weight: float = transient(default=1.0)
    period: int = transient(default=1)
    velocity: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    buffer: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    arrivals: int = 0

    @override
    def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
        self.arrivals += 1
        self.buffer.add_(values, alpha=self.weight)
        shard.add_(values, alpha=-self.lr * self.weight)
        if self.arrivals % self.period == 0:
            self.velocity.mul_(self.momentum).add_(self.buffer)
            self.buffer.zero_()
            shard.add_(self.velocity, alpha=-self.lr * self.momentum)


@dataclass
class AsyncDiLoCoState(ServerState):
    """State of an ``AsyncDiLoCoFlow``.

    Attributes:
        start: s as one vector.
        period_steps: H_n, number of local steps of the current period.
    """

    start: Tensor = field(default_factory=lambda: torch.empty(0, device="cpu"))
    period_steps: int = 1


class AsyncDiLoCoFlow(ServerFlow):
    """Handles the events of a training step for ``AsyncDiLoCo``.

    The server keeps the computing time per step of each worker, in microseconds, as its clock. The
    minimum over the workers, which every answer contains, is therefore that of the fastest worker.
    """

    strategy: "AsyncDiLoCo"
    state: AsyncDiLoCoState

    @override
    def rule(self, shard: Tensor) -> Rule:
        strategy, workers = self.strategy, self.worker.size
        period = strategy.momentum_period or workers
        return DelayedNesterovRule(
            lr=strategy.outer_lr,
            momentum=strategy.outer_momentum,
            weight=1 / math.sqrt(workers) if period == 1 else 1 / period,
            period=period,
            velocity=torch.zeros_like(shard),
            buffer=torch.zeros_like(shard),
        )

    @override
    def clocks(self) -> list[int]:
        return [NO_CLOCK] * self.worker.size  # not measured yet

    @override
    def initial_state(self, model: Tensor) -> AsyncDiLoCoState:
        self._timed_steps = -1
        return AsyncDiLoCoState(start=model.clone(), period_steps=self.strategy.period)

    @override
    def step_ended(self) -> bool:
        """At the end of a period: push s − x, wait for θ, set x ← θ, and return True."""
        state, server = self.state, self.server
        state.unpushed += 1
        self._timed_steps += 1
        if self._timed_steps == 0:
            self._clock_seconds = self._computing_seconds()
        if state.unpushed < state.period_steps:
            return False
        own = self._step_microseconds()
        self._stage_update()
        server.start("push_pull", clock=own)
        fastest = server.take(wait=True)
        assert fastest is not None
        unpack(server.vector, self.tensors)
        pack_mixed(self.tensors, state.start)  # differs from θ if x has a dtype of less precision
        if self.strategy.dynamic_steps and own != _NOT_MEASURED:
            state.period_steps = max(1, self.strategy.period * fastest // own)
        self.worker.details["period_steps"] = state.period_steps
        self._timed_steps, self._clock_seconds = 0, self._computing_seconds()
        self.report()
        return True

    def _stage_update(self) -> None:
        """Write s − x to the vector that is pushed next."""
        vector = self.server.vector
        pack_mixed(self.tensors, vector)
        torch.sub(self.state.start, vector, out=vector)
        self.check_push(vector)
        self.state.unpushed = 0

    @override
    def flush(self) -> None:
        """Start a push of the steps of an incomplete period."""
        self._stage_update()
        self.server.start("push")

    @override
    def barrier_reached(self, clock: int) -> None:
        self._timed_steps = -1  # the next step may contain an evaluation, so it is not timed

    def _computing_seconds(self) -> float:
        """Return the time since an arbitrary moment, without the time of waits."""
        team = self.worker.team
        return team.host.now() - team.account.wait_seconds

    def _step_microseconds(self) -> int:
        """Return the mean computing time of the timed steps of this period."""
        if self._timed_steps == 0:
            return _NOT_MEASURED
        seconds = self._computing_seconds() - self._clock_seconds
        return max(1, round(1e6 * seconds / self._timed_steps))


@dataclass(frozen=True, kw_only=True, repr=False)
class AsyncDiLoCo(ServerStrategy):
    """DiLoCo without a barrier: a server applies the update of each worker when it arrives.

    **Update** of worker n of N with the local model x. T is one step of the worker's optimizer (the
    inner optimizer) with the gradient g. θ is the server's model. At first s = x = θ:

        x ← T(x, g)                         H_n times
        send u = s − x
        x ← s ← answer                      θ after the server's step

    The server's step at arrival t = 1, 2, … is the *delayed Nesterov* step. It updates the momentum
    m in every K-th arrival only. D is the sum of the weighted updates since then. The weight w is
    1/K if K > 1, and 1/√N if K = 1:

        D ← D + w·u
        if t mod K = 0:  m ← μ·m + D;  D ← 0;  θ ← θ − η_o·(μ·m + w·u)
        otherwise:                             θ ← θ − η_o·w·u

    K arrivals together move θ as one step of DiLoCo does with the mean of K updates.
    With K = 1 every arrival is a Nesterov step, the method that the paper improves on, with the
    weight of the authors' code.

    *Dynamic local updates* let all periods take about as long. With H = ``period``, the number of
    steps in the next period of worker n is

        H_n = max(1, ⌊H · (step time of the fastest worker) / (step time of worker n)⌋)

    A step time is the mean computing time of a step in a worker's last period, without waits.
    Workers that have finished do not count. The first period has H steps.

    Args:
        period: H, local steps of the fastest worker between two exchanges (≥ 1).
        outer_lr: Outer learning rate η_o > 0.
        outer_momentum: Outer momentum μ in [0, 1).
        momentum_period: K ≥ 1, arrivals from one update of the momentum to the next. None: N.
        dynamic_steps: True for dynamic local updates. False: H_n = H.
        servers: See ``ServerStrategy``.

    *Communication*: the update to the server, and the model back, every H_n steps. A worker waits
    for its own exchange, and for no other worker. *Memory*: two flat copies of the model for s and
    the request, one for serving if all ranks serve, and on a server its shard of θ, m and D.
    *State*: s, H_n, and this rank's shard of θ, m and D.

    *Differs from the paper*: each shard counts its arrivals. The server never waits for further
    arrivals (the paper's grace period), and c is 0: only every K-th arrival applies the momentum. A
    worker keeps its data and learning-rate schedule; the paper's workers change between shards of
    the data, each with a schedule of its own. ``finish`` pushes the steps of an incomplete period.

    Source: Liu et al., "Asynchronous local-SGD training for language modeling", arXiv 2401.09135,
    Algorithm 3 and dynamic local updates. Their code: github.com/google-deepmind/asyncdiloco.
    """

    name: ClassVar[str] = "async_diloco"
    flow: ClassVar[type[ServerFlow]] = AsyncDiLoCoFlow
    period: int = setting(50, least=1)
    outer_lr: float = setting(0.7, above=0)
    outer_momentum: float = setting(0.9, least=0, below=1)
    momentum_period: int | None = setting(None, least=1)
    dynamic_steps: bool = True
