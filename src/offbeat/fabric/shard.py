"""What a rank that serves knows and does: its shard, the requests for it, and everyone's clock."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.fabric.link import Link, Pushes

NEVER = 2**62
HEADER = 7  # numbers of a request

RequestKind = Literal[
    "push", "push_pull", "pull", "last", "look", "clock", "release", "arrive", "leave"
]
_KINDS: tuple[RequestKind, ...] = get_args(RequestKind)


@dataclass(frozen=True)
class Request:
    """What a worker asks of one shard.

    Attributes:
        kind: What to do. A ``last`` is a push, and a ``look`` a pull, whose values travel as they
            are, whatever the link. A ``clock`` asks for no values. A ``release`` has this worker's
            waiting requests answered at once.
        source: Who asks.
        number: Numbers this worker's requests for values, to tell the answers apart.
        elements: How many values follow.
        clock: Its clock from now on; −1 leaves it.
        least: Answer only when the slowest worker's clock is at least this.
        meeting: Of ``arrive``: which meeting; answered when all have come to it.
        seen: Of ``arrive``: answered, too, when the shard has seen other requests than these many.
    """

    kind: RequestKind
    source: int
    number: int = 0
    elements: int = 0
    clock: int = -1
    least: int = -NEVER
    meeting: int = 0
    seen: int = 0

    @property
    def pushes(self) -> bool:
        """Whether values follow."""
        return self.kind in ("push", "push_pull", "last")

    @property
    def answered(self) -> bool:
        """Whether an answer comes."""
        return self.kind not in ("push", "last", "release", "leave")

    def rounded(self, pushes: Pushes) -> bool:
        """Whether its values travel rounded, where the link is lossy.

        Where models are pushed a pull does not: that direction has no mirror.
        """
        return self.kind in ("push", "push_pull") or (self.kind == "pull" and pushes == "changes")

    def encode(self) -> Tensor:
        """Seven int64 numbers; who asks is known from the connection."""
        numbers = [_KINDS.index(self.kind), self.number, self.elements, self.clock]
        return torch.tensor([*numbers, self.least, self.meeting, self.seen])

    @classmethod
    def decode(cls, header: Tensor, source: int) -> "Request":
        """From seven int64 numbers of rank ``source``.

        Raises:
            OffbeatError: they are no request.
        """
        kind, *numbers = header.tolist()
        if not 0 <= kind < len(_KINDS):
            raise OffbeatError(
                f"a message to the parameter server is no request: {header.tolist()}"
            )
        return cls(_KINDS[kind], source, *numbers)


class Rule:
    """What a push does to a shard, and what it is answered with. This one adds.

    Called under the shard's lock, elementwise by nature, as each shard has a part of the vector.

    Attributes:
        links: Of the ranks whose messages are rounded, by rank.
    """

    links: Mapping[int, Link] = MappingProxyType({})

    def push(self, shard: Tensor, values: Tensor, *, source: int) -> None:
        """Take in ``values`` of rank ``source``."""
        shard.add_(values)

    def advance(self, shard: Tensor) -> None:
        """The slowest worker's clock has risen, before anyone is answered for it."""

    def answer(self, shard: Tensor, *, source: int) -> Tensor:
        """The values for rank ``source``, which pushed; sent as they are now.

        Where models are pushed they may be overwritten.
        """
        return shard

    def state_dict(self) -> dict[str, Any]:
        """What the rule remembers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""


@dataclass(frozen=True)
class Answer:
    """An answer's header: minimum over the shards.

    Attributes:
        clock: The slowest worker's clock (of those that have not arrived).
        met: Whether everyone has come to the meeting.
        seen: Requests the shard has seen, those of workers that wait at a meeting left out.
    """

    clock: int
    met: bool = False
    seen: int = 0


Deliver = Callable[[Answer, Tensor | None], None]


@dataclass
class _Waiting:
    request: Request
    deliver: Deliver


@dataclass
class Shard:
    """One rank's part of the vector, and what it knows of the workers.

    Attributes:
        values: 1-D.
        rule: What a push does.
        workers: How many there are.
        links: To the ranks whose messages are rounded, by rank; what they push is in the payload,
            and so is the answer that is delivered.
        pushes: What travels on these.
        clocks: Each worker's clock.
        version: Pushes taken in so far.
        downloaded: Each worker's version when it was last answered with values.
        staleness: How many pushes of others had come between a worker's download and its push:
            how often.
        taken: Pushes taken in of each worker.
    """

    values: Tensor
    rule: Rule
    workers: int
    links: Mapping[int, Link] = field(default_factory=dict)
    pushes: Pushes = "changes"
    clocks: list[int] = field(default_factory=list)
    version: int = 0
    downloaded: list[int] = field(default_factory=list)
    staleness: dict[int, int] = field(default_factory=dict)
    taken: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clocks = [0] * self.workers
        self.downloaded = [0] * self.workers
        self.taken = [0] * self.workers
        self._own_pushes = [0] * self.workers  # since its last download
        self._closed = False
        self._away = [False] * self.workers
        self._meeting = 0
        self._met_clock = 0  # the slowest clock when everyone had come
        self._seen = 0
        self._slowest = 0
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()
        self.rule.links = self.links

    def link(self, request: Request) -> Link | None:
        """On which the values of a request travel rounded; None: they go as they are."""
        return self.links.get(request.source) if request.rounded(self.pushes) else None

    @cached_property
    def _change(self) -> Tensor:
        """Where the numbers of a payload go, if they are a change."""
        return torch.empty_like(self.values)

    def slowest(self) -> int:
        """The least clock of the workers that have not arrived."""
        present = [c for c, away in zip(self.clocks, self._away, strict=True) if not away]
        return min(present, default=NEVER)

    def handle(self, request: Request, values: Tensor | None, deliver: Deliver) -> None:
        """Serve one request, and those that waited for it, in the order of their arrival."""
        with self._lock:
            if self._closed:
                return
            if values is not None:
                self._take(request, values)
            if request.clock >= 0:
                self.clocks[request.source] = request.clock
            all_came = False
            if request.kind == "arrive" and not self._came(request):
                all_came = self._arrive(request)
                request = replace(request, seen=self._seen)
            self._seen += request.kind != "arrive"
            if request.answered:
                self._waiting.append(_Waiting(request, deliver))
            slowest = self.slowest()
            if slowest > self._slowest or all_came:
                self.rule.advance(self.values)
            self._slowest = slowest
            # Who steps aside waits for nobody's clock.
            aside = request.source if request.kind in ("release", "arrive") else None
            self._waiting = [one for one in self._waiting if not self._answer(one, slowest, aside)]

    def _came(self, request: Request) -> bool:
        """Whether the worker had come to this meeting before, and asks again."""
        return request.meeting != self._meeting or self._away[request.source]

    def _arrive(self, request: Request) -> bool:
        """Note that a worker is at a meeting; whether it is the last to come."""
        self._away[request.source] = True
        self._seen += 1
        if not all(self._away):
            return False
        self._meeting += 1
        self._away = [False] * self.workers
        self._met_clock = self.slowest()
        return True

    def _take(self, request: Request, values: Tensor) -> None:
        source, link = request.source, self.link(request)
        if link is not None:
            values = link.mirror if self.pushes == "models" else self._change
            link.unpack(values)
        behind = self.version - self.downloaded[source] - self._own_pushes[source]
        self.staleness[behind] = self.staleness.get(behind, 0) + 1
        self.rule.push(self.values, values, source=source)
        self.version += 1
        self.taken[source] += 1
        self._own_pushes[source] += 1

    def _answer(self, one: _Waiting, slowest: int, aside: int | None) -> bool:
        """Answer ``one`` if it is due, or of worker ``aside``; returns whether it was."""
        request = one.request
        if request.kind == "arrive":
            met = self._meeting > request.meeting
            due = met or self._seen > request.seen
            if due:
                clock = self._met_clock if met else slowest
                one.deliver(Answer(clock, met, self._seen), None)
            return due
        if slowest < request.least and request.source != aside:
            return False
        if request.kind == "clock":
            one.deliver(Answer(slowest, False, self._seen), None)
            return True
        self.downloaded[request.source], self._own_pushes[request.source] = self.version, 0
        values = self.values
        if request.kind == "push_pull":
            values = self.rule.answer(values, source=request.source)
        if (link := self.link(request)) is not None:
            link.pack(values)
            values = link.payload
        one.deliver(Answer(slowest, False, self._seen), values)
        return True

    def close(self) -> None:
        """Take nothing in any more, and answer nobody."""
        with self._lock:
            self._closed = True

    def begin_anew(self, values: Tensor) -> None:
        """``values`` are the initial ones. Nothing was pushed yet."""
        with self._lock:
            for one in (self.values, *(link.mirror for link in self.links.values())):
                one.copy_(values)

    def state_dict(self) -> dict[str, Any]:
        """Everything, while no request is under way."""
        with self._lock:
            return {
                "values": self.values.clone(),
                "clocks": list(self.clocks),
                "version": self.version,
                "downloaded": list(self.downloaded),
                "staleness": dict(self.staleness),
                "own_pushes": list(self._own_pushes),
                "rule": self.rule.state_dict(),
                "mirrors": {rank: link.mirror.clone() for rank, link in self.links.items()},
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict()``."""
        with self._lock:
            self.values.copy_(state["values"])
            self.clocks, self.version = list(state["clocks"]), state["version"]
            self.downloaded, self.staleness = list(state["downloaded"]), dict(state["staleness"])
            self._own_pushes = list(state["own_pushes"])
            self._slowest = self.slowest()
            self.rule.load_state_dict(state["rule"])
            for rank, mirror in state["mirrors"].items():
                self.links[rank].mirror.copy_(mirror)
