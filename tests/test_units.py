"""Quantities with units."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.units import (
    show_bandwidth,
    show_bytes,
    show_seconds,
    to_bandwidth,
    to_bytes,
    to_count,
    to_seconds,
)

READERS = [
    (to_bandwidth, "1Gbit/s", 1e9),
    (to_seconds, "50ms", 0.05),
]


@pytest.mark.parametrize(
    ("read", "values"),
    [
        (
            to_bandwidth,
            {
                **{"1Gbit/s": 1e9, "200mbit": 2e8, "200mbit/s": 2e8, "5gbit": 5e9, "25 Gbps": 25e9},
                **{"1.5Mbit/s": 1.5e6, "9bit/s": 9, " 2 kbits/s ": 2e3, "1e3 GBIT/S": 1e12},
            },
        ),
        (
            to_seconds,  # to the last bit, with the micro sign and the Greek letter
            {
                **{"100us": 1e-4, "100 µs": 1e-4, "100μs": 1e-4, "50ms": 0.05, "1.5 s": 1.5},
                **{"2min": 120.0, "1h": 3600.0, "3ns": 3e-9, "1e-3s": 1e-3},
            },
        ),
        (
            to_bytes,
            {"80GB": 80e9, "24GiB": 24 * 2**30, "512 mib": 2**29, "3b": 3.0},
        ),
        (to_count, {"25M": 25e6, "1.2B": 1.2e9, "7e6": 7e6, "110 m": 110e6, "1T": 1e12, "12": 12}),
    ],
)
def test_text_is_read(read: Callable[[Any], float], values: dict[str, float]) -> None:
    assert {text: read(text) for text in values} == values


@pytest.mark.parametrize(
    ("read", "form", "texts"),
    [
        (
            to_bandwidth,
            r"write a number and a unit, like 1Gbit/s or 200Mbit/s \(bits, not bytes\)",
            [
                *("", "fast", "1", "-1Gbit/s", "0Gbit/s", "1.2.3Gbit/s", "1e999Gbit/s"),
                *("inf Gbit/s", "1GB/s", "1GBps", "1 GBPS", "1Gb/s", "1Gbit/s 2Gbit/s"),
            ],
        ),
        (
            to_seconds,  # a megasecond is not a millisecond
            "write a number and a unit, like 100us, 50ms",
            ["", "1", "1 minute", "5MS", "-1s", "0s", "1:30", "1..5s", "nan s"],
        ),
        (
            to_count,
            "write a number with k, M, B, T or nothing behind it",
            ["", "many", "25MB", "0", "-5M", "1e999"],
        ),
    ],
)
def test_other_text_is_refused(read: Callable[[Any], float], form: str, texts: list[str]) -> None:
    """The error shows the correct form."""
    for text in texts:
        with pytest.raises(ValueError, match=form):
            read(text)


def test_zero_seconds_are_read_where_allowed() -> None:
    """A latency may be 0, the duration of a step may not."""
    assert to_seconds("0us", allow_zero=True) == 0
    assert to_seconds("0s", allow_zero=True) == to_seconds(0, allow_zero=True) == 0
    with pytest.raises(ValueError, match="at least 0"):
        to_seconds(-1, allow_zero=True)


@pytest.mark.parametrize(("read", "text", "value"), READERS)
def test_text_and_numbers_are_accepted(
    read: Callable[[Any], float], text: str, value: float
) -> None:
    """A number is in base units. Numbers of numpy are accepted, too."""
    assert read(text) == read(value) == read(np.float64(value)) == value
    assert read(7) == read(np.int64(7)) == 7
    assert type(read(np.float32(1))) is float


@pytest.mark.parametrize(("read", "text", "_"), READERS)
def test_other_values_are_refused(read: Callable[[Any], float], text: str, _: float) -> None:
    """Numbers must be positive and finite. The error shows the correct form."""
    for number in (0, -1, math.inf, math.nan, 10**400):
        with pytest.raises(ValueError, match=f"finite and positive.*{text}"):
            read(number)
    for value in (None, True, [1], b"1s", 1j):
        with pytest.raises(TypeError, match=text):
            read(value)


def test_numbers_are_shown() -> None:
    assert show_bandwidth(2e8) == "200 Mbit/s"
    assert show_bandwidth(12) == "12 bit/s"
    assert [show_bytes(n) for n in (12, 1300, 2.5e6, 4e9)] == ["12 B", "1.3 kB", "2.5 MB", "4.0 GB"]
    shown = {
        **{0.12: "120 ms", 1e-4: "100 us", 2.5e-9: "2.5 ns", 1.5: "1.5 s", 59: "59 s"},
        **{90: "1.5 min", 7200: "2 h", 0.00099996: "1000 us", 0: "0 s", -0.12: "-120 ms"},
        math.inf: "inf s",
    }
    assert {seconds: show_seconds(seconds) for seconds in shown} == shown


@given(st.floats(1e-12, 1e9))
def test_shown_seconds_are_read(seconds: float) -> None:
    """Shown seconds can be parsed. They have four digits."""
    assert to_seconds(show_seconds(seconds)) == pytest.approx(seconds, rel=5.01e-4)
