"""Parsers of text and arguments return, or raise an error of one line."""

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import offbeat
from offbeat import Compute
from offbeat.errors import OffbeatError
from offbeat.units import to_bandwidth, to_count, to_seconds
from offbeat_lab.job import Job
from offbeat_lab.methods.registry import parse_method
from offbeat_lab.samplers import parse_injection


def returns(attempt: Callable[[], object]) -> bool:
    """Return True if ``attempt`` returns, False if it raises an error of one line."""
    message = ""
    try:
        attempt()
        return True
    except UnicodeError:
        raise
    except (ValueError, TypeError, OffbeatError) as error:
        message = str(error)
    assert message.strip()
    assert "\n" not in message
    return False


PIECES = [
    *("bsp", "local", "selsync", "async", "fedavg", "streaming", "ideal", "torch:ddp", "own:A"),
    *("period", "delta", "outer_lr", "weights", "parts", "hook", "--wire", "--lr-scale"),
    *("=", ",", ":", "/", " ", "1", "8", "-1", "0.5", "nan", "inf", "true", "none", "int8", "auto"),
    *("1e400", "9" * 400, "1" * 5000, "\0", "\n", "é", "\ud800", "1Gbit/s", "ms", "us", "M", "B"),
]
TEXTS = st.one_of(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.text(max_size=12))
quickly = settings(deadline=None, max_examples=60, derandomize=True, database=None)


@quickly
@given(TEXTS)
@example("local:period=" + "9" * 10**5)
@example("fedavg:weights=" + "1/" * 10**4)
@example(":" * 10**5)
def test_any_text(text: str) -> None:
    """Random text as a strategy, a strategy with options, a quantity, an injection."""
    readers: list[Callable[[str], object]] = [
        *(parse_method, parse_injection, to_bandwidth, to_seconds, to_count),
        lambda text: Job("digits").under(text).check_method(),
    ]
    for reader in readers:
        returns(lambda reader=reader: reader(text))  # type: ignore[misc]


def test_ranks_beyond_the_workers_are_rejected() -> None:
    with pytest.raises(ValueError, match="compute names worker 99, but there are 2"):
        offbeat.simulate(lambda: None, workers=2, compute=Compute(slowdown={99: 2.0}))
