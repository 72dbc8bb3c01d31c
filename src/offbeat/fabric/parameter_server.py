"""A parameter server: one flat vector in shards, each kept by one worker, for all to push and pull.

A request is a header of nine numbers, sent to the rank that keeps the shard, and the values it
pushes, if any. Each serving rank has one thread that takes requests in the order in which they
arrive; the rank's own requests go to its shard directly. An answer is a header of three numbers and
the values. Nothing is pickled, and sizes are checked against the shard.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.fabric.communicator import Communicator, Completed, Handle, Promise
from offbeat.fabric.shard import NEVER, Answer, Kind, Request, Rule, Shard

_REQUEST, _VALUES = 1, 2  # message tags; answers use tags of their own
_ANSWER = 16
_ANSWERS = 1024  # answers under way at once have different tags
_HEADER = 9


class ParameterServer:
    """This worker's end of a vector that is kept in shards by ``servers``.

    A collective: all workers make it alike, with the same ``initial`` values.

    Args:
        fabric: The communicator.
        initial: The vector's first value, 1-D, on the CPU; afterwards ``values``, the place where
            a worker puts what it pushes and finds what it pulled.
        servers: The ranks that keep a shard; None is all of them, so that no link carries all.
        rule: Makes the rule of a shard.

    Attributes:
        values: 1-D; written and read between ``stage`` and the next request.
        shard: This rank's, if it serves.
        pulled_bytes: Bytes of the answers this worker has asked other ranks for.

    *Memory*: ``values``; a server has its shard twice (itself, what is being received) and a copy
    of it for each answer on its way.
    """

    def __init__(
        self,
        fabric: Communicator,
        initial: Tensor,
        *,
        servers: Sequence[int] | None = None,
        rule: Callable[[], Rule] = Rule,
    ) -> None:
        self._fabric = fabric
        self.servers = list(range(fabric.size)) if servers is None else list(servers)
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
        if fabric.rank in self.servers:
            own = self._slices[self.servers.index(fabric.rank)]
            self.shard = Shard(own.clone(), rule(), fabric.size)
        self._ended: Handle[None] = Completed(None)
        if self.shard is not None and fabric.size > 1:
            what = "the end of this rank's parameter server"
            promise: Promise[None] = fabric.promise(what=what)
            self._ended = promise
            fabric.spawn(lambda: self._serve(promise), what=f"parameter server {fabric.rank}")

    # -- the worker's side -----------------------------------------------------------------------

    def stage(self) -> Tensor:
        """``values``, free to be written: the last push has left."""
        for handle in self._sent:
            handle.wait()
        self._sent = []
        return self.values

    def push(self, *, clock: int = -1, value: float = 0.0) -> None:
        """Send ``values`` and go on. They must not be written before ``stage``."""
        self._start("push", clock=clock, value=value)

    def push_pull(
        self, *, clock: int = -1, least: int = -NEVER, value: float = 0.0
    ) -> Handle[Answer]:
        """Send ``values`` and start to replace them by what the rule answers.

        Args:
            clock: This worker's clock from now on.
            least: Wait until the slowest worker's clock is at least this.
            value: A number for the rule.
        """
        return self._start("push_pull", clock=clock, least=least, value=value)

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
        first = Request("arrive", self._fabric.rank, meeting=meeting)
        answers = [self._ask(server, first) for server in self.servers]
        clocks = []
        for server, answer in zip(self.servers, answers, strict=True):
            while True:
                got = answer.wait()
                if got.met:
                    break
                answer = self._ask(server, replace(first, seen=got.seen))
            clocks.append(got.clock)
        return min(clocks)

    def leave(self) -> None:
        """The last request: the servers' threads end when all workers have left."""
        if not self._left:
            self._left = True
            for server in self.servers:
                if server != self._fabric.rank:
                    self._send(Request("leave", self._fabric.rank).encode(), server, _REQUEST)
            self.stage()
            self._ended.wait()  # the others' last requests need this rank's connections

    def _start(self, kind: Kind, **settings: Any) -> Handle[Answer]:
        self._require_service()
        self.stage()
        request = Request(kind, self._fabric.rank, **settings)
        parts = [
            self._ask(server, replace(request, elements=self._elements(kind, i)), i)
            for i, server in enumerate(self.servers)
        ]
        return _Answers(parts)

    def _require_service(self) -> None:
        if self._error is not None:
            raise self._error

    def _elements(self, kind: Kind, index: int) -> int:
        return self._slices[index].numel() if kind in ("push", "push_pull") else 0

    def _ask(self, server: int, request: Request, index: int = 0) -> Handle[Answer]:
        """Send one request; ``index`` is the place of ``server`` among the servers."""
        fabric, part = self._fabric, self._slices[index]
        if server == fabric.rank:
            return self._ask_self(request, part)
        self._requests += 1
        if request.kind in ("push_pull", "pull"):
            self.pulled_bytes += part.nbytes
        number = self._requests % _ANSWERS
        request = replace(request, number=number)
        self._send(request.encode(), server, _REQUEST)
        if request.elements:
            self._send(part, server, _VALUES)
        if request.kind == "push":
            return Completed(Answer(0))
        what = f"{request.kind} at the parameter server of rank {server}"
        tag = _ANSWER + 2 * number
        header = fabric.receive(torch.zeros(3).long(), source=server, tag=tag, what=what)
        if request.kind == "arrive":
            return header.then(_read)
        values = fabric.receive(part, source=server, tag=tag + 1, what=what)
        return values.then(lambda _: _read(header.wait()))

    def _ask_self(self, request: Request, part: Tensor) -> Handle[Answer]:
        assert self.shard is not None
        fabric = self._fabric
        what = f"{request.kind} at this rank's own parameter server"
        promise: Promise[Answer] = fabric.promise(what=what)

        def deliver(answer: Answer, values: Tensor | None) -> None:
            if values is not None:
                part.copy_(values)
            promise.fulfil(answer)

        pushed = part if request.elements else None
        self.shard.handle(request, pushed, deliver)
        return Completed(Answer(0)) if request.kind == "push" else promise

    def _send(self, tensor: Tensor, server: int, tag: int) -> None:
        what = f"request to the parameter server of rank {server}"
        self._sent.append(self._fabric.send(tensor, destination=server, tag=tag, what=what))

    # -- the server's side -----------------------------------------------------------------------

    def _serve(self, ended: Promise[None]) -> None:
        """Take requests until every other worker has left."""
        assert self.shard is not None
        fabric, shard = self._fabric.background, self.shard
        here = fabric.size - 1
        inbox = torch.empty_like(shard.values)
        answers: dict[int, list[Handle[Tensor]]] = {}
        try:
            while here:
                header = torch.zeros(_HEADER, dtype=torch.int64)
                fabric.receive_any(header, tag=_REQUEST, what="a request").wait()
                request = Request.decode(header)
                source = request.source
                for handle in answers.pop(source, []):
                    handle.wait()  # it has arrived, or this request would not have been made
                if request.kind == "leave":
                    here -= 1
                    continue
                values = None
                if request.elements:
                    self._check(request)
                    what = f"values of rank {source} for the parameter server"
                    values = fabric.receive(inbox, source=source, tag=_VALUES, what=what).wait()
                deliver = _Sender(fabric, source, request.number, answers)
                shard.handle(request, values, deliver)
        except Exception as error:  # the worker's next request raises it
            self._error = error
        ended.fulfil(None)

    def _check(self, request: Request) -> None:
        assert self.shard is not None
        size = self.shard.values.numel()
        if request.elements != size:
            raise OffbeatError(
                f"rank {request.source} pushes {request.elements} values to a shard of {size}"
            )


class _Sender:
    """Sends an answer to another rank."""

    def __init__(
        self,
        fabric: Communicator,
        source: int,
        number: int,
        answers: dict[int, list[Handle[Tensor]]],
    ) -> None:
        self._fabric, self._source, self._number = fabric, source, number
        self._answers = answers

    def __call__(self, answer: Answer, values: Tensor | None) -> None:
        header = torch.tensor([answer.clock, int(answer.met), answer.seen])
        parts = [header] if values is None else [header, values.clone()]
        what = f"answer to rank {self._source}"
        tag = _ANSWER + 2 * self._number
        # Kept until the next request of that worker: gloo may lose a message nobody holds.
        self._answers.setdefault(self._source, []).extend(
            self._fabric.send(part, destination=self._source, tag=tag + i, what=what)
            for i, part in enumerate(parts)
        )


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
