"""The formulas of communication and the network they are applied to."""

from collections.abc import Callable
from typing import Any

import pytest

from offbeat.simulate.network import Network, seconds_at, sent_bytes


@pytest.mark.parametrize(
    ("kind", "workers", "seconds"),
    [  # 1 MB at 125 MB/s: M/B = 8 ms; α = 0.1 ms
        ("reduce", 2, 2 * 1 * (0.1e-3 + 4e-3)),
        ("reduce", 4, 2 * 3 * (0.1e-3 + 2e-3)),
        ("broadcast", 2, 8.1e-3),
        ("broadcast", 4, 16.2e-3),
        ("broadcast", 5, 24.3e-3),
        ("broadcast", 8, 24.3e-3),
        ("broadcast", 9, 32.4e-3),
        ("gather", 2, 8.1e-3),
        ("gather", 4, 24.1e-3),
        ("reduce", 1, 0.0),
        ("broadcast", 1, 0.0),
        ("gather", 1, 0.0),
        ("exchange", 1, 0.0),
        ("exchange", 2, 0.1e-3 + 1 * 4e-3),
        ("exchange", 4, 0.1e-3 + 3 * 2e-3),
        ("exchange", 5, 0.1e-3 + 4 * 1.6e-3),
    ],
)
def test_collectives_cost_what_the_formulas_say(kind: Any, workers: int, seconds: float) -> None:
    assert seconds_at(kind, 1e6, workers, 125e6, 1e-4) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("reduce", 1500.0),
        ("broadcast", 750.0),
        ("gather", 3000.0),
        ("exchange", 750.0),
    ],
)
def test_workers_send_what_the_formulas_say(kind: Any, sent: float) -> None:
    """1000 bytes among 4 workers."""
    assert sent_bytes(kind, 1000, 4) == sent


def test_text_and_numbers_make_the_same_network() -> None:
    """Bits a second and seconds, or text; equal networks hash alike."""
    text = Network("5Gbit/s", latency="50us", upload="1Gbit/s")
    assert text == Network(5e9, 5e-5, upload=1e9)
    assert hash(text) == hash(Network(5e9, 5e-5, upload=1e9))
    assert Network("1Gbit/s") == Network(1e9, "100us") != Network(2e9)
    assert Network("1Gbit/s", per_worker={1: "1Mbit/s"}) != Network("1Gbit/s")


def test_links_carry_bytes_both_ways() -> None:
    """1 Gbit/s is 125 MB/s; upload makes a link asymmetric; per_worker replaces both directions."""
    even = Network("1Gbit/s")
    assert even.up(0) == even.down(7) == 125e6
    odd = Network("1Gbit/s", upload="200Mbit/s", per_worker={2: "80Mbit/s", 3: 8e9})
    assert (odd.up(0), odd.down(0)) == (25e6, 125e6)
    assert (odd.up(2), odd.down(2)) == (10e6, 10e6)
    assert (odd.up(3), odd.down(3)) == (1e9, 1e9)


def message_seconds(links: Network, size: float, source: int, destination: int) -> float:
    """Seconds of a message on free links: the latency and the slower of the two links."""
    latency = 0.0 if source == destination else links.latency_of((source, destination))
    return latency + max(links.link_seconds(size, source, destination))


def test_a_message_takes_the_slower_end() -> None:
    """min(up(source), down(destination)): directions differ."""
    links = Network(
        "800Mbit/s", latency="1ms", upload="80Mbit/s", per_worker={1: "8Mbit/s", 2: "8Gbit/s"}
    )
    assert message_seconds(links, 1e6, 0, 3) == pytest.approx(0.101)  # up 10 MB/s
    assert message_seconds(links, 1e6, 2, 0) == pytest.approx(0.011)  # down 100 MB/s
    assert message_seconds(links, 1e6, 0, 1) == pytest.approx(1.001)  # down 1 MB/s
    assert message_seconds(links, 1e6, 1, 0) == pytest.approx(1.001)
    assert message_seconds(links, 1e6, 1, 1) == 0, "no network between a worker and itself"


def test_a_collective_takes_the_slowest_link() -> None:
    """The minimum over the participants and both directions."""
    links = Network("800Mbit/s", upload="80Mbit/s", per_worker={1: "8Mbit/s", 2: "8Gbit/s"})
    assert links.collective_bytes_per_second([0, 3]) == 10e6
    assert links.collective_bytes_per_second([0, 1, 2]) == 1e6
    assert links.collective_bytes_per_second([2]) == 1e9
    assert Network("80Mbit/s", upload="800Mbit/s").collective_bytes_per_second([0, 1]) == 10e6


@pytest.mark.parametrize("ranks", [[], [1, 1]])
def test_a_collective_needs_distinct_ranks(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="distinct ranks, got"):
        Network("1Gbit/s").collective_seconds("reduce", 1.0, ranks)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Network("1GB/s"), ValueError, "like 1Gbit/s"),
        (lambda: Network(0), ValueError, "finite and positive"),
        (lambda: Network("1Gbit/s", "100"), ValueError, "like 100us"),
        (lambda: Network("1Gbit/s", -1e-3), ValueError, "at least 0"),
        (lambda: Network("1Gbit/s", upload="fast"), ValueError, "'fast' is not a bandwidth"),
        (lambda: Network("1Gbit/s", per_worker={0: "1MB"}), ValueError, "'1MB' is not"),
        (lambda: Network("1Gbit/s", per_worker={-1: 1e9}), ValueError, "rank in per_worker"),
        (lambda: Network("1Gbit/s", per_worker={"0": 1e9}), TypeError, "rank in per_worker"),
        (lambda: Network(None), TypeError, "None is not a bandwidth"),
    ],
)
def test_impossible_networks_are_refused(
    make: Callable[[], Network], error: type[Exception], message: str
) -> None:
    """The error says what is wrong and shows the right form."""
    with pytest.raises(error, match=message):
        make()
