"""Parsers of text, files and arguments return, or raise an error of one line."""

import dataclasses
import gzip
import io
import json
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import offbeat
from offbeat import Compute, Network
from offbeat.errors import OffbeatError
from offbeat.simulate import Straggler
from offbeat.telemetry import Stats
from offbeat.units import to_bandwidth, to_count, to_seconds
from offbeat_lab.events import Evaluation
from offbeat_lab.job import Job
from offbeat_lab.methods.registry import parse_method
from offbeat_lab.recipes.cifar import read_archive
from offbeat_lab.recipes.mnist import read_idx
from offbeat_lab.recipes.wikitext import read_words, windows
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
def test_any_text(text: str) -> None:
    """Random text as a strategy, a strategy with options, a quantity, an injection."""
    readers: list[Callable[[str], object]] = [
        *(parse_method, parse_injection, to_bandwidth, to_seconds, to_count),
        lambda text: Job("digits").under(text).check_method(),
    ]
    for reader in readers:
        returns(lambda reader=reader: reader(text))  # type: ignore[misc]


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.just(10**400),
    st.sampled_from(["1Gbit/s", "50ms", "1e999s", "", b"1", 1j, object(), Straggler(0, 0, 1, 2.0)]),
    st.lists(st.floats(), max_size=2),
    st.dictionaries(st.integers(-1, 2) | st.text(max_size=1), st.floats() | st.text(max_size=4)),
)


def arguments(function: Callable[..., object]) -> st.SearchStrategy[dict[str, Any]]:
    names = [*function.__annotations__]
    return st.dictionaries(st.sampled_from([n for n in names if n != "return"]), ANYTHING)


@quickly
@given(arguments(Network.__init__), arguments(Compute.__init__), st.lists(ANYTHING, max_size=4))
def test_any_argument(network: Any, compute: Any, straggler: list[Any]) -> None:
    """Random arguments of Network, Compute and Straggler. Accepted ones can be used."""
    returns(lambda: repr(Network(**{"bandwidth": "1Gbit/s"} | network)))
    returns(lambda: Compute(**compute).seconds(0, 0, 0))
    returns(lambda: Straggler(*straggler))


def test_ranks_beyond_the_workers_are_rejected() -> None:
    for arguments, what in (
        ({"compute": Compute(slowdown={99: 2.0})}, "compute names worker 99, but there are 2"),
        ({"compute": Compute(stragglers=[Straggler(2, 0, 1, 2.0)])}, "compute names worker 2, "),
        ({"compute": Compute(trace={3: [0.1]})}, "compute names worker 3, but there are 2"),
        ({"network": Network("1Gbit/s", per_worker={2: 1e6})}, "network names worker 2, but"),
    ):
        with pytest.raises(ValueError, match=what):
            offbeat.simulate(lambda: None, workers=2, **arguments)  # type: ignore[arg-type]


# -- files ----------------------------------------------------------------------------------------


def idx() -> bytes:
    return b"\0\0\x08\x03" + struct.pack(">3I", 2, 28, 28) + bytes(2 * 784)


def archive() -> bytes:
    file, images = io.BytesIO(), np.zeros((2, 32, 32, 3), np.uint8)
    np.savez_compressed(file, x_train=images, y_train=[1, 2], x_test=images, y_test=[3, 4])
    return file.getvalue()


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


FILES: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "images": (idx(), read_idx),
    "images.gz": (gzip.compress(idx()), read_idx),
    "archive.npz": (archive(), read_archive),
    "words": (
        b"the cat sat on the mat \n" * 9,
        lambda path: windows(read_words(path, {"<unk>": 0}, grow=True)),
    ),
    "results.jsonl": (results(), read_results),
}


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Return ``content`` with bytes changed, removed or inserted, or cut off."""
    data = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 8])):
        place = draw.randrange(len(data) + 1)
        match draw.randrange(4):
            case 0:
                data[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[place : place + draw.choice([1, 50, len(data)])]
            case 2:
                data[place:place] = draw.randbytes(draw.randrange(9))
            case 3:  # headers are short
                data[draw.randrange(16) :][:1] = b"\xff"
                data[: min(16, place)] = data[: min(16, place)][::-1]
    return bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_any_file(name: str, tmp_path: Path) -> None:
    """Intact files are read; randomly damaged ones are read or rejected."""
    content, reader = FILES[name]
    path = tmp_path / name
    path.write_bytes(content)
    reader(path)
    draw, refused = random.Random(name), 0
    for _ in range(80):
        path.write_bytes(damaged(content, draw))
        refused += not returns(lambda: reader(path))
    assert refused > 8, "else the damage does nothing"


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


def test_long_text_is_rejected_quickly() -> None:
    begin = time.perf_counter()
    for text in ("local:period=" + "9" * 10**5, "fedavg:weights=" + "1/" * 10**4, ":" * 10**5):
        returns(lambda text=text: parse_method(text))  # type: ignore[misc]
    assert time.perf_counter() - begin < 5
