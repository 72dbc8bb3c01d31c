"""What a probe of the network found, as values."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Direction = Literal["sends", "receives"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


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

    @property
    def ends(self) -> tuple[int, int]:
        """Source and destination."""
        return self.source, self.destination


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


def rate_of(
    rank: int, direction: Direction, pairs: Sequence[Pair], *, least: int = 1
) -> float | None:
    """Bytes a second that ``rank`` sends or receives; None with fewer than ``least`` partners.

    The upper median: among 3 workers one slow partner of two must not make this one slow.
    """
    end = "source" if direction == "sends" else "destination"
    rates = [pair.bytes_per_second for pair in pairs if getattr(pair, end) == rank]
    return statistics.median_high(rates) if len(rates) >= least else None
