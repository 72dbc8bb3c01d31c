"""A parameter server between nodes of several workers, which hold the same bits at all times.

Each worker of a node and its counterparts in the other nodes have a parameter server of their own,
for one slice of the vector. So a node sends what a single worker would, and each number of an
answer has come to one of its workers alone, from whom the others get it.

When the answers for the slices come differs between the workers of a node, and so do the clocks in
them. So they agree: an answer is there when all of them have theirs, and its clock is the least.
All workers of a node call everything alike.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.errors import CommunicationError
from offbeat.fabric.handle import Handle
from offbeat.fabric.link import Pushes
from offbeat.fabric.parameter_server import ParameterServer, places_of
from offbeat.fabric.server import Server
from offbeat.fabric.shard import NEVER, Answer, RequestKind, Rule
from offbeat.fabric.team import Team
from offbeat.fabric.wire import Precision


class SlicedServer(Server):
    """This worker's end of a vector that is kept in slices by the workers of nodes.

    A collective: all workers of all nodes make it alike, with the same ``initial`` values.

    Args:
        team: The nodes, of several workers each.
        initial: See ``ParameterServer``.
        servers: The nodes that keep a shard of each slice; None is all of them.
        rule: Makes the rule of a shard.
        precision: How values travel between nodes.
        pushes: What goes to the shards.

    Attributes:
        values: The whole vector, as for its node.
        shard: Of this worker's slice, if its node serves.

    *Memory*: ``values``, and an L-th of what a worker's ``ParameterServer`` has beside them; for
    the moment, when the slices of an answer are put together, another copy of the vector.
    """

    def __init__(
        self,
        team: Team,
        initial: Tensor,
        *,
        servers: Sequence[int] | None = None,
        rule: Callable[[], Rule] = Rule,
        precision: Precision = "float32",
        pushes: Pushes = "changes",
    ) -> None:
        assert team.node is not None, "a team of nodes"
        self._team, self._inside = team, team.node.inside
        self.values = initial
        self._places = places_of(initial.numel(), self._inside.size)
        self._own = self._places[self._inside.rank]
        self._inner = ParameterServer(
            team.across(),
            initial[self._own],  # the same memory
            servers=servers,
            rule=rule,
            precision=precision,
            pushes=pushes,
        )
        self._brings = True  # whether the answer to what was begun may bring values
        self.view, self.members = self._inner.view, self._inner.members
        self.servers, self.shard = self._inner.servers, self._inner.shard
        with self._sharing_failures():
            (lossy,) = team.agree(self._inner.lossy)  # a slice may be too short for it
        self._lossy = bool(lossy)

    @property
    @override
    def pushed(self) -> int:
        return self._inner.pushed

    @property
    @override
    def pulled_bytes(self) -> int:
        return self._inner.pulled_bytes

    @property
    @override
    def lossy(self) -> bool:
        return self._lossy

    # -- the worker's side -----------------------------------------------------------------------

    @override
    def stage(self) -> Tensor:
        with self._sharing_failures():
            self._inner.stage()
        return self.values

    @override
    def hand_over(self, changes: Tensor) -> None:
        with self._sharing_failures():
            self._inner.hand_over(changes[self._own])
            if self._lossy:
                self._gather(changes, "what rounding has kept from a push")
            else:
                changes.zero_()

    @override
    def push(self, *, clock: int = -1) -> None:
        with self._sharing_failures():
            self._inner.push(clock=clock)

    @override
    def push_last(self, *, clock: int = -1) -> None:
        with self._sharing_failures():
            self._inner.push_last(clock=clock)

    @override
    def push_pull(self, *, clock: int = -1, least: int = -NEVER) -> Handle[Answer]:
        with self._sharing_failures():
            return _PutTogether(self, self._inner.push_pull(clock=clock, least=least))

    @override
    def pull(self, *, least: int = -NEVER) -> Handle[Answer]:
        with self._sharing_failures():
            return _PutTogether(self, self._inner.pull(least=least))

    @override
    def look(self) -> Tensor:
        with self._sharing_failures():
            seen = torch.empty_like(self.values)
            seen[self._own] = self._inner.look()
            self._gather(seen, "a look at the parameter server")
        return seen

    @override
    def wait_for(self, clock: int) -> None:
        with self._sharing_failures():
            self._inner.wait_for(clock)

    # -- requests beside the training ------------------------------------------------------------

    @property
    @override
    def free(self) -> bool:
        return self._inner.free  # answers are taken by all workers of a node, or by none

    @override
    def begin(self, kind: RequestKind, *, clock: int = -1, least: int = -NEVER) -> None:
        self._brings = kind != "push"
        with self._sharing_failures():
            self._inner.begin(kind, clock=clock, least=least)

    @override
    def settle(self, *, now: bool = False) -> None:
        with self._sharing_failures():
            self._inner.settle(now=now)

    @override
    def take(self, *, wait: bool = False) -> Answer | None:
        if self.free:
            return None
        with self._sharing_failures():
            own = self._inner.answer(wait=wait)
            late, ahead = self._team.agree(own is None, -NEVER if own is None else -own.clock)
            if late:
                return None
            self._inner.take()
            if self._brings:
                self._gather(self.values, "an answer of the parameter server")
        return Answer(-int(ahead))

    # -- meeting and leaving ---------------------------------------------------------------------

    @override
    def arrive(self) -> int:
        with self._sharing_failures():
            return self._inner.arrive()  # all have pushed by then, to all slices alike

    @override
    def leave(self) -> None:
        with self._sharing_failures():
            self._inner.leave()

    # -- checkpoints -----------------------------------------------------------------------------

    @override
    def begin_anew(self, vector: Tensor) -> None:
        self.values.copy_(vector)
        self._inner.begin_anew(vector[self._own])

    @override
    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict(state)
        self._brings = True

    # -- inside the node -------------------------------------------------------------------------

    def put_together(self, own: Handle[Answer]) -> Answer:
        """Wait for this worker's slice of an answer, and get the others'."""
        with self._sharing_failures():
            (ahead,) = self._team.agree(-own.wait().clock)
            self._gather(self.values, "an answer of the parameter server")
        return Answer(-int(ahead))

    def _gather(self, vector: Tensor, what: str) -> None:
        """Each worker's slice of ``vector`` goes to the others. Blocks."""
        inside = self._inside
        longest = max(place.stop - place.start for place in self._places)
        part = vector.new_zeros(longest, device=inside.control_device)  # NCCL takes none of the CPU
        own = vector[self._own]
        part[: own.numel()].copy_(own)
        started = self._team.host.now()
        parts = inside.gather(part, what=what).wait()
        for rank, (place, one) in enumerate(zip(self._places, parts, strict=True)):
            if rank != inside.rank:
                vector[place].copy_(one[: place.stop - place.start])
        self._team.account.waited(self._team.host.now() - started)

    @contextmanager
    def _sharing_failures(self) -> Iterator[None]:
        """Who waits for this worker, in its node or elsewhere, learns by this that it failed."""
        try:
            yield
        except CommunicationError:
            self._team.fabric.close()
            raise


class _PutTogether(Handle[Answer]):
    """The answer for this worker's slice, and then those for the others'."""

    def __init__(self, server: SlicedServer, inner: Handle[Answer]) -> None:
        self._server, self._inner = server, inner
        self._answer: Answer | None = None

    @override
    def done(self) -> bool:
        """Whether this worker's has come; that of the others it learns by waiting."""
        return self._answer is not None or self._inner.done()

    @override
    def wait(self) -> Answer:
        if self._answer is None:
            self._answer = self._server.put_together(self._inner)
        return self._answer
