"""A parameter server: one flat vector in shards, each kept by one worker, for all to push and pull.

A request is a header of seven numbers, sent to the rank that keeps the shard, and the values it
pushes, if any. A serving rank has one thread for each other rank, so that no slow link holds up the
others; requests are served in the order in which they have come in. The rank's own requests go to
its shard directly. An answer is a header of three numbers and the values. Nothing is pickled, and
sizes are checked against the shard.

Where a request runs beside the training, an activity waits for the answer in the worker's place.
This long file is a worker's end, whole; what a serving rank does is in ``serving``.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.fabric.handle import Completed, Handle, explained
from offbeat.fabric.host import Promise
from offbeat.fabric.link import Pushes, open_links
from offbeat.fabric.server import Server
from offbeat.fabric.service import ANSWER, REQUEST, VALUES, AllAnswers, read_answer
from offbeat.fabric.serving import Serving
from offbeat.fabric.shard import NEVER, Answer, Request, RequestKind, Rule, Shard
from offbeat.fabric.team import Team
from offbeat.fabric.wire import Precision

_ANSWERS = 1024  # answers under way at once have different tags


def places_of(elements: int, servers: int) -> list[slice]:
    """Which part of a vector each server keeps."""
    ends = [elements * i // servers for i in range(servers + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


class ParameterServer(Server):
    """This worker's end of a vector that is kept in shards by ``servers``.

    A collective: all workers make it alike, with the same ``initial`` values.

    Args:
        team: The workers.
        initial: The vector's first value, 1-D, on the CPU; afterwards ``values``.
        servers: The ranks that keep a shard; None is all of them, so that no link carries all.
        rule: Makes the rule of a shard.
        precision: How values travel to and from the shards of other ranks; those so short that
            rounding would not make them shorter go as they are.
        pushes: What goes to the shards: "changes", answered with the model, or "models", answered
            with a change. Over a lossy wire changes are staged by ``hand_over``.

    *Memory*: ``values``; a server has its shard, and a buffer of its size for each other rank: two
    copies of the vector in all for each rank where all serve. Over a lossy wire it has a mirror and
    a payload in place of each buffer, and every worker a payload for each shard of others. One more
    shard takes what pushed changes bring; where models are pushed, the worker has mirrors beside
    ``values``. A last push and a look have buffers of their own, for the moment.
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
        self._team, self.view, self.members = team, team.view, team.members
        self._pushed = 0
        self.servers = list(team.ranks) if servers is None else list(servers)
        self.values = initial
        self._places = places_of(initial.numel(), len(self.servers))
        self._sent: list[Handle[Tensor]] = []  # of the last push
        self._pulled_bytes = 0
        self._requests = 0
        self._meetings = 0
        self._left = False
        self._pushes: Pushes = pushes
        changes = pushes == "changes"
        parts = {
            i: initial[place]
            for i, place in enumerate(self._places)
            if self.servers[i] != team.rank
        }
        # By place of the server.
        self._links = open_links(
            precision, parts, model="received" if changes else "sent", shared=changes
        )
        self._begun: Promise[Answer | Exception] | None = None
        self._what = ""  # of the request that was begun
        self._answer: Answer | None = None  # to it, when it has come and was not taken
        self.shard: Shard | None = None
        self._serving: Serving | None = None
        if team.rank in self.servers:
            own = initial[self._places[self.servers.index(team.rank)]].clone()
            others = {rank: own for rank in team.ranks if rank != team.rank}
            links = open_links(precision, others, model="sent" if changes else "received")
            self.shard = Shard(own, rule(), team.size, links, pushes)
            self._serving = Serving(team, self.shard)

    # -- the worker's side -----------------------------------------------------------------------

    @override
    def stage(self) -> Tensor:
        for handle in self._sent:
            handle.wait()
        self._sent = []
        return self.values

    @property
    @override
    def lossy(self) -> bool:
        return bool(self._links)

    @property
    @override
    def pushed(self) -> int:
        return self._pushed

    @property
    @override
    def pulled_bytes(self) -> int:
        return self._pulled_bytes

    @override
    def hand_over(self, changes: Tensor) -> None:
        self.stage()
        for i, place in enumerate(self._places):
            part = changes[place]
            if i in self._links:
                self._links[i].pack(part)
            else:
                self.values[place].copy_(part)
                part.zero_()

    @override
    def push(self, *, clock: int = -1) -> None:
        self._start("push", clock=clock)

    @override
    def push_last(self, *, clock: int = -1) -> None:
        self._start("last", clock=clock)

    @override
    def push_pull(self, *, clock: int = -1, least: int = -NEVER) -> Handle[Answer]:
        return self._start("push_pull", clock=clock, least=least)

    @override
    def pull(self, *, least: int = -NEVER) -> Handle[Answer]:
        return self._start("pull", least=least)

    @override
    def look(self) -> Tensor:
        seen, pulled = torch.empty_like(self.values), self._pulled_bytes
        self._start("look", into=seen).wait()
        self._pulled_bytes = pulled
        return seen

    @override
    def wait_for(self, clock: int) -> None:
        self._require_service()
        nothing = self.values[:0]
        for i in range(len(self.servers)):
            least = 0
            while least < clock:
                request = Request("clock", self._team.rank, least=least + 1)
                least = self._ask(i, self._announce(i, request), nothing).wait().clock

    # -- requests beside the training ------------------------------------------------------------

    @property
    @override
    def free(self) -> bool:
        return self._begun is None and self._answer is None

    @override
    def begin(self, kind: RequestKind, *, clock: int = -1, least: int = -NEVER) -> None:
        assert self.free, "an answer was not taken"
        waits = least > -NEVER
        answers = self._start(kind, beside=True, patient=waits, clock=clock, least=least)
        sent, self._sent = self._sent, []
        if isinstance(answers, Completed) and not sent:  # of this rank's own shard alone
            self._answer = answers.wait()
            return
        begun: Promise[Answer | Exception] = self._team.host.promise()

        def wait() -> None:
            try:
                answer = answers.wait()
                for handle in sent:
                    handle.wait()
                begun.fulfil(answer)
            except Exception as error:  # ``settle`` raises it
                begun.fulfil(error)

        self._begun, self._what = begun, f"{kind} at the parameter server"
        self._team.host.spawn(wait, what=f"{kind} at the server")

    @override
    def settle(self, *, now: bool = False) -> None:
        if now and self._begun is not None and not self._begun.fulfilled:
            request = Request("release", self._team.rank)
            for i in range(len(self.servers)):
                self._ask(i, self._announce(i, request), self.values[:0])
        if self._begun is not None:
            outcome = self._team.fabric.fulfilment(self._begun, what=self._what).wait()
            if isinstance(outcome, Exception):
                raise explained(outcome)
            self._begun, self._answer = None, outcome

    def answer(self, *, wait: bool = False) -> Answer | None:
        """What ``take`` would give, and will: it stays to be taken."""
        if self._begun is not None and (wait or self._begun.fulfilled):
            self.settle()
        return self._answer

    @override
    def take(self, *, wait: bool = False) -> Answer | None:
        answer, self._answer = self.answer(wait=wait), None
        return answer

    # -- meeting and leaving ---------------------------------------------------------------------

    @override
    def arrive(self) -> int:
        meeting, self._meetings = self._meetings, self._meetings + 1
        self._require_service()
        first = Request("arrive", self._team.rank, meeting=meeting)
        places = range(len(self.servers))
        nothing = self.values[:0]
        answers = [self._ask(i, self._announce(i, first), nothing) for i in places]
        clocks = []
        for i, answer in zip(places, answers, strict=True):
            while True:
                got = answer.wait()
                if got.met:
                    break
                again = replace(first, seen=got.seen)
                answer = self._ask(i, self._announce(i, again), nothing)
            clocks.append(got.clock)
        self.settle()
        if self._answer is not None:  # workers that were here did not count in its clock
            self._answer = replace(self._answer, clock=min(self._answer.clock, *clocks))
        return min(clocks)

    @override
    def leave(self) -> None:
        if not self._left:
            self._left = True
            for server in self.servers:
                if server != self._team.rank:
                    self._send(Request("leave", self._team.rank).encode(), server, REQUEST)
            self.stage()
            if self._serving is not None:
                self._serving.end()

    # -- checkpoints -----------------------------------------------------------------------------

    @override
    def begin_anew(self, vector: Tensor) -> None:
        self.values.copy_(vector)
        for i, link in self._links.items():
            link.mirror.copy_(vector[self._places[i]])
        if self.shard is not None:
            own = vector[self._places[self.servers.index(self._team.rank)]]
            self.shard.begin_anew(own)

    @override
    def state_dict(self) -> dict[str, Any]:
        answer, models = self._answer, self._pushes == "models"
        pulled = answer is not None or (self.lossy and not models)
        mirrors = {i: link.mirror.clone() for i, link in self._links.items()} if models else {}
        return {
            "shard": None if self.shard is None else self.shard.state_dict(),
            "values": self.values.clone() if pulled else None,
            "mirrors": mirrors,
            "answer_clock": None if answer is None else answer.clock,
            "pulled_bytes": self._pulled_bytes,
        }

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.shard is not None:
            self.shard.load_state_dict(state["shard"])
        if state["values"] is not None:
            self.values.copy_(state["values"])
        for i, mirror in state["mirrors"].items():
            self._links[i].mirror.copy_(mirror)
        clock, self._pulled_bytes = state["answer_clock"], state["pulled_bytes"]
        self._answer = None if clock is None else Answer(clock)

    # -- messages --------------------------------------------------------------------------------

    def _start(
        self,
        kind: RequestKind,
        *,
        into: Tensor | None = None,
        beside: bool = False,
        patient: bool = False,
        **settings: Any,
    ) -> Handle[Answer]:
        """Send a request to all servers.

        Args:
            kind: See ``Request``, whose other numbers are the ``settings``.
            into: What is pushed and replaced by the answer; None is ``values``.
            beside: Whether an activity waits for it: its waiting is not the training's.
            patient: Whether it may take as long as it likes.
            settings: Others of ``Request``.
        """
        self._pushed += kind in ("push", "push_pull", "last")
        self._require_service()
        self.stage()
        vector = self.values if into is None else into
        parts = [vector[place] for place in self._places]
        request = Request(kind, self._team.rank, **settings)
        # Each begins with another server, and headers go ahead of values: then each server takes
        # the workers in another order, and no link is idle while another has a queue.
        order = sorted(
            range(len(self.servers)),
            key=lambda i: (self.servers[i] - self._team.rank - 1) % self._team.size,
        )
        asked = [(i, self._announce(i, self._sized(request, i), beside=beside)) for i in order]
        answers = [
            self._ask(i, request, parts[i], beside=beside, patient=patient) for i, request in asked
        ]
        if all(isinstance(answer, Completed) for answer in answers):
            return Completed(AllAnswers(answers).wait())
        return AllAnswers(answers)

    def _require_service(self) -> None:
        if self._serving is not None and self._serving.error is not None:
            raise explained(self._serving.error)

    def _sized(self, request: Request, index: int) -> Request:
        place = self._places[index]
        return replace(request, elements=place.stop - place.start if request.pushes else 0)

    def _announce(self, index: int, request: Request, *, beside: bool = False) -> Request:
        """Send the header of a request to the server at place ``index``; gives it its number."""
        self._requests += 1
        request = replace(request, number=self._requests % _ANSWERS)
        if self.servers[index] != self._team.rank:
            self._send(request.encode(), self.servers[index], REQUEST, beside=beside)
        return request

    def _ask(
        self,
        index: int,
        request: Request,
        part: Tensor,
        *,
        beside: bool = False,
        patient: bool = False,
    ) -> Handle[Answer]:
        """Send the values of an announced request, if any, and start to receive the answer."""
        fabric, server = self._team.uncounted if beside else self._team.fabric, self.servers[index]
        if server == fabric.rank:
            assert self._serving is not None
            return self._serving.ask(request, part, beside=beside, patient=patient)
        link = self._links.get(index) if request.rounded(self._pushes) else None
        message = part if link is None else link.payload
        if request.elements:
            if link is not None and self._pushes == "models":
                link.pack(part)
            self._send(message, server, VALUES, beside=beside)
        if not request.answered:
            return Completed(Answer(0))
        what = f"{request.kind} at the parameter server of rank {server}"
        tag = ANSWER + 2 * request.number
        numbers = torch.zeros(3).long()
        header = fabric.receive(numbers, source=server, tag=tag, what=what, patient=patient)
        if request.kind in ("arrive", "clock"):
            return header.then(read_answer)
        self._pulled_bytes += message.nbytes
        values = fabric.receive(message, source=server, tag=tag + 1, what=what, patient=patient)

        def read(_: object) -> Answer:
            if link is not None:
                link.unpack(part)
            return read_answer(header.wait())

        return values.then(read)

    def _send(self, tensor: Tensor, server: int, tag: int, *, beside: bool = False) -> None:
        what = f"request to the parameter server of rank {server}"
        fabric = self._team.uncounted if beside else self._team.fabric
        self._sent.append(fabric.send(tensor, destination=server, tag=tag, what=what))
        if beside:  # of the training all the same
            self._team.account.sent(tensor.nbytes)
