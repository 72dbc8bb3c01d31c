"""The result of ``probe``, a measurement of the network between workers."""

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
        rank: Rank in the process group.
        host: Name of the worker's host.
        interface: Network interface and address that gloo uses, as in ``eth0 (10.0.0.1; …)``.
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
        bytes_per_second: Bandwidth: ``message_bytes`` divided by the time of a large message
            without latency. This time is m − s, but at least m/2. m is the median time until a
            large message is answered, s the shortest round trip of an 8-byte message.
        message_bytes: Size of the large messages.
        repetitions: Number of the large messages.
    """

    source: int
    destination: int
    latency_seconds: float
    bytes_per_second: float
    message_bytes: int
    repetitions: int

    @property
    def ends(self) -> tuple[int, int]:
        """(source, destination)."""
        return self.source, self.destination


@dataclass(frozen=True)
class Probe:
    """A measured network: the result of ``probe``.

    Attributes:
        ranks: Workers in rank order.
        pairs: Measured links from one worker to another.
        possible_pairs: Number of all links, measured or not: N (N − 1) among N workers.
        warnings: One line for each anomaly; see ``find_warnings``.
        seed: Seed of the payload and, if not all pairs were measured, of the choice of pairs.
        seconds: Duration of the measurement.
    """

    ranks: tuple[Rank, ...]
    pairs: tuple[Pair, ...]
    possible_pairs: int
    warnings: tuple[str, ...]
    seed: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        values = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def rate_of(
    rank: int, direction: Direction, pairs: Sequence[Pair], *, least: int = 1
) -> float | None:
    """Return the bytes per second at which ``rank`` sends to or receives from other workers.

    It is the upper median over the measured links. With two of them, it is the rate of the faster
    link, so that one slow partner does not make ``rank`` look slow. None if ``pairs`` contains
    fewer than ``least`` (≥ 1) links of ``rank`` in this direction.
    """
    end = "source" if direction == "sends" else "destination"
    rates = [pair.bytes_per_second for pair in pairs if getattr(pair, end) == rank]
    return statistics.median_high(rates) if len(rates) >= least else None
