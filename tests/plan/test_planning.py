"""The recommendation, the arguments and the display of a plan."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offbeat import Plan, plan
from offbeat.strategies.registry import parse_strategy

formulas = sys.modules["offbeat.plan"]
ROOT = Path(__file__).parents[2]
CASE: dict[str, Any] = dict(parameters="25M", step_time="100ms", workers=4, bandwidth="1Gbit/s")
SMALL: dict[str, Any] = {**CASE, "parameters": "200k"}


def texts(result: Plan) -> list[str]:
    return [row.strategy for row in result.rows]


# -- the rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bandwidth", "advice"),
    [
        ("1Gbit/s", "bsp"),  # a mean takes 10 ms, of which 4.0 % of the step are visible
        ("400Mbit/s", "streaming"),
        ("20Mbit/s", "streaming"),  # DDP waits 81 %
        ("8Mbit/s", "streaming"),  # 92 %
    ],
)
def test_the_waiting_of_ddp_decides(bandwidth: str, advice: str) -> None:
    result = plan(
        **{**SMALL, "bandwidth": bandwidth, "step_time": "200ms" if advice == "bsp" else "60ms"}
    )
    idle = result.rows[0].idle
    assert texts(result)[0] == "bsp"
    assert result.recommendation == advice
    assert advice == ("bsp" if idle < 0.05 else "streaming")
    assert f"{formulas.percent(idle)} of the time" in result.reason


def test_a_wait_at_the_limit_does_not_change_the_advice() -> None:
    """Streaming may wait 5 % of the time, and is recommended nevertheless."""
    for bandwidth in ("180Mbit/s", "190Mbit/s", "200Mbit/s", "210Mbit/s", "220Mbit/s"):
        result = plan(parameters="124M", step_time="2.5s", workers=8, bandwidth=bandwidth)
        assert result.recommendation == "streaming"


def test_long_latencies_take_a_small_staleness() -> None:
    """Without it streaming averaging ends badly there: docs/evidence.md."""
    result = plan(**{**SMALL, "latency": "120ms"})
    assert result.recommendation == "streaming:staleness=3"
    assert texts(result)[-2:] == ["streaming", "streaming:staleness=3"]
    assert "streaming:staleness=3" not in texts(plan(**SMALL))


def test_a_single_worker_never_waits() -> None:
    result = plan(**{**SMALL, "workers": 1})
    assert result.recommendation == "bsp"
    assert result.reason == "a single worker waits for no other"
    for row in result.rows:
        assert (row.idle, row.payload_bytes, row.interval_steps) == (0, 0, math.inf)


@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md"])
def test_the_pages_show_the_same_rule(page: str) -> None:
    """Limits and strategies of the table are those of the code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    start = re.search(r"^ *\| (DDP waits|idle under BSP).*$", text, re.MULTILINE)
    assert start is not None
    table = text[start.start() :].partition("\n\n")[0]
    least = f"{100 * formulas.LEAST_WAITING:g}"
    for limits in (f"less than {least} %", f"{least} % and more"):
        assert limits in table, limits
    by_name = {
        "`StreamingAveraging()`": "streaming",
        '`BSP()` and `wire="int4"`': "bsp --wire int4",
    }
    for shown, row in by_name.items():
        assert shown in table
        assert row in texts(plan(**CASE))


def test_the_readme_shows_s() -> None:
    """For models, links and steps as a user knows them; the measured limit is that of the code."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    cases = re.findall(r"(\d+) for (\d+[MB]) (?:parameters )?at (\d+ Gbit/s) and ([\d.]+ s)", text)
    assert len(cases) == 4
    for shown, parameters, bandwidth, step_time in cases:
        result = plan(parameters=parameters, bandwidth=bandwidth, step_time=step_time, workers=8)
        assert f"{result.send_steps:.0f}" == shown
    assert f"up to an S of {formulas.MEASURED_SEND_STEPS:g}]" in text


# -- the measured range ----------------------------------------------------------------------------


def test_s_is_the_steps_to_send_the_model_once() -> None:
    """124 million numbers of 32 bits over 1 Gbit/s, in steps of half a second."""
    result = plan(parameters="124M", step_time="500ms", workers=8, bandwidth="1Gbit/s")
    assert result.send_steps == pytest.approx(7.936)
    assert "S = 7.9: a link needs 7.9 steps" in result.advice()[0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"parameters": "5M", "bandwidth": "10Gbit/s"}, "models of up to 0.5 million parameters"),
        ({"workers": 5}, "up to 4 workers"),
        ({"bandwidth": "1Mbit/s"}, "S up to 33"),
    ],
)
def test_a_warning_names_what_was_not_measured(changes: dict[str, Any], named: str | None) -> None:
    """Then speed-ups of averaged models are upper bounds, and beyond S = 33 unknown for some."""
    result = plan(**{**SMALL, "bandwidth": "50Mbit/s", **changes})
    if named is not None:
        assert named in result.warning
    assert bool(result.warning) == (named is not None)
    shown = {row[0]: row[2] for row in result.table().rows}
    assert shown["bsp"].startswith(("0", "1", "2", "3", "4"))
    assert shown["local:period=8"].startswith("≤ ") == (named is not None)
    assert (shown["streaming"] == "unknown") == ("S up to 33" in result.warning)


# -- arguments -------------------------------------------------------------------------------------


def test_every_setting_is_answered_at_once() -> None:
    """Extreme models and links, within the time limit of a test."""
    for parameters in ("1", "150k", "70B"):
        for bandwidth in ("1kbit/s", "10Mbit/s", "100Gbit/s"):
            for workers in (2, 10_000):
                changes = dict(parameters=parameters, bandwidth=bandwidth, workers=workers)
                for row in plan(**{**CASE, **changes}).rows:
                    assert row.step_seconds >= 0.1
                    assert 0 <= row.idle <= 1


def test_torch_is_not_imported() -> None:
    code = f"""
