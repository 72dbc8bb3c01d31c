"""Bandwidths and bytes as people write them."""

import pytest

from offbeat.units import parse_bandwidth, show_bandwidth, show_bytes


@pytest.mark.parametrize(
    ("text", "value"),
    [("1Gbit/s", 1e9), ("200mbit", 2e8), ("25 Gbps", 25e9), ("1.5Mbit/s", 1.5e6), ("9bit/s", 9)],
)
def test_bandwidth_is_read(text: str, value: float) -> None:
    assert parse_bandwidth(text) == value


@pytest.mark.parametrize("text", ["", "fast", "1", "1GB/s", "-1Gbit/s", "0Gbit/s", "1.2.3Gbit/s"])
def test_other_forms_are_refused(text: str) -> None:
    """The error shows the right form."""
    with pytest.raises(ValueError, match="write a number and a unit, like 1Gbit/s"):
        parse_bandwidth(text)


def test_numbers_are_shown() -> None:
    assert show_bandwidth(2e8) == "200 Mbit/s"
    assert show_bandwidth(12) == "12 bit/s"
    assert [show_bytes(n) for n in (12, 1300, 2.5e6, 4e9)] == ["12 B", "1.3 kB", "2.5 MB", "4.0 GB"]
