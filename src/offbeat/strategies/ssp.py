"""SSP: stale synchronous parallel, a parameter server with a bound on how far workers part."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.fabric.shard import Rule
from offbeat.means.replica import read, unpack
from offbeat.strategies.base import Costs, Forecast, Worker, setting
from offbeat.strategies.forecast import number
from offbeat.strategies.server import ServerState, ServerStrategy


@dataclass
class SSPState(ServerState):
    """The worker's view of the server, and how old it is."""

    view: Tensor = field(default_factory=lambda: torch.empty(0))  # x at the start of this step
    clock: int = 0  # own steps
    slowest: int = 0  # the view includes all updates of clocks below this


@dataclass(frozen=True, kw_only=True, repr=False)
class SSP(ServerStrategy):
    """Workers push every update to a server, and wait only for one that is ``staleness`` behind.

    **Update** at clock c (c steps taken before), z the server's model, N workers:

        x̂ ← T(x, g);  u = (x̂ − x)/N
        x ← x + u;  z ← z + u                 the view keeps the worker's own updates
        c ← c + 1
        if the view may miss updates of clocks ≤ c − s − 1:
            wait until the slowest worker's clock ≥ c − s;  x ← z

    ``staleness=0`` is BSP, with plain SGD to rounding. Updates are divided by N so that a learning
    rate means what it means under BSP. Any optimizer may make them.

    Args:
        staleness: s, how many clocks a worker may be ahead of the slowest (≥ 0).
        servers: See ``ServerStrategy``; None is every rank.

    *Communication*: the model is pushed every step and pulled when the view is too old: every step
    for s = 0, every s + 1 steps when all are equally fast. Pushes do not wait; pulls do. *Memory*:
    two flat copies of the model (the view, what is sent or pulled), and one for serving where all
    ranks serve. *State*: the view, the clock, and the shard.

    *Differs from the paper*: there the server adds u, here u/N. The cache of the paper refreshes
    single rows, this one the whole model.

    Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
    server", NeurIPS 2013, §2-3.
    """

    name: ClassVar[str] = "ssp"
    staleness: int = setting(least=0)

    @override
    def rule(self, worker: Worker) -> Rule:
        """z ← z + u."""
        return Rule()

    @override
    def start(self, worker: Worker) -> SSPState:
        """The view is the model."""
        base = self.serve(worker)
        return SSPState(base.server, base.tensors, view=base.server.values.clone())

    @override
    def iterated(self, worker: Worker) -> bool:
        """Push the update; pull if the view has become too old."""
        state: SSPState = worker.state
        update = state.server.stage()
        read(state.tensors, update)
        if worker.size == 1 and state.server.shard is not None:
            state.server.shard.values.copy_(update)  # not by way of a difference, which rounds
            return True
        update.sub_(state.view).div_(worker.size)
        state.clock += 1
        worker.has_news = False  # everything is pushed
        least = state.clock - self.staleness
        pulled = state.slowest < least
        if pulled:
            handle = state.server.push_pull(clock=state.clock, least=least)
            state.slowest = handle.wait().clock
            state.view.copy_(state.server.values)
            worker.synchronized()
        else:
            state.view.add_(update)
            state.server.push(clock=state.clock)
        if pulled or worker.size > 1:
            unpack(state.view, state.tensors)
        worker.record["staleness"] = max(0, state.clock - state.slowest)
        worker.details["pulls"] = worker.details.get("pulls", 0) + pulled
        self.report(worker)
        return pulled

    @override
    def met(self, worker: Worker, clock: int) -> None:
        """A worker that was at the meeting may be far behind: the view is as old as its clock."""
        worker.state.slowest = min(worker.state.slowest, clock)

    @override
    def forecast(self, costs: Costs) -> Forecast:
        """A push at each step, which the next one waits for; at each q-th a pull with it.

            s = 0:  step = W(1) + meeting
            s > 0:  step = (C(q, 0) + (q − 1)·max(0, push − t) + exchange)/q

        q is s, or s − 1 where a push takes longer than a step: the shard of this rank answers at
        once, before it has the others' last pushes. The seconds are those of ``ServerCosts``.
        """
        server = costs.server(self.servers)
        step, push = costs.step_seconds, server.push_seconds()
        if self.staleness == 0:
            every, cycle = 1, costs.slowest(1) + server.meeting_seconds()
        else:
            every = max(1, self.staleness - (push > step))
            cycle = costs.pipelined(every, 0.0) + (every - 1) * max(0.0, push - step)
            cycle += server.exchange_seconds()
        return costs.forecast(
            self,
            step=max(cycle, server.busy_seconds(every, 1)) / every,
            apart=self.staleness,
            payload=server.sent_bytes(1),
            copies=2 + server.copies,
            note=f"a push of {costs.in_steps(push)} at each step, a pull every {number(every)}",
        )
