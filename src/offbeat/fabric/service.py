"""The messages of a parameter server, and what it does for one other rank."""

import functools
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.errors import OffbeatError
from offbeat.fabric.communicator import Communicator
from offbeat.fabric.handle import Handle
from offbeat.fabric.shard import HEADER, Answer, Request, Shard

REQUEST, VALUES = 1, 2  # message tags; answers use two each, from ANSWER up
ANSWER = 16


class Service:
    """What a server does for one other rank: takes its requests, one after the other.

    One buffer holds what it pushes and then what it is answered with, which it has received before
    it pushes again; where the link rounds, its payload. What travels as it is all the same gets a
    buffer of its own.
    """

    def __init__(self, fabric: Communicator, rank: int, shard: Shard) -> None:
        self._fabric, self._rank, self._shard = fabric, rank, shard
        self._buffer: Tensor | None = None
        # Held until it has left: gloo may lose it else. Other activities append to it.
        self._sent: deque[Handle[Tensor]] = deque()

    def serve(self) -> None:
        """Take requests until this rank leaves."""
        what = f"a request of rank {self._rank} to the parameter server"
        while True:
            header = torch.zeros(HEADER, dtype=torch.int64)
            self._receive(header, REQUEST, what, patient=True)
            request = Request.decode(header, self._rank)
            while self._sent:
                self._sent.popleft().wait()  # this worker is receiving it, or has received it
            if request.kind == "leave":
                return
            values = None
            if request.pushes:
                self._check(request)
                values = self._buffered(request)
                if request.elements:  # a small vector leaves some servers nothing
                    what_values = f"values of rank {self._rank} for the parameter server"
                    self._receive(values, VALUES, what_values)
            self._shard.handle(request, values, functools.partial(self._answer, request))

    def _receive(self, tensor: Tensor, tag: int, what: str, *, patient: bool = False) -> None:
        self._fabric.receive(tensor, source=self._rank, tag=tag, what=what, patient=patient).wait()

    def _buffered(self, request: Request) -> Tensor:
        if (link := self._shard.link(request)) is not None:
            return link.payload
        if self._rank in self._shard.links:
            return torch.empty_like(self._shard.values)
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
            rounded = self._shard.link(request) is not None
            parts.append(values if rounded else self._buffered(request).copy_(values))
        for i, part in enumerate(parts):
            tag, what = ANSWER + 2 * request.number + i, f"answer to rank {self._rank}"
            self._sent.append(self._fabric.send(part, destination=self._rank, tag=tag, what=what))


def read_answer(header: Tensor) -> Answer:
    """The answer of a header that ``Service`` has sent."""
    clock, met, seen = header.tolist()
    return Answer(clock, bool(met), seen)


class AllAnswers(Handle[Answer]):
    """The answers of all shards to one request."""

    def __init__(self, parts: Sequence[Handle[Answer]]) -> None:
        self._parts = list(parts)

    @override
    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    @override
    def wait(self) -> Answer:
        answers = [part.wait() for part in self._parts]
        return Answer(min(answer.clock for answer in answers))
