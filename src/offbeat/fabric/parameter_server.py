"""A parameter server: one flat vector in shards, each kept by one worker, for all to push and pull.

A request is a header of seven numbers, sent to the rank that keeps the shard, and the values it
pushes, if any. A serving rank has one thread for each other rank, so that no slow link holds up the
others; requests are served in the order in which they have come in. The rank's own requests go to
its shard directly. An answer is a header of three numbers and the values. Nothing is pickled, and
sizes are checked against the shard.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.fabric.communicator import Communicator
from offbeat.fabric.handle import Completed, Handle, explained
from offbeat.fabric.host import Promise
from offbeat.fabric.shard import HEADER, NEVER, Answer, Request, RequestKind, Rule, Shard
from offbeat.fabric.team import Team

_REQUEST, _VALUES = 1, 2  # message tags; answers use tags of their own
_ANSWER = 16
_ANSWERS = 1024  # answers under way at once have different tags


class ParameterServer:
    """This worker's end of a vector that is kept in shards by ``servers``.

    A collective: all workers make it alike, with the same ``initial`` values.

    Args:
        team: The workers.
        initial: The vector's first value, 1-D, on the CPU; afterwards ``values``, the place where
            a worker puts what it pushes and finds what it pulled.
        servers: The ranks that keep a shard; None is all of them, so that no link carries all.
        rule: Makes the rule of a shard.

    Attributes:
        values: 1-D; written and read between ``stage`` and the next request.
        shard: This rank's, if it serves.
        pulled_bytes: Bytes of the answers this worker has asked other ranks for.

    *Memory*: ``values``; a server has its shard, and a buffer of its size for each other rank: two
    copies of the vector in all for each rank where all serve.
    """

    def __init__(
        self,
        team: Team,
        initial: Tensor,
        *,
        servers: Sequence[int] | None = None,
        rule: Callable[[], Rule] = Rule,
    ) -> None:
        self._team = team
        self.servers = list(team.members) if servers is None else list(servers)
        self.values = initial
        count = len(self.servers)
        ends = [initial.numel() * i // count for i in range(count + 1)]
        self._slices = [initial[a:b] for a, b in itertools.pairwise(ends)]
        self.shard: Shard | None = None
        self._sent: list[Handle[Tensor]] = []  # of the last push
        self.pulled_bytes = 0
        self._requests = 0
        self._meetings = 0
        self._left = False
        self._error: Exception | None = None
        self._served: dict[int, Promise[None]] = {}  # by rank: it has left
        if team.rank in self.servers:
            own = self._slices[self.servers.index(team.rank)]
            self.shard = Shard(own.clone(), rule(), team.size)
            self._serve(self.shard)

    # -- the worker's side -----------------------------------------------------------------------

    def stage(self) -> Tensor:
        """``values``, free to be written: the last push has left."""
        for handle in self._sent:
            handle.wait()
        self._sent = []
        return self.values

    def push(self, *, clock: int = -1) -> None:
        """Send ``values`` and go on. They must not be written before ``stage``."""
        self._start("push", clock=clock)

    def push_pull(self, *, clock: int = -1, least: int = -NEVER) -> Handle[Answer]:
        """Send ``values`` and start to replace them by what the rule answers.

        Args:
            clock: This worker's clock from now on.
            least: Wait until the slowest worker's clock is at least this.
        """
        return self._start("push_pull", clock=clock, least=least)

    def pull(self, *, least: int = -NEVER) -> Handle[Answer]:
        """Start to replace ``values`` by the vector."""
        return self._start("pull", least=least)

    def arrive(self) -> int:
        """Wait until everyone has arrived. Meanwhile nobody waits for this worker's clock.

        Returns the slowest worker's clock.

        A time-out counts from the last sign of life of any other worker at this server.
        """
        meeting, self._meetings = self._meetings, self._meetings + 1
        self._require_service()
        first = Request("arrive", self._team.rank, meeting=meeting)
        places = range(len(self.servers))
        answers = [self._ask(i, self._announce(i, first)) for i in places]
        clocks = []
        for i, answer in zip(places, answers, strict=True):
            while True:
                got = answer.wait()
                if got.met:
                    break
                again = replace(first, seen=got.seen)
                answer = self._ask(i, self._announce(i, again))
            clocks.append(got.clock)
        return min(clocks)

    def leave(self) -> None:
        """The last request: the servers' threads end when all workers have left."""
        if not self._left:
            self._left = True
            for server in self.servers:
                if server != self._team.rank:
                    self._send(Request("leave", self._team.rank).encode(), server, _REQUEST)
            self.stage()
            for rank, served in self._served.items():
                # Their last requests need this rank's connections.
                self._team.fabric.fulfilment(served, what=f"the leave of rank {rank}").wait()

    def _start(self, kind: RequestKind, **settings: Any) -> Handle[Answer]:
        self._require_service()
        self.stage()
        request = Request(kind, self._team.rank, **settings)
        # Each begins with another server, and headers go ahead of values: then each server takes
        # the workers in another order, and no link is idle while another has a queue.
        order = sorted(
            range(len(self.servers)),
            key=lambda i: (self.servers[i] - self._team.rank - 1) % self._team.size,
        )
        asked = [(i, self._announce(i, self._sized(request, i))) for i in order]
        return _Answers([self._ask(i, request) for i, request in asked])

    def _require_service(self) -> None:
        if self._error is not None:
            raise explained(self._error)

    def _serve(self, shard: Shard) -> None:
        """Serve the other ranks, each from an activity of its own."""
        host = self._team.host
        for rank in self._team.members:
            if rank != self._team.rank:
                served: Promise[None] = host.promise()
                self._served[rank] = served
                client = _Client(self._team.uncounted, rank, shard)
                host.spawn(
                    functools.partial(self._watch, client, served), what=f"server of rank {rank}"
                )

    def _watch(self, client: "_Client", served: Promise[None]) -> None:
        try:
            client.serve()
        except Exception as error:  # the worker's next request raises it
            self._error = self._error or error
        served.fulfil(None)

    def _sized(self, request: Request, index: int) -> Request:
        elements = self._slices[index].numel() if request.pushes else 0
        return replace(request, elements=elements)

    def _announce(self, index: int, request: Request) -> Request:
        """Send the header of a request to the server at place ``index``; gives it its number."""
        self._requests += 1
        request = replace(request, number=self._requests % _ANSWERS)
        if self.servers[index] != self._team.rank:
            self._send(request.encode(), self.servers[index], _REQUEST)
        return request

    def _ask(self, index: int, request: Request) -> Handle[Answer]:
        """Send the values of an announced request, if any, and start to receive the answer."""
        fabric, server, part = self._team.fabric, self.servers[index], self._slices[index]
        if server == fabric.rank:
            return self._ask_self(request, part)
        if request.elements:
            self._send(part, server, _VALUES)
        if request.kind == "push":
            return Completed(Answer(0))
        what = f"{request.kind} at the parameter server of rank {server}"
        tag = _ANSWER + 2 * request.number
        header = fabric.receive(torch.zeros(3).long(), source=server, tag=tag, what=what)
        if request.kind == "arrive":
            return header.then(_read)
        self.pulled_bytes += part.nbytes
        values = fabric.receive(part, source=server, tag=tag + 1, what=what)
        return values.then(lambda _: _read(header.wait()))

    def _ask_self(self, request: Request, part: Tensor) -> Handle[Answer]:
        assert self.shard is not None
        what = f"{request.kind} at this rank's own parameter server"
        promise: Promise[Answer] = self._team.host.promise()

        def deliver(answer: Answer, values: Tensor | None) -> None:
            if values is not None:
                part.copy_(values)
            promise.fulfil(answer)

        pushed = part if request.pushes else None
        self.shard.handle(request, pushed, deliver)
        if request.kind == "push":
            return Completed(Answer(0))
        return self._team.fabric.fulfilment(promise, what=what)

    def _send(self, tensor: Tensor, server: int, tag: int) -> None:
        what = f"request to the parameter server of rank {server}"
        self._sent.append(self._team.fabric.send(tensor, destination=server, tag=tag, what=what))


