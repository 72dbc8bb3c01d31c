"""SSP, stale synchronous parallel: a parameter server that bounds the difference of clocks."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.averaging.buckets import as_real, pack_mixed, unpack
from offbeat.baselines.server_strategy import ServerFlow, ServerState, ServerStrategy
from offbeat.baselines.shard import Rule
from offbeat.strategies.base import setting


@dataclass
class SSPState(ServerState):
    """State of an ``SSPFlow``.

    Attributes:
        cache: The worker's cache x of the server's model, which is its model at the next step.
        updates: Sum S of the updates that were not sent.
        clock: Clock c, the number of local steps.
        fresh_clock: Clock below which the cache contains all updates of all workers.
        pulling: True if the last request pulls the server's model.
    """

    cache: Tensor = field(default_factory=lambda: torch.empty(0))
    updates: Tensor = field(default_factory=lambda: torch.empty(0))
    clock: int = 0
    fresh_clock: int = 0
    pulling: bool = False


class SSPFlow(ServerFlow):
    """The flow of ``SSP``."""

    strategy: "SSP"
    state: SSPState

    @override
    def rule(self, shard: Tensor) -> Rule:
        return Rule()  # z ← z + S

    @override
    def initial_state(self, model: Tensor) -> SSPState:
        return SSPState(cache=model.clone(), updates=torch.zeros_like(model))

    @override
    def step_ended(self) -> bool:
        state, worker = self.state, self.worker
        if worker.size == 1:  # without x + (x̂ − x), which rounds
            pack_mixed(self.tensors, self.server.vector)
            self.server.reset(self.server.vector)
            return True
        self._add_update()
        refreshed = self._take()
        self._send()
        while state.fresh_clock < state.clock - self.strategy.staleness:
            refreshed = self._take(wait=True) or refreshed
            self._send()
        unpack(state.cache, self.tensors)
        worker.record["staleness"] = max(0, state.clock - state.fresh_clock)
        worker.details["pulls"] = worker.details.get("pulls", 0) + refreshed
        self.report()
        return refreshed

    def _add_update(self) -> None:
        """x ← x + u; S ← S + u, tensor by tensor, so that u needs no copy of the model."""
        state, workers, offset = self.state, self.worker.size, 0
        for tensor in self.tensors:
            stepped = as_real(tensor.detach()).reshape(-1)
            place = slice(offset, offset + stepped.numel())
            cache = state.cache[place]
            update = (stepped.to(cache) - cache).div_(workers)
            cache.add_(update)
            state.updates[place].add_(update)
            offset = place.stop
        state.clock += 1
        state.unpushed += 1

    def _take(self, *, wait: bool = False) -> bool:
        """Take the answer of the last request, if it has arrived. Return True if x changed."""
        state, clock = self.state, self.server.take(wait=wait)
        if clock is None or not state.pulling:
            return False
        torch.add(self.server.vector, state.updates, out=state.cache)
        state.fresh_clock = max(state.fresh_clock, clock)
        return True

    def _send(self) -> None:
        """Start a request if none is in flight: push S, and pull the model if it is needed."""
        state, ahead = self.state, self.strategy.refresh == "ahead"
        needed = state.clock - self.strategy.staleness  # fresh_clock required by the next step
        too_old = state.fresh_clock < needed
        if not self.server.idle or not (state.unpushed or too_old):
            return
        self._stage()
        state.pulling = ahead or too_old
        if state.pulling:
            needed = min(state.clock, needed + ahead)
            self.server.start("push_pull", clock=state.clock, min_clock=needed)
        else:
            self.server.start("push", clock=state.clock)

    def _stage(self) -> None:
        """Move S to the vector of the next request."""
        self.check_push(self.state.updates)
        self.server.vector.copy_(self.state.updates)
        self.state.updates.zero_()
        self.state.unpushed = 0

    @override
    def flush(self) -> None:
        self.server.settle(release=True)
        self._take()
        self._stage()
        self.server.start("push", clock=self.state.clock)

    @override
    def barrier_reached(self, clock: int) -> None:
        # The clocks in answers leave out the workers at the barrier, which may be far behind.
        self.state.fresh_clock = min(self.state.fresh_clock, clock)


@dataclass(frozen=True, kw_only=True, repr=False)
class SSP(ServerStrategy):
    """Workers push every update to a server, and a worker waits if it is too far ahead of another.

    **Update** at clock c, after c local steps. x is the worker's model, a cache of the server's
    model z. S is the sum of the worker's updates that were not sent yet, N the number of workers:

        x̂ ← T(x, g);  u = (x̂ − x)/N
        x ← x + u;  S ← S + u;  c ← c + 1
        if the answer to the last request has arrived:
            x ← answer + S
        if no request is in flight:
            send S, c;  S ← 0;  the server: z ← z + S, and it answers with z
        while x may lack updates of clocks ≤ c − s − 1:
            wait for the answer, as above

    A request is in flight while the worker computes. Updates made meanwhile add up and are sent
    with the next request. The worker waits only at the bound. ``staleness=0`` with plain SGD is BSP
    up to rounding. Updates are divided by N, so a learning rate has the same meaning as under BSP.
    Any optimizer may produce the updates.

    The server delays an answer until the minimum clock of the workers is min(c, c − s + 1). With an
    older answer this worker could not begin the step after the next.

    Args:
        staleness: s, the number of clocks that a worker may be ahead of the slowest (≥ 0).
        refresh: Schedule of the refreshes of x. "ahead": as above, as often as the network allows.
            "lazy": only when the bound requires it; other requests only push. Between two lazy
            refreshes x contains only the worker's own updates, divided by N. Training then diverges
            for a large s with which "ahead" converges.
        servers: See ``ServerStrategy``.

    *Communication*: the model to the server and back, one exchange at a time, in each step if the
    network is fast enough; workers wait only at the bound. "lazy": the model to the server in each
    step, and back at each refresh; workers wait for the refresh. *Memory*: three flat copies of the
    model (cache, S, the request), and one for serving if all ranks serve. *State*: cache, S, an
    answer that was not taken, the clocks, and the shard.

    *Differs from the paper*: the server adds u/N, in the paper u. x is refreshed as a whole, in the
    paper in single rows.

    Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
    server", NeurIPS 2013, §2-3.
    """

    name: ClassVar[str] = "ssp"
    flow: ClassVar[type[ServerFlow]] = SSPFlow
    staleness: int = setting(least=0)
    refresh: Literal["ahead", "lazy"] = "ahead"
