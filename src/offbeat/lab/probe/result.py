"""The result of a probe."""

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
        rank: Rank of the worker.
        host: Name of its host.
        interface: Interface and address that gloo binds there, as ``eth0 (10.0.0.1; …)``.
    """

    rank: int
    host: str
    interface: str


@dataclass(frozen=True)
class Pair:
    """The link from one worker to another, as measured by the sender.

    Attributes:
        source: Rank of the sender.
        destination: Rank of the receiver.
        latency_seconds: Half of the median round trip of an 8-byte message.
        bytes_per_second: Bytes over the median time of a message less the shortest round trip.
        message_bytes: Size of the messages for the bandwidth.
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
    """All-reduces among all workers, each timed until the last worker has its result.

    Attributes:
        latency_seconds: Median time of an all-reduce of 4 bytes.
        seconds: Median time of an all-reduce of ``message_bytes``.
        message_bytes: Size of the large all-reduces.
        repetitions: Number of the large all-reduces.
        algorithm_bytes_per_second: ``message_bytes / seconds``.
        bus_bytes_per_second: Traffic of a link in a ring, 2 (N − 1) / N times that.
    """

    latency_seconds: float
    seconds: float
    message_bytes: int
    repetitions: int
    algorithm_bytes_per_second: float
    bus_bytes_per_second: float


@dataclass(frozen=True)
class Probe:
    """A measured network; see ``probe``.

    Attributes:
        ranks: Workers in rank order.
        pairs: Measured ordered pairs.
        possible_pairs: Number of all ordered pairs.
        all_reduce: All-reduces.
        warnings: Lines of ``find_warnings``.
        seed: Seed that chose the pairs, where not all were measured.
        seconds: Duration of the measurement.
    """

    ranks: tuple[Rank, ...]
    pairs: tuple[Pair, ...]
    possible_pairs: int
    all_reduce: AllReduce
    warnings: tuple[str, ...]
    seed: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def rate_of(
    rank: int, direction: Direction, pairs: Sequence[Pair], *, least: int = 1
) -> float | None:
    """Return the bytes per second that ``rank`` sends or receives: the upper median over partners.

    Among 3 workers, one slow partner of two must not make this worker look slow.

    Returns:
        None if there are fewer than ``least`` partners.
    """
    end = "source" if direction == "sends" else "destination"
    rates = [pair.bytes_per_second for pair in pairs if getattr(pair, end) == rank]
    return statistics.median_high(rates) if len(rates) >= least else None