import sys
from offbeat.plan import plan
plan(**{CASE!r})
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_rows_are_the_given_strategies() -> None:
    given = ["bsp --wire int8", "diloco:period=50", "streaming --wire int2"]
    result = plan(**CASE, strategies=given)
    assert texts(result) == ["bsp --wire int8", "diloco:period=50", "streaming"]
    assert [row.wire for row in result.rows] == ["int8", "float32", "int2"]
    assert result.recommendation == plan(**CASE).recommendation, "the rule does not depend on rows"
    for text in texts(plan(**CASE)):
        parse_strategy(text.partition(" --wire ")[0])


@pytest.mark.parametrize(
    "text", ["fedavg:period=8", "ssp:staleness=3", "mine:Mine:period=2", "ideal", "torch:ddp"]
)
def test_other_strategies_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"none for .*with offbeat compare --simulate"):
        plan(**CASE, strategies=["bsp", text])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": "25 apples"}, "25M"),
        ({"step_time": "fast"}, "50ms"),
        ({"bandwidth": "1GB/s"}, "1Gbit/s"),
        ({"latency": "1"}, "100us"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"strategies": []}, "must be a list like"),
        ({"strategies": "bsp"}, "must be a list like"),
        ({"strategies": ["bsp --wire int3"]}, "--wire must be"),
        ({"strategies": ["selsync:delta=0.3"]}, "plan needs target_lssr"),
        ({"strategies": ["async:schedule=eager,staleness=1"]}, "no formula for async.*staleness"),
    ],
)
def test_impossible_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    """The error shows the right form."""
    with pytest.raises(ValueError, match=message):
        plan(**{**CASE, **changes})


@pytest.mark.parametrize(
    "changes",
    [{"parameters": None}, {"workers": 2.5}, {"strategies": [3]}],
)
def test_wrong_types_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        plan(**{**CASE, **changes})


# -- display ---------------------------------------------------------------------------------------


def test_table_and_dictionary() -> None:
    """The dictionary contains JSON values, and the table shows them."""
    result = plan(**CASE)
    assert result.caption == (
        "25,000,000 parameters (100.0 MB), 100 ms a step, 4 workers, 1 Gbit/s, latency 100 us; "
        "predicted, not measured"
    )
    table = result.table()
    assert all(len(row) == len(table.headings) for row in table.rows)
    told = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert [row["strategy"] for row in told["rows"]] == [row[0] for row in table.rows]
    assert told["model_bytes"] == 100e6
    alone = plan(**{**CASE, "workers": 1}).to_dict()
    assert alone["rows"][0]["interval_steps"] == "inf"


@pytest.mark.parametrize(
    ("workers", "memory", "told", "less"),
    [  # 24 bytes per parameter and the messages: 0.26·3, or 0.26·4 and an eighth of 4
        (
            2,
            "1GB",
            "up to 619.5 MB with streaming, which leaves 380.5 MB of 1.0 GB for",
            "streaming:outer_gain=1,stored=bfloat16 takes up to 569.5 MB, stored=host 519.5 MB",
        ),
        (
            8,
            "0.5GiB",
            "up to 638.5 MB with streaming, more than the 536.9 MB, and activations",
            "streaming:outer_gain=1,stored=bfloat16 takes up to 588.5 MB, stored=host 538.5 MB",
        ),
        (1, 8e8, "up to 400.0 MB with streaming, which leaves 400.0 MB of 800.0 MB for", ""),
    ],
)
def test_what_fits_into_the_memory(workers: int, memory: str | float, told: str, less: str) -> None:
    """The last line of the advice, only if the size is given."""
    case = {**CASE, "workers": workers}
    assert "Memory" not in " ".join(plan(**case).advice())
    last = plan(**case, device_memory=memory).advice()[-1]
    assert last.startswith("Memory: AdamW in float32 takes 400.0 MB, and ")
    assert told in last
    # With 22 and with 20 bytes in place of 24.
    assert last.endswith(f"{less}." if less else "for activations.")
    with pytest.raises(ValueError, match="is not a size; write a number and a unit, like 80GB"):
        plan(**case, device_memory="80")


def test_the_page_shows_the_output() -> None:
    """The page has the same caption, rows and advice, and leaves out the note under the table."""
    page = " ".join((ROOT / "docs/planning.md").read_text(encoding="utf-8").split())
    result = plan(parameters="25M", step_time="120ms", workers=16, bandwidth="5gbit")
    table = result.table()
    rows = " ".join(word for row in (table.headings, *table.rows) for word in row)
    assert f"```text {result.caption} {rows} … {' '.join(result.advice())} ```" in page
