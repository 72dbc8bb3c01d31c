"""What the network between the workers does: interfaces, latencies, bandwidths, and what is odd.

One pair of workers is measured at a time, while the others wait. A message costs latency plus
bytes / bandwidth, the formula of the simulator, so the figures can be given to it as they are.

Over 400 lines because the measurements, what they mean and how they are shown stand side by side.
"""

import dataclasses
import json
import math
import random
import re
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.fabric import Communicator, Handle
from offbeat.fabric.network_interface import interface_in_use
from offbeat.fabric.torch_distributed import TorchCommunicator
from offbeat.units import show_bandwidth, show_bytes

_ALL_PAIRS_UP_TO = 8  # workers; beyond, a ring of neighbours and a sample
_FIRST_BYTES = 16384  # of the messages, which then grow fourfold
_GROWTH = 4
_MOST_TRANSFERS = 20  # of one size between one pair
_PINGS = (5, 100)  # at least and at most, after one that warms up
_PING_SHARE = 0.15  # of a pair's time
_PAIR_SHARE = 0.7  # of all the time
_ASK, _ANSWER, _PAYLOAD = 1, 2, 3  # tags
_END = -1

HEADINGS = ("rank", "host", "interface", "latency", "sends", "receives")
PAIR_HEADINGS = ("pair", "latency", "bandwidth", "message", "transfers")


@dataclass(frozen=True)
class Rank:
    """One worker.

    Attributes:
        rank: Its rank.
        host: Name of its host.
        interface: Interface and address that gloo binds there, as ``eth0 (10.0.0.1; …)``.
    """

    rank: int
    host: str
    interface: str


@dataclass(frozen=True)
class Pair:
    """What ``source`` measured towards ``destination``.

    Attributes:
        source: Rank of the sender.
        destination: Rank of the receiver.
        latency_seconds: Half of the median round trip of a message of 8 bytes.
        bytes_per_second: One way: bytes over the median time less the shortest round trip.
        message_bytes: Size of the messages this was measured with.
        repetitions: Number of those messages.
    """

    source: int
    destination: int
    latency_seconds: float
    bytes_per_second: float
    message_bytes: int
    repetitions: int


@dataclass(frozen=True)
class AllReduce:
    """All-reduces among all workers, each until the last worker has the result.

    Attributes:
        latency_seconds: Median time of one of 4 bytes.
        seconds: Median time of one of ``message_bytes``.
        message_bytes: Its size.
        repetitions: Number of those all-reduces.
        algorithm_bytes_per_second: ``message_bytes / seconds``.
        bus_bytes_per_second: What a link carried each way in a ring: 2 (N - 1) / N of that.
    """

    latency_seconds: float
    seconds: float
    message_bytes: int
    repetitions: int
    algorithm_bytes_per_second: float
    bus_bytes_per_second: float


