"""Downpour SGD: workers push what they have learned to a parameter server and fetch its model.

Symbols: x is a worker's local model, z the server's model. N is the number of workers. S is the sum
of the updates that a worker has not pushed yet. ``server_strategy.py`` explains the terms of
parameter servers.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.extend import setting
from offbeat_lab.baselines.server_strategy import ServerFlow, ServerStrategy
from offbeat_lab.methods.tunable import Axis, Tunable


class DownpourFlow(ServerFlow):
    """Handles the events of a training step for ``Downpour``.

    Attributes:
        updates: S as one vector.
        known: x after the last step, with the values that were fetched since, as one vector.
        requested: x at the last request for z.
        requested_step: ``steps`` at the last request for z.
        steps: Number of local steps.
        push_due: True if the next request must push S.
        fetch_due: True if the next request must pull z.
        fetching: True if the last request pulls z.
    """

    strategy: "Downpour"
    updates: Tensor
    known: Tensor
    requested: Tensor
    requested_step = steps = 0
    push_due = fetch_due = fetching = False

    @override
    def start(self) -> None:
        super().start()
        self.known = self.server.vector.clone()
        self.requested = torch.empty_like(self.known)
        self.updates = torch.zeros_like(self.known)

    def _add_update(self) -> None:
        """S ← S + u. In ranges, so that u needs little memory."""
        model = self.model
        for start, stop in model.ranges():
            known = self.known[start:stop]
            update = torch.empty_like(known)
            model.read(start, update)
            update.sub_(known)
            known.add_(update)
            self.updates[start:stop].add_(update, alpha=1 / self.worker.size)

    # -- requests --------------------------------------------------------------------------------

    @override
    def step_ended(self) -> bool:
        """Start a request if one is due, without waiting for answers. True if z has arrived."""
        strategy = self.strategy
        self._add_update()
        self.steps += 1
        self.unpushed += 1
        self.push_due = self.push_due or self.steps % strategy.push_every == 0
        self.fetch_due = self.fetch_due or self.steps % strategy.fetch_every == 0
        fetched = self._take()
        self._send()
        # The answer has arrived already if there is a single worker.
        fetched = self._take() or fetched
        self.update_details()
        return fetched

    def _take(self) -> bool:
        """If z has arrived, x ← z + (x − x at the request), and return True."""
        server = self.server
        if server.take() is None or not self.fetching:
            return False
        if self.steps > self.requested_step:
            server.vector.add_(self.known).sub_(self.requested)
        self.known.copy_(server.vector)
        self.model.write(0, self.known)
        self.model.read(0, self.known)  # as rounded, if the model has fewer bits
        return True

    def _send(self) -> None:
        """Start a request if a push or a fetch is due and no request is in flight."""
        server = self.server
        push, fetch = self.push_due, self.fetch_due
        if not server.idle or not (push or fetch):
            return
        if push:
            self.stage_push(self.updates)
        if fetch:
            self.requested.copy_(self.known)
            self.requested_step = self.steps
        server.start("push" if not fetch else "push_pull" if push else "pull")
        self.fetching, self.push_due, self.fetch_due = fetch, False, False

    @override
    def flush(self) -> None:
        """Wait for the answer to the request in flight, then start a push of the rest of S."""
        if self.unpushed:
            self.server.await_answer()
            self._take()
            self.stage_push(self.updates)
            self.server.start("push")
            self.fetching = False


@dataclass(frozen=True, kw_only=True, repr=False)
class Downpour(ServerStrategy):
    """Workers train locally, push accumulated updates to a server, and fetch its model.

    **Update** of a worker with the local model x. T is the step of its optimizer with the gradient
    g. z is the server's model, N the number of workers, and S the sum of the updates since the last
    push:

        x̂ ← T(x, g);  S ← S + (x̂ − x)/N;  x ← x̂
        if z has arrived:     x ← z + (x − x at the request for z)
        every n_push steps:   send S;  S ← 0;  the server: z ← z + S
        every n_fetch steps:  request z

    The worker computes while a request is in flight. At most one request is in flight. Pushes and
    fetches that become due meanwhile are part of the next request, and S continues to grow.

    S contains what the worker's optimizer did: learning rate, momentum and weight decay. The
    division by N gives a learning rate the same meaning as under BSP, where the gradients of all
    workers are averaged in every step.

    Args:
        push_every: Steps between two pushes, n_push ≥ 1.
        fetch_every: Steps between two fetches, n_fetch ≥ 1.

    *Communication*: S every n_push steps and the model every n_fetch steps, or less often if the
    network is too slow. *Memory*: four flat copies of the model: S, x after the last step, x at the
    last request, and the buffer of the request. A rank's shard and its buffers add up to one more
    copy.

    ``Stats.details`` contains the staleness of the pushes to this rank's shard. The staleness of a
    push is the number of pushes by other workers since the last fetch of the worker that pushes.

    *Differs from the paper*: there, a worker takes steps of plain SGD and pushes gradients, and the
    server applies the learning rate. With plain SGD this is the same. A worker adds to z the steps
    that it has taken while z was in flight. In the paper z replaces x, which loses these steps.
    The server only adds; the paper also has Adagrad there. ``finish`` pushes the rest of S. There
    is no warm-up with a single worker.

    Source: Dean et al., "Large scale distributed deep networks", NeurIPS 2012, §4.1 and
    Algorithm 7.1.
    """

    name: ClassVar[str] = "downpour"
    flow: ClassVar[type[ServerFlow]] = DownpourFlow
    tunable: ClassVar[Tunable] = Tunable((Axis("push_every"),))
    push_every: int = setting(1, least=1)
    fetch_every: int = setting(1, least=1)