class _Client:
    """What a server does for one other rank: takes its requests, one after the other.

    One buffer holds what it pushes and then what it is answered with, which it has received before
    it pushes again.
    """

    def __init__(self, fabric: Communicator, rank: int, shard: Shard) -> None:
        self._fabric, self._rank, self._shard = fabric, rank, shard
        self._buffer: Tensor | None = None
        self._sent: list[Handle[Tensor]] = []  # held until it has left: gloo may lose it else

    def serve(self) -> None:
        """Take requests until this rank leaves."""
        what = f"a request of rank {self._rank} to the parameter server"
        while True:
            header = torch.zeros(HEADER, dtype=torch.int64)
            self._receive(header, _REQUEST, what, patient=True)
            request = Request.decode(header, self._rank)
            for handle in self._sent:
                handle.wait()  # it has arrived, or there would be no further request
            self._sent = []
            if request.kind == "leave":
                return
            values = None
            if request.pushes:
                self._check(request)
                values = self._buffered()
                if request.elements:  # a small vector leaves some servers nothing
                    what_values = f"values of rank {self._rank} for the parameter server"
                    self._receive(values, _VALUES, what_values)
            self._shard.handle(request, values, functools.partial(self._answer, request))

    def _receive(self, tensor: Tensor, tag: int, what: str, *, patient: bool = False) -> None:
        self._fabric.receive(tensor, source=self._rank, tag=tag, what=what, patient=patient).wait()

    def _buffered(self) -> Tensor:
        if self._buffer is None:
            self._buffer = torch.empty_like(self._shard.values)
        return self._buffer

    def _check(self, request: Request) -> None:
        size = self._shard.values.numel()
        if request.elements != size:
            raise OffbeatError(
                f"rank {self._rank} pushes {request.elements} values to a shard of {size}"
            )

    def _answer(self, request: Request, answer: Answer, values: Tensor | None) -> None:
        parts = [torch.tensor([answer.clock, int(answer.met), answer.seen])]
        if values is not None:
            parts.append(self._buffered().copy_(values))
        for i, part in enumerate(parts):
            tag, what = _ANSWER + 2 * request.number + i, f"answer to rank {self._rank}"
            self._sent.append(self._fabric.send(part, destination=self._rank, tag=tag, what=what))


class _Answers(Handle[Answer]):
    """The answers of all shards to one request."""

    def __init__(self, parts: Sequence[Handle[Answer]]) -> None:
        self._parts = list(parts)

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self) -> Answer:
        answers = [part.wait() for part in self._parts]
        return Answer(min(answer.clock for answer in answers))


def _read(header: Tensor) -> Answer:
    clock, met, seen = header.tolist()
    return Answer(clock, bool(met), seen)
