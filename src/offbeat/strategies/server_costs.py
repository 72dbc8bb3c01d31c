"""What messages to and from a parameter server cost, as the links of the simulator queue them."""

from collections.abc import Iterable
from dataclasses import dataclass

from offbeat.fabric.link import Pushes, travelling_bytes
from offbeat.fabric.shard import HEADER
from offbeat.fabric.wire import Precision
from offbeat.strategies.node_costs import NodeCosts

REQUEST_BYTES = 8 * HEADER
ANSWER_BYTES = 8 * 3  # the header of an answer
_MOST_STEPS = 10_000  # that are played until they repeat themselves; else the mean of all


@dataclass(frozen=True, kw_only=True)
class ServerCosts:
    """A vector of M bytes in shards on S of N workers, each on a link of its own to one switch.

    Letters: x = w·M/S a shard as it travels, where w is 1 over an exact wire; R how many servers a
    worker sends to, S, or S − 1 where all serve; p = (56 + x)/B and a = (24 + x)/B, what a push and
    an answer keep a link busy. Each worker begins with another server, so that all links are busy
    at once. Where some workers keep no shard, figures are theirs: one that keeps the whole model
    waits for nobody.

    With nodes of L workers, which have a server each for an L-th of the vector, a node's link takes
    their messages one after the other: p = (56·L + x)/B and a = (24·L + x)/B, and the answers for
    all slices but the last may leave before that one's push has come. Where one node alone serves
    several others, their pushes queue for it in ways that this does not follow: the simulator finds
    seconds of a meeting up to a quarter off.

    Attributes:
        workers: N.
        servers: S.
        model_bytes: M.
        shard_bytes: x.
        wire_share: w.
        bytes_per_second: B.
        latency_seconds: α.
        node: Of what each of the ``workers`` consists; None: it is one worker.
    """

    workers: int
    servers: int
    model_bytes: float
    shard_bytes: float
    wire_share: float
    bytes_per_second: float
    latency_seconds: float
    node: NodeCosts | None = None

    @classmethod
    def of(
        cls,
        servers: tuple[int, ...] | None,
        workers: int,
        model_bytes: float,
        bytes_per_second: float,
        latency_seconds: float,
        bytes_per_parameter: float,
        wire: Precision,
        node: NodeCosts | None = None,
    ) -> "ServerCosts":
        """On the ranks ``servers``; None is all.

        Raises:
            ValueError: a rank that there is not.
        """
        if servers is not None and max(servers) >= workers:
            raise ValueError(
                f"servers={servers} needs more workers than the {workers} there are: "
                f"ranks are 0 to {workers - 1}"
            )
        count = workers if servers is None else len(servers)
        slices = 1 if node is None else node.workers
        shard = model_bytes / count
        part = shard / slices / bytes_per_parameter
        travels = slices * travelling_bytes(part, bytes_per_parameter, wire)
        return cls(
            workers=workers,
            servers=count,
            model_bytes=model_bytes,
            shard_bytes=travels,
            wire_share=travels / shard,
            bytes_per_second=bytes_per_second,
            latency_seconds=latency_seconds,
            node=node,
        )

    @property
    def slices(self) -> int:
        """L."""
        return 1 if self.node is None else self.node.workers

    @property
    def shards(self) -> int:
        """S·L: of the model, of which a worker that serves keeps one."""
        return self.servers * self.slices

    @property
    def remote(self) -> int:
        """R."""
        return self.servers - (self.servers == self.workers)

    @property
    def _push(self) -> float:
        return (self.slices * REQUEST_BYTES + self.shard_bytes) / self.bytes_per_second

    @property
    def _answer(self) -> float:
        return (self.slices * ANSWER_BYTES + self.shard_bytes) / self.bytes_per_second

    def push_seconds(self) -> float:
        """Until a push has arrived everywhere: R·p + α."""
        return self.remote * self._push + self.latency_seconds if self.remote else 0.0

    def exchange_seconds(self) -> float:
        """Until a push has been answered: R·p + max((R − 1/L)·a, α) + a/L + α.

        A server that is a worker, too, answers after it has pushed, from the first push that it
        has received; one that is asked by others answers while they push.
        """
        if not self.remote:
            return 0.0
        last, alpha = self._answer / self.slices, self.latency_seconds
        serving = self.servers == self.workers
        queue = self.remote * self._answer - last if serving else 0.0
        return self.remote * self._push + max(queue, alpha) + last + alpha

    def meeting_seconds(self) -> float:
        """The same if nobody is answered before all have pushed.

        R·p + max((1 − 1/L)·(N−1)·a, α) + (N−1)·a/L + α
        """
        if not self.remote:
            return 0.0
        answers, alpha = (self.workers - 1) * self._answer, self.latency_seconds
        last = answers / self.slices
        return self.remote * self._push + max(answers - last, alpha) + last + alpha

    def pull_seconds(self) -> float:
        """Until the vector has come: 56·L/B + R·a + 2α."""
        if not self.remote:
            return 0.0
        request = self.slices * REQUEST_BYTES / self.bytes_per_second
        return request + self.remote * self._answer + 2 * self.latency_seconds

    def busy_seconds(self, pushes: float, answers: float) -> float:
        """How long a server's link is busy with so many of each other worker's."""
        return (self.workers - 1) * max(pushes * self._push, answers * self._answer)

    def sent_bytes(self, pushes: float, pulls: float = 0.0) -> float:
        """Bytes that a worker hands over for so many pushes, and pulls that push nothing.

        Of a node, all of it.
        """
        headers = (pushes + pulls) * self.slices * REQUEST_BYTES
        return self.remote * (headers + pushes * self.shard_bytes)

    # -- inside a node ---------------------------------------------------------------------------

    @property
    def agree_seconds(self) -> float:
        """Until a node of several workers knows whether an answer has come."""
        return 0.0 if self.node is None else self.node.agree_seconds(2)

    @property
    def landing_seconds(self) -> float:
        """Until the slices of an answer are together in it, which is waited for."""
        return 0.0 if self.node is None else self.node.gather_seconds(self.model_bytes)

    @property
    def handing_seconds(self) -> float:
        """Until it knows what rounding keeps from a push, likewise."""
        return self.landing_seconds if self.wire_share < 1 else 0.0

    # -- memory ----------------------------------------------------------------------------------

    def copies(self, pushes: Pushes) -> float:
        """Of the model, on a rank that serves, beside what every worker has: (1 + (N−1)·b + e)/S.

        A shard, and for each other worker a buffer, b = 1. Over a lossy wire that is a mirror and a
        payload, b = 1 + w; and e = (S−1)·w + 1 for the worker's own payloads, and for the change
        that was pushed; where models are pushed e = (S−1)·(w + 1): the worker has mirrors, too.

        In a node an L-th of that, and one for what is put together.
        """
        others, remote, share = self.workers - 1, self.servers - 1, self.wire_share
        together = self.node is not None
        if share == 1:
            return self.workers / self.shards + together
        kept = remote * share + (remote if pushes == "models" else 1)
        return (1 + others * (1 + share) + kept) / self.shards + together


def steady(steps: Iterable[tuple[object, float, int]]) -> tuple[float, float]:
    """Seconds and requests a step, once what happens repeats itself.

    Args:
        steps: After each step: what the following ones depend on; the seconds since the start; the
            requests so far.
    """
    seen: dict[object, tuple[int, float, int]] = {}
    before: tuple[int, float, int] = (0, 0.0, 0)
    for number, (state, seconds, requests) in enumerate(steps, 1):
        before = seen.setdefault(state, (number, seconds, requests))
        if before[0] < number or number == _MOST_STEPS:
            break
    first = (0, 0.0, 0) if before[0] == number else before
    count = number - first[0]
    return (seconds - first[1]) / count, (requests - first[2]) / count
