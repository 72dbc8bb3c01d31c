"""SSP: stale synchronous parallel, a parameter server with a bound on how far workers part."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.fabric.shard import Rule
from offbeat.means.replica import as_real, read, unpack
from offbeat.strategies.base import Worker, setting
from offbeat.strategies.server import ServerState, ServerStrategy


@dataclass
class SSPState(ServerState):
    """The worker's view of the server, how old it is, and what is on its way."""

    view: Tensor = field(default_factory=lambda: torch.empty(0))  # x at the start of this step
    sum: Tensor = field(default_factory=lambda: torch.empty(0))  # S, own updates not sent yet
    unsent: int = 0  # how many of them
    clock: int = 0  # own steps
    slowest: int = 0  # the view includes all updates of clocks below this
    asking: bool = False  # whether the request under way brings the server's model
    asked: int = 0  # the clock at which the last one that does was sent


@dataclass(frozen=True, kw_only=True, repr=False)
class SSP(ServerStrategy):
    """Workers push every update to a server, and wait only for one that is ``staleness`` behind.

    **Update** at clock c (c steps taken before), z the server's model, N workers, S the own updates
    that were not sent yet:

        x̂ ← T(x, g);  u = (x̂ − x)/N
        x ← x + u;  S ← S + u;  c ← c + 1         the view keeps the worker's own updates
        if the answer to the last request has come:
            x ← answer + S                        what it cannot contain yet stays
        if no request is under way:
            send C(S), c;  S ← S − C(S);  the server: z ← z + C(S), and it answers with z
        while the view may miss updates of clocks ≤ c − s − 1:
            wait for the answer, as above

    So a request travels while the worker computes, and updates made meanwhile add up and go with
    the next one. The worker waits only at the bound. ``staleness=0`` is BSP, with plain SGD to
    rounding. Updates are divided by N so that a learning rate means what it means under BSP. Any
    optimizer may make them. C is what the ``wire`` rounds to, so S ← 0 over an exact one; what
    rounding takes away waits in S, and ``finish`` sends it. An answer is z up to its rounding.

    The server holds an answer back until the slowest worker's clock is min(c, c − s + 1), because
    with an older one this worker could not begin the step after the next.

    Args:
        staleness: s, how many clocks a worker may be ahead of the slowest (≥ 0).
        refresh: When the view is refreshed. "ahead": as above, as often as the network allows.
            "lazy": only when the bound demands it; requests before that push and ask for nothing.
            Between two refreshes a worker then sees its own updates alone, divided by N, and large
            s diverges where the other does not.
        servers: See ``ServerStrategy``; None is every rank.

    *Communication*: the model to the server and back, one such exchange at a time, each step if the
    network is fast enough; only the bound is waited for. Lazily: the model to the server, likewise,
    and back at each refresh, which is waited for. *Memory*: three flat copies of the model (the
    view, S, what is sent and answered), and one for serving where all ranks serve; over a lossy
    wire another N-th of one, and payloads. *State*: view, S, an answer that was not taken, the
    clocks, and the shard; over a lossy wire the mirrors.

    *Differs from the paper*: there the server adds u, here u/N. The cache of the paper refreshes
    single rows, this one the whole model.

    Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter
    server", NeurIPS 2013, §2-3.
    """

    name: ClassVar[str] = "ssp"
    staleness: int = setting(least=0)
    refresh: Literal["ahead", "lazy"] = "ahead"

    @override
    def rule(self, worker: Worker) -> Rule:
        """z ← z + S."""
        return Rule()

    @override
    def start(self, worker: Worker) -> SSPState:
        """The view is the model."""
        before, base = worker.state, self.serve(worker)
        view = base.server.values.clone()
        state = SSPState(base.server, base.tensors, view=view, sum=torch.zeros_like(view))
        if isinstance(before, SSPState) and before.reunited:  # S is still to be pushed
            state.sum, state.unsent = before.sum, before.unsent
            view += state.sum
            unpack(view, state.tensors)
            worker.has_news = state.unsent > 0 or state.server.lossy
        return state

    @override
    def without_unsent(self, worker: Worker, model: Tensor) -> None:
        """In the middle of a step the view is x; the tensors may have moved on."""
        torch.sub(worker.state.view, worker.state.sum, out=model)

    @override
    def carry(self, worker: Worker, place: slice, back: Tensor | None, *, lost: bool) -> None:
        state: SSPState = worker.state
        if back is not None:
            state.sum[place] += back
            state.unsent = max(1, state.unsent)

    @override
    def iterated(self, worker: Worker) -> bool:
        """Add up the update, take what has come, send what can be sent, wait at the bound."""
        state: SSPState = worker.state
        if worker.size == 1:  # not by way of a difference, which rounds
            read(state.tensors, state.server.values)
            state.server.begin_anew(state.server.values)
            state.sum.zero_()
            state.unsent, worker.has_news = 0, False
            return True
        self._add_update(state, worker.size)
        refreshed = self._take(worker)
        self._send(worker)
        while state.slowest < state.clock - self.staleness:
            refreshed = self._take(worker, wait=True) or refreshed
            self._send(worker)
        unpack(state.view, state.tensors)
        worker.has_news = state.unsent > 0 or state.server.lossy  # S holds what rounding took
        worker.record["staleness"] = max(0, state.clock - state.slowest)
        worker.details["pulls"] = worker.details.get("pulls", 0) + refreshed
        self.report(worker)
        return refreshed

    @staticmethod
    def _add_update(state: SSPState, workers: int) -> None:
        """x ← x + u; S ← S + u, tensor by tensor, so that u needs no copy of the model."""
        offset = 0
        for tensor in state.tensors:
            moved = as_real(tensor.detach()).reshape(-1)
            view, total = (t[offset : offset + moved.numel()] for t in (state.view, state.sum))
            update = (moved.to(view) - view).div_(workers)
            view.add_(update)
            total.add_(update)
            offset += moved.numel()
        state.clock += 1
        state.unsent += 1

    def _take(self, worker: Worker, *, wait: bool = False) -> bool:
        """Take the answer over, if it has come; whether it has refreshed the view."""
        state: SSPState = worker.state
        answer = state.server.take(wait=wait)
        if answer is None or not state.asking:
            return False
        torch.add(state.server.values, state.sum, out=state.view)
        state.slowest = max(state.slowest, answer.clock)
        worker.synchronized(steps_since=state.clock - state.asked)
        return True

    def _send(self, worker: Worker) -> None:
        """Send S if nothing is under way, and ask for the server's model if it is wanted."""
        state: SSPState = worker.state
        least = state.clock - self.staleness
        due = state.slowest < least
        if not state.server.free or not (state.unsent or due):
            return
        self.look(worker, state.sum)
        state.server.hand_over(state.sum)
        state.unsent = 0
        state.asking = due or self.refresh == "ahead"
        if state.asking:
            state.asked = state.clock
            least = min(state.clock, least + (self.refresh == "ahead"))
            state.server.begin("push_pull", clock=state.clock, least=least)
        else:
            state.server.begin("push", clock=state.clock)

    @override
    def flush(self, worker: Worker) -> None:
        """Push S, with all that rounding has kept in it."""
        state: SSPState = worker.state
        state.server.settle(now=True)
        self._take(worker)
        self.look(worker, state.sum)
        state.server.stage().copy_(state.sum)
        state.sum.zero_()
        state.unsent = 0
        state.server.push_last(clock=state.clock)

    @override
    def met(self, worker: Worker, clock: int) -> None:
        """A worker that was at the meeting may be far behind: the view is as old as its clock."""
        worker.state.slowest = min(worker.state.slowest, clock)
