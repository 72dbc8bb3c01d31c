"""The formulas of communication and the network they are applied to."""

from collections.abc import Callable
from typing import Any

import pytest

from offbeat.simulate.network import Network, cost


@pytest.mark.parametrize(
    ("kind", "workers", "seconds", "sent"),
    [  # 1 MB at 125 MB/s: M/B = 8 ms; α = 0.1 ms
        ("reduce", 1, 0.0, 0.0),
        ("reduce", 2, 2 * 1 * (0.1e-3 + 4e-3), 1.0),
        ("reduce", 4, 2 * 3 * (0.1e-3 + 2e-3), 1.5),
        ("broadcast", 1, 0.0, 0.0),
        ("broadcast", 2, 8.1e-3, 0.5),
        ("broadcast", 4, 16.2e-3, 0.75),
        ("broadcast", 5, 24.3e-3, 0.8),
        ("broadcast", 8, 24.3e-3, 0.875),
        ("broadcast", 9, 32.4e-3, 8 / 9),
        ("gather", 1, 0.0, 0.0),
        ("gather", 2, 8.1e-3, 1.0),
        ("gather", 4, 24.1e-3, 3.0),
        ("exchange", 1, 0.0, 0.0),
        ("exchange", 2, 0.1e-3 + 1 * 4e-3, 0.5),
        ("exchange", 4, 0.1e-3 + 3 * 2e-3, 0.75),
        ("exchange", 5, 0.1e-3 + 4 * 1.6e-3, 0.8),
    ],
)
def test_collectives_cost_what_the_formulas_say(
    kind: Any, workers: int, seconds: float, sent: float
) -> None:
    """``sent``: megabytes of each worker."""
    assert cost(kind, 1e6, workers, 125e6, 1e-4) == pytest.approx((seconds, 1e6 * sent))


def uneven(worker: int, now: float) -> str | float:
    """Links of 100, 1 and 1000 MB/s; from 2 s on, that of worker 1 has 10 MB/s."""
    slow = "8Mbit/s" if now < 2 else 80e6
    return {1: slow, 2: "8Gbit/s"}.get(worker, "800Mbit/s")


def test_a_message_takes_the_slower_end() -> None:
    """Each link is occupied for M/B, with the bandwidth at that time."""
    links = Network(uneven, latency="1ms")
    assert links.message_seconds(1e6, 0, 3, 0.0) == pytest.approx((0.01, 0.01, 0.001))
    assert links.message_seconds(1e6, 2, 0, 0.0) == pytest.approx((0.001, 0.01, 0.001))
    assert links.message_seconds(1e6, 0, 1, 1.9) == pytest.approx((0.01, 1.0, 0.001))
    assert links.message_seconds(1e6, 1, 0, 2.0) == pytest.approx((0.1, 0.01, 0.001))
    assert links.message_seconds(1e6, 1, 1, 0.0) == (0, 0, 0), "a worker and itself"


def test_a_collective_takes_the_slowest_link() -> None:
    """The minimum over the participants, at the start of the collective."""
    links = Network(uneven, latency=0.0)
    for ranks, now, rate in (([0, 3], 0, 1e8), ([0, 1, 2], 0, 1e6), ([0, 1, 2], 2, 1e7)):
        seconds, _ = links.collective_cost("gather", 1e6, ranks, 1, now)
        assert seconds == pytest.approx((len(ranks) - 1) * 1e6 / rate)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Network("1GB/s"), ValueError, "like 1Gbit/s"),
        (lambda: Network(0), ValueError, "finite and positive"),
        (lambda: Network("1Gbit/s", "100"), ValueError, "like 100us"),
        (lambda: Network("1Gbit/s", -1e-3), ValueError, "at least 0"),
        (lambda: Network(lambda *_: "fast").bits_per_second(0, 0.0), ValueError, "'fast' is not"),
        (lambda: Network(None), TypeError, "None is not a bandwidth"),
        (lambda: Network("1Gbit/s", workers_per_node=0), ValueError, "workers_per_node"),
        (lambda: Network("1Gbit/s", inside="1Gbit/s"), ValueError, "inside needs nodes"),
        (lambda: Network("1Gbit/s", inside_latency="1us"), ValueError, "inside_latency needs"),
        (
            lambda: Network("1Gbit/s", workers_per_node=2, inside="1GB"),
            ValueError,
            "'1GB' is not a bandwidth",
        ),
    ],
)
def test_impossible_networks_are_refused(
    make: Callable[[], Network], error: type[Exception], message: str
) -> None:
    """The error says what is wrong and shows the right form."""
    with pytest.raises(error, match=message):
        make()
