"""Parsers of text, files and arguments return, or raise an error of one line."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import offbeat
from offbeat import Compute
from offbeat.errors import OffbeatError
from offbeat.telemetry import Stats
from offbeat.units import to_bandwidth, to_count, to_seconds
from offbeat_lab.events import Evaluation
from offbeat_lab.job import Job
from offbeat_lab.methods.registry import parse_method
from offbeat_lab.results import Result, read_results
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


# -- text -----------------------------------------------------------------------------------------

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


# -- files ----------------------------------------------------------------------------------------


def results() -> bytes:
    point = Evaluation(step=1, seconds=0.5, metric=0.5, metrics={"accuracy": 0.5})
    one = Result(
        job=Job("digits"),
        metric="accuracy",
        higher_is_better=True,
        target=0.9,
        link="loopback",
        machine="this",
        versions={"offbeat": "0"},
        simulated=False,
        points=(point,),
        stats=(Stats(steps=3),),
    )
    return json.dumps(one.to_dict()).encode()


def test_a_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    """The error names file and line for missing fields, wrong types and invalid JSON."""
    path = tmp_path / "results.jsonl"
    good = json.loads(results())
    for change in ({"points": []}, {"stats": 3}, {"job": {}}, {"job": 1}, {"points": [{"a": 1}]}):
        path.write_bytes(results() + b"\n" + json.dumps({**good, **change}).encode() + b"\n")
        with pytest.raises(ValueError, match=r"results\.jsonl, line 2, is not a result: "):
            read_results(path)
    required = [f.name for f in dataclasses.fields(Result) if f.default is dataclasses.MISSING]
    assert "points" in required
    for missing in required:
        path.write_text(json.dumps({k: v for k, v in good.items() if k != missing}))
        with pytest.raises(ValueError, match=rf"line 1, is not a result: KeyError: '{missing}'"):
            read_results(path)
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(ValueError, match="line 1, is not a result"):
        read_results(path)
