"""SSP, stale synchronous parallel: a parameter server that limits how far a worker may be ahead.

A worker's *clock* c is its number of local steps. z is the server's model. A worker's model x is
called its *cache*: a copy of z, to which the worker adds its own update u after each step. S is the
sum of the updates that the worker has not sent to the server yet. The cache is *fresh* up to clock
f if it contains the first f updates of every worker.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.extend import setting
from offbeat_lab.baselines.server_strategy import ServerFlow, ServerStrategy
from offbeat_lab.methods.tunable import Axis, Tunable


class SSPFlow(ServerFlow):
    """Handles the events of a training step for ``SSP``.

    Attributes:
        cache: x as one vector. Not used with a single worker.
        updates: S as one vector.
        clock: c, the number of local steps. Stays 0 with a single worker.
        fresh_clock: f, the clock up to which the cache is fresh.
        pulling: True if the last request pulls z.
    """

    strategy: "SSP"
    cache: Tensor
    updates: Tensor
    clock = fresh_clock = 0
    pulling = False

    @override
    def start(self) -> None:
        super().start()
        self.cache = self.server.vector.clone()
        self.updates = torch.zeros_like(self.cache)

    @override
    def step_ended(self) -> bool:
        """Push and pull as needed. Block while f < c − ``staleness``. True if x was refreshed."""
        worker = self.worker
        # A single worker copies its parameters to z. Adding their change to z would round.
        if worker.size == 1:
            self.model.read(0, self.server.shard.values)
            return True
        self._add_update()
        refreshed = self._take()
        self._send()
        while self.fresh_clock < self.clock - self.strategy.staleness:
            refreshed = self._take(wait=True) or refreshed
            self._send()
        self.model.write(0, self.cache)
        worker.record["staleness"] = max(0, self.clock - self.fresh_clock)
        worker.details["pulls"] = worker.details.get("pulls", 0) + refreshed
        self.update_details()
        return refreshed

    def _add_update(self) -> None:
        """x ← x + u; S ← S + u; c ← c + 1. In ranges, so that u needs little memory."""
        model = self.model
        for start, stop in model.ranges():
            cache = self.cache[start:stop]
            update = torch.empty_like(cache)
            model.read(start, update)
            update.sub_(cache).div_(self.worker.size)
            cache.add_(update)
            self.updates[start:stop].add_(update)
        self.clock += 1
        self.unpushed += 1

    def _take(self, *, wait: bool = False) -> bool:
        """Take the answer if it has arrived. If it contains z: x ← z + S, and return True.

        ``wait=True`` blocks until the answer has arrived.
        """
        clock = self.server.take(wait=wait)
        if clock is None or not self.pulling:
            return False
        torch.add(self.server.vector, self.updates, out=self.cache)
        self.fresh_clock = max(self.fresh_clock, clock)
        return True

    def _send(self) -> None:
        """Push S and pull z, unless a request is in flight or nothing is needed."""
        needed = self.clock - self.strategy.staleness  # a step ends when f ≥ needed
        if not self.server.idle or not (self.unpushed or self.fresh_clock < needed):
            return
        self.stage_push(self.updates)
        self.pulling = True
        min_clock = min(self.clock, needed + 1)
        self.server.start("push_pull", clock=self.clock, min_clock=min_clock)

    @override
    def flush(self) -> None:
        """Wait for the answer to the request in flight, then start the last push."""
        self.server.await_answer(release=True)
        self._take()
        self.stage_push(self.updates)
        self.server.start("push", clock=self.clock)
        self.pulling = False

    @override
    def barrier_reached(self, clock: int) -> None:
        # During the barrier, answers ignored the clocks of waiting workers, so f may be too large.
        self.fresh_clock = min(self.fresh_clock, clock)


@dataclass(frozen=True, kw_only=True, repr=False)
class SSP(ServerStrategy):
    """Workers push all updates to a server. A worker waits if it is too far ahead of another one.

    **Update**. x is the worker's model, a cached copy of the server's model z. T is the step of the
    worker's optimizer with the gradient g. The clock c is the worker's number of local steps, and s
    is ``staleness``. S is the sum of the updates that were not sent yet, N the number of workers:

        x̂ ← T(x, g);  u = (x̂ − x)/N
        x ← x + u;  S ← S + u;  c ← c + 1
        if the answer to the last request has arrived:
            x ← answer + S
        if no request is in flight:
            send S, c;  S ← 0;  the server: z ← z + S, and it answers with z
        while x may lack one of the first c − s updates of another worker (the *bound*):
            wait for an answer, then x ← answer + S, and send the next request

    The worker computes while a request is in flight. Updates made meanwhile add up in S and are
    sent with the next request. During training a worker waits only at the bound. Updates are
    divided by N, so a learning rate has the same meaning as under BSP, where the gradients of all
    workers are averaged in every step. With ``staleness=0`` and plain SGD this is BSP up to
    rounding.

    The server delays the answer until every worker's clock is at least min(c, c − s + 1). Clocks of
    c − s would satisfy the bound of this step, but not that of the next step. Workers that wait at
    a barrier, for example without further data, do not count.

    Args:
        staleness: s ≥ 0, the number of steps that a worker may be ahead of the slowest one.

    *Communication*: a request sends as many bytes as the model has, and its answer returns as
    many. At most one request is in flight. If the network is fast enough, a worker makes one
    request in each step. *Memory*: four flat copies of the model: cache, S, the request, and one
    for serving.

    *Differs from the paper*: the paper does not divide the updates by N. It refreshes single rows
    of x; this implementation refreshes the whole of x.

    Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
    server", NeurIPS 2013, §2-3.
    """

    name: ClassVar[str] = "ssp"
    flow: ClassVar[type[ServerFlow]] = SSPFlow
    tunable: ClassVar[Tunable] = Tunable((Axis("staleness"),), ({"staleness": 4},))
    staleness: int = setting(least=0)