@dataclass(frozen=True)
class Probe:
    """The network as measured; see ``probe``.

    Attributes:
        ranks: The workers in rank order.
        pairs: The ordered pairs that were measured.
        possible_pairs: How many ordered pairs there are.
        all_reduce: The all-reduces.
        warnings: What is odd, one line each; see ``find_warnings``.
        seed: Seed of the choice of pairs, where not all were measured.
        seconds: How long the measuring took.
    """

    ranks: tuple[Rank, ...]
    pairs: tuple[Pair, ...]
    possible_pairs: int
    all_reduce: AllReduce
    warnings: tuple[str, ...]
    seed: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def probe(
    *,
    size_bytes: int = 4 * 2**20,
    seconds: float = 20.0,
    seed: int = 0,
    timeout_seconds: float = 60.0,
) -> Probe:
    """Measure the network between the workers of the default process group, which must be gloo.

    A collective: all workers call it alike. All of them return the same result.

    Args:
        size_bytes: Largest message (at least 1024). Slow links get smaller ones, to end in time.
        seconds: Time to aim for. A fast network needs less; a very slow one takes longer, as each
            pair gets at least two messages of 16 KiB.
        seed: Of the choice of pairs among more than 8 workers, and of the bytes sent.
        timeout_seconds: How long a single wait may take before the probe fails everywhere.

    Raises:
        ValueError: an argument out of its range.
        OffbeatError: no gloo process group of at least 2 workers.
        CommunicationError: a worker died or did not answer in time; the message names it.
    """
    if size_bytes < 1024:
        raise ValueError(f"size_bytes must be at least 1024, got {size_bytes}")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be positive and finite, got {seconds}")
    if not 0 < timeout_seconds < math.inf:
        raise ValueError(f"timeout_seconds must be positive and finite, got {timeout_seconds}")
    if not dist.is_available() or not dist.is_initialized():
        raise OffbeatError("probe needs an initialised process group: start it with torchrun")
    if (backend := str(dist.get_backend())) != "gloo":
        raise OffbeatError(f"probe measures with gloo, and the process group is {backend}")
    if dist.get_world_size() < 2:
        raise OffbeatError("probe needs at least 2 workers: there is no network with 1")
    fabric = TorchCommunicator(None, timeout_seconds=timeout_seconds)
    _meet(fabric)
    started = time.perf_counter()
    # Noise, as some tunnels compress. Floats, as random bits would hold slow denormal numbers.
    noise = torch.randn(size_bytes // 4, generator=torch.Generator().manual_seed(seed))
    scratch = torch.empty_like(noise)
    order = choose_pairs(fabric.size, seed)
    measured: list[Pair] = []
    for number, (source, destination) in enumerate(order):
        left = max(0.0, started + _PAIR_SHARE * seconds - time.perf_counter())
        # The others wait as long as one pair takes, and must not run into the time-out.
        share = min(left / (len(order) - number), timeout_seconds / 4)
        if fabric.rank == source:
            link = _Link(fabric, destination, noise.view(torch.uint8))
            measured.append(link.measure(share))
        elif fabric.rank == destination:
            _serve(fabric, source, scratch.view(torch.uint8))
        _meet(fabric)
    left = started + seconds - time.perf_counter()
    reduced = _all_reduce(fabric, noise, scratch, max(0.0, left))
    mine = {
        "rank": dataclasses.asdict(
            Rank(fabric.rank, socket.gethostname(), interface_in_use(backend))
        ),
        "pairs": [dataclasses.asdict(pair) for pair in measured],
        "all_reduce": dataclasses.asdict(reduced) if reduced else None,
        "seconds": time.perf_counter() - started,
    }
    payloads = fabric.gather_bytes(json.dumps(mine).encode(), what="results of the probe")
    told = [json.loads(payload) for payload in payloads]
    ranks = tuple(Rank(**one["rank"]) for one in told)
    pairs = tuple(sorted((Pair(**p) for one in told for p in one["pairs"]), key=_ends))
    return Probe(
        ranks=ranks,
        pairs=pairs,
        possible_pairs=fabric.size * (fabric.size - 1),
        all_reduce=AllReduce(**told[0]["all_reduce"]),
        warnings=tuple(find_warnings(ranks, pairs)),
        seed=seed,
        seconds=told[0]["seconds"],
    )


def _ends(pair: Pair) -> tuple[int, int]:
    return pair.source, pair.destination


def choose_pairs(size: int, seed: int = 0) -> list[tuple[int, int]]:
    """The ordered pairs to measure among ``size`` workers.

    All of them up to 8 workers; beyond that neighbours in the ring, both ways, and for each worker
    one more destination, drawn with ``seed``.
    """
    if size <= _ALL_PAIRS_UP_TO:
        return [(a, b) for a in range(size) for b in range(size) if a != b]
    draw = random.Random(seed)
    pairs = [(a, (a + step) % size) for step in (1, -1) for a in range(size)]
    return pairs + [(a, (a + draw.randrange(2, size - 1)) % size) for a in range(size)]


def _meet(fabric: Communicator) -> None:
    """Wait until all workers are here, so that only one pair has the network."""
    fabric.sum(torch.zeros(1), what="meeting between two measurements").wait()


def _control() -> tuple[Tensor, Tensor]:
    """The messages of 8 bytes: how many bytes will follow, and the answer."""
    return torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


class _Link:
    """The sender's side of a measurement; ``_serve`` is the other one."""

    def __init__(self, fabric: Communicator, peer: int, payload: Tensor) -> None:
        self._fabric, self._peer, self._payload = fabric, peer, payload
        self._count, self._answer = _control()

    def _exchange(self, tensor: Tensor, tag: int, what: str) -> float:
        """Seconds from sending ``tensor`` to the answer."""
        text = f"{what} rank {self._peer}"
        # Posted first: gloo would add the trip in which the receiver says that it is ready.
        answer = self._fabric.receive(
            self._answer, source=self._peer, tag=_ANSWER, what=f"answer to {text}"
        )
        start = time.perf_counter()
        sent = self._fabric.send(tensor, destination=self._peer, tag=tag, what=text)
        answer.wait()
        taken = time.perf_counter() - start
        sent.wait()
        return taken

    def _ping(self, announced_bytes: int = 0) -> float:
        return self._exchange(self._count.fill_(announced_bytes), _ASK, "ping to")

    def _transfer(self, count: int) -> float:
        self._ping(count)  # now the receiver waits for the payload
        return self._exchange(self._payload[:count], _PAYLOAD, f"{show_bytes(count)} to")

    def measure(self, seconds: float) -> Pair:
        """Latency and bandwidth, in about ``seconds``."""
        self._ping()
        deadline = time.perf_counter() + _PING_SHARE * seconds
        trips: list[float] = []
        least, most = _PINGS
        while len(trips) < least or (len(trips) < most and time.perf_counter() < deadline):
            trips.append(self._ping())
        size = self._payload.numel()
        count, times = _repeat(self._transfer, size, (1 - _PING_SHARE) * seconds)
        taken = statistics.median(times)
        self._fabric.send(
            self._count.fill_(_END), destination=self._peer, tag=_ASK, what="end of the pings"
        ).wait()
        return Pair(
            source=self._fabric.rank,
            destination=self._peer,
            latency_seconds=statistics.median(trips) / 2,
            # The shortest trip: on a busy host the median one is mostly the wait for a processor,
            # which a long message hides. The floor: one as short as a ping tells nothing.
            bytes_per_second=count / max(taken - min(trips), taken / 2),
            message_bytes=count,
            repetitions=len(times),
        )


def _serve(fabric: Communicator, source: int, scratch: Tensor) -> None:
    """Answer the pings and payloads of ``source`` until it says that it has done."""
    asked, answer = _control()

    def listen() -> Handle[Tensor]:
        return fabric.receive(asked, source=source, tag=_ASK, what=f"ping of rank {source}")

    def reply() -> None:
        what = f"answer to rank {source}"
        fabric.send(answer, destination=source, tag=_ANSWER, what=what).wait()

    ping = listen()
    while True:
        ping.wait()
        count = int(asked.item())
        if count == _END:
            return
        what = f"{show_bytes(count)} of rank {source}"
        payload = (
            fabric.receive(scratch[:count], source=source, tag=_PAYLOAD, what=what)
            if count
            else None
        )
        ping = listen()  # before the answer, or the next ping would find nobody waiting
        reply()
        if payload is not None:
            payload.wait()
            reply()


def _repeat(
    transfer: Callable[[int], float], most_bytes: int, seconds: float
) -> tuple[int, list[float]]:
    """Transfer messages that grow while three of the next size fit in ``seconds``, then repeat.

    Returns the size reached, in bytes, and the seconds of each message of it but the first, which
    warmed up the connection.
    """
    deadline = time.perf_counter() + seconds
    size = min(_FIRST_BYTES, most_bytes)
    taken = transfer(size)
    while size < most_bytes and time.perf_counter() + 3 * _GROWTH * taken <= deadline:
        size = min(_GROWTH * size, most_bytes)
        taken = transfer(size)
    times = [transfer(size)]
    while len(times) < _MOST_TRANSFERS and time.perf_counter() + times[-1] <= deadline:
        times.append(transfer(size))
    return size, times


def _all_reduce(
    fabric: Communicator, noise: Tensor, scratch: Tensor, seconds: float
) -> AllReduce | None:
    """Measure all-reduces as rank 0 directs; the result is there only."""
    taken: list[float] = []
    order = torch.zeros(1, dtype=torch.int64)

    def direct(number: int) -> int:
        order.fill_(number)
        fabric.broadcast(order, what="next measurement").wait()
        return int(order.item())

    def reduce(count: int) -> float:
        scratch[:count].copy_(noise[:count])
        start = time.perf_counter()
        fabric.sum(scratch[:count], what=f"all-reduce of {show_bytes(4 * count)}").wait()
        taken.append(time.perf_counter() - start)
        return taken[-1]

    def slowest() -> list[float]:
        """Of each all-reduce since the last call, the time of the worker that had it last."""
        times = torch.tensor(taken, dtype=torch.float64)
        taken.clear()
        fabric.maximum(times, what="times of the all-reduces").wait()
        return [float(one) for one in times]

    least, most = _PINGS
    once = statistics.median(reduce(1) for _ in range(least))
    for _ in range(direct(max(least, min(most, int(_PING_SHARE * seconds / once))))):
        reduce(1)
    latency = statistics.median(slowest()[least:])
    if fabric.rank != 0:
        while (count := direct(0)) != _END:
            reduce(count)
        slowest()
        return None
    budget = (1 - _PING_SHARE) * seconds
    size, times = _repeat(lambda size: reduce(direct(size // 4)), 4 * noise.numel(), budget)
    direct(_END)
    median = statistics.median(slowest()[-len(times) :])
    return AllReduce(
        latency_seconds=latency,
        seconds=median,
        message_bytes=size,
        repetitions=len(times),
        algorithm_bytes_per_second=size / median,
        bus_bytes_per_second=2 * (fabric.size - 1) / fabric.size * size / median,
    )


def find_warnings(ranks: Sequence[Rank], pairs: Sequence[Pair]) -> list[str]:
    """What is odd about a network, one line each.

    - a rank on another interface than rank 0;
    - a rank on the loopback interface, although there are several hosts;
    - a rank that sends or receives (median over its partners) at less than half of what the median
      rank does; it needs at least two partners, one alone cannot tell which end is slow;
    - a pair whose latency (the better of both directions) is over 5 times the median.

    Where there are several hosts only pairs between hosts are compared.
    """
    found = []
    first = ranks[0].interface.partition(" (")[0]
    for one in ranks:
        name = one.interface.partition(" (")[0]
        if name != first:
            found.append(
                f"rank {one.rank} ({one.host}) uses another interface than rank 0: {name} instead "
                f"of {first}; GLOO_SOCKET_IFNAME chooses it"
            )
    hosts = {one.rank: one.host for one in ranks}
    if len(set(hosts.values())) > 1:
        found += [
            f"rank {one.rank} ({one.host}) uses the loopback interface, which reaches no other "
            "host: name the right one in GLOO_SOCKET_IFNAME"
            for one in ranks
            if re.match(r"lo\b", one.interface) or re.search(r"\(127\.", one.interface)
        ]
    between = [pair for pair in pairs if hosts[pair.source] != hosts[pair.destination]]
    return found + _slow_ranks(ranks, between or pairs) + _late_pairs(between or pairs)


def _slow_ranks(ranks: Sequence[Rank], pairs: Sequence[Pair]) -> list[str]:
    rates = {
        (one.rank, verb): _rate(one.rank, verb, pairs, least=2)
        for one in ranks
        for verb in ("sends", "receives")
    }
    known = [rate for rate in rates.values() if rate is not None]
    usual = statistics.median(known) if known else 0.0
    found = []
    for one in ranks:
        slow = [
            f"{verb} at {_show_rate(rate)}"
            for verb in ("sends", "receives")
            if (rate := rates[one.rank, verb]) is not None and rate < usual / 2
        ]
        if slow:
            found.append(
                f"rank {one.rank} ({one.host}) {' and '.join(slow)}, less than half of the "
                f"{_show_rate(usual)} of the median rank"
            )
    return found


def _rate(rank: int, verb: str, pairs: Sequence[Pair], *, least: int = 1) -> float | None:
    """Bytes a second that ``rank`` sends or receives; None with fewer than ``least`` partners.

    The upper median: among 3 workers one slow partner of two must not make this one slow.
    """
    end = "source" if verb == "sends" else "destination"
    rates = [pair.bytes_per_second for pair in pairs if getattr(pair, end) == rank]
    return statistics.median_high(rates) if len(rates) >= least else None


def _late_pairs(pairs: Sequence[Pair]) -> list[str]:
    best: dict[tuple[int, int], float] = {}
    for pair in pairs:
        ends = min(_ends(pair)), max(_ends(pair))
        best[ends] = min(pair.latency_seconds, best.get(ends, math.inf))
    usual = statistics.median(best.values()) if best else 0.0
    return [
        f"ranks {a} and {b}: latency {_show_seconds(latency)}, over 5 times the median of "
        f"{_show_seconds(usual)}"
        for (a, b), latency in sorted(best.items())
        if latency > 5 * usual
    ]


def rows(result: Probe) -> list[tuple[str, ...]]:
    """One row a rank, in the order of ``HEADINGS``; medians over its partners."""
    table = []
    for one in result.ranks:
        latencies = [p.latency_seconds for p in result.pairs if one.rank in _ends(p)]
        rates = [_rate(one.rank, verb, result.pairs) or 0.0 for verb in ("sends", "receives")]
        latency = _show_seconds(statistics.median(latencies))
        table.append((str(one.rank), one.host, one.interface, latency, *map(_show_rate, rates)))
    return table


def pair_rows(result: Probe) -> list[tuple[str, ...]]:
    """One row an ordered pair, in the order of ``PAIR_HEADINGS``."""
    return [
        (
            f"{pair.source} to {pair.destination}",
            _show_seconds(pair.latency_seconds),
            _show_rate(pair.bytes_per_second),
            show_bytes(pair.message_bytes),
            str(pair.repetitions),
        )
        for pair in result.pairs
    ]


def caption(result: Probe) -> str:
    """What was measured: workers, hosts, pairs (and how they were chosen), seconds."""
    hosts, measured = len({one.host for one in result.ranks}), len(result.pairs)
    pairs = f"all {measured} ordered pairs"
    if measured < result.possible_pairs:
        pairs = (
            f"{measured} of {result.possible_pairs} ordered pairs (the ring of neighbours and a "
            f"sample, seed {result.seed})"
        )
    return (
        f"{len(result.ranks)} workers on {hosts} host{'s' if hosts > 1 else ''}, gloo, {pairs}, "
        f"{result.seconds:.1f} s"
    )


def summary(result: Probe) -> str:
    """The all-reduces in one line."""
    one = result.all_reduce
    return (
        f"all-reduce: latency {_show_seconds(one.latency_seconds)}; "
        f"{show_bytes(one.message_bytes)} in {_show_seconds(one.seconds)}, algorithm bandwidth "
        f"{_show_rate(one.algorithm_bytes_per_second)}, bus bandwidth "
        f"{_show_rate(one.bus_bytes_per_second)}"
    )


def _show_rate(bytes_per_second: float) -> str:
    return show_bandwidth(float(f"{8 * bytes_per_second:.3g}"))


def _show_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{float(f'{seconds / size:.3g}'):g} {unit}"
    return f"{1e6 * seconds:.0f} us"
