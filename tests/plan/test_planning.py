"""The function ``offbeat.plan``: arguments, suggestions, recommendation and what is shown."""

import json
import math
from typing import Any

import pytest
import torch

import offbeat
from offbeat import (
    StreamingAveraging,
    parse_strategy,
    plan,
)
from offbeat.plan.placeholder_model import shapes_of
from offbeat.plan.planning import check_arguments
from offbeat.plan.recommend import LOST_STEPS
from offbeat.plan.result import HEADINGS, Plan
from offbeat.plan.suggest import IDLE_LIMIT, evaluate, suggest_streaming
from offbeat_lab.timing.step_time import measure_recipe

# 4 workers, 100 MB, 1 Gbit/s, 100 us, 100 ms a step: a mean takes 1.2 s
CASE: dict[str, Any] = dict(parameters="25M", step_time="100ms", workers=4, bandwidth="1Gbit/s")
SMALL: dict[str, Any] = {**CASE, "parameters": "200k", "latency": "1us"}


def texts(result: Plan, kind: str) -> list[str]:
    return [row.strategy for row in result.rows if row.strategy.split(":")[0] == kind]


def test_the_default_strategies() -> None:
    """Text forms parse, idle is a share, and the searches find the right settings."""
    result = plan(**CASE)
    assert [row.strategy.split(":")[0] for row in result.rows] == [
        *("bsp", "local", "local", "selsync", "streaming", "async", "async")
    ]
    for row in result.rows:
        parse_strategy(row.strategy)
        assert row.steady
        assert 0 <= row.idle <= 1
        assert row.throughput == pytest.approx(4 * (1 - row.idle), rel=1e-6)
    # m + r at most 1/19 of H·t: 1.2076 ≤ H·0.1/19 from H = 229.4 on
    assert texts(result, "local") == ["local:period=8", "local:period=230"]
    cyclic, eager = result.rows[-2:]
    assert cyclic.strategy == "async:staleness=26"
    assert cyclic.idle < 1e-6
    (less,) = plan(**CASE, strategies=["async:staleness=24"]).rows
    assert less.idle > 0.005
    bound = int(eager.strategy.rpartition("=")[2])
    (same,) = plan(**CASE, strategies=[eager.strategy]).rows
    assert same.step_seconds == pytest.approx(eager.step_seconds)
    assert same.apart_steps < bound, "the suggested bound is not reached"
    json.dumps(result.to_dict(), allow_nan=False)


def test_a_larger_staleness_is_suggested_if_streaming_would_wait() -> None:
    """A million numbers over 4 Mbit/s and 60 ms."""
    far = {**CASE, "workers": 8, "bandwidth": "4Mbit/s", "latency": "60ms", "step_time": "20ms"}
    setting = check_arguments(**{**far, "parameters": "1M"})[0]
    usual = evaluate(StreamingAveraging(), None, setting)
    larger = suggest_streaming(None, setting)
    assert usual.forecast.idle > IDLE_LIMIT >= larger.forecast.idle
    assert isinstance(larger.strategy, StreamingAveraging)
    assert larger.strategy.staleness > StreamingAveraging().staleness


def test_a_model_keeps_its_tensors() -> None:
    """One large tensor is one bucket and one fragment, however many fragments are requested."""
    model = torch.nn.Sequential(torch.nn.Linear(2000, 4000), torch.nn.Linear(4000, 10))
    case = {**CASE, "parameters": model}
    result = plan(**case, strategies=["diloco:period=8,fragments=2", "diloco:period=8"])
    two, one = result.rows
    assert result.parameters == 2000 * 4000 + 4000 + 40_000 + 10
    assert two.payload_bytes == pytest.approx(one.payload_bytes, rel=1e-3)
    assert two.step_seconds < one.step_seconds + 1e-3
    with pytest.raises(ValueError, match="at most 4, the number of parameter tensors"):
        plan(**case, strategies=["diloco:period=8,fragments=5"])


@pytest.mark.parametrize(
    "text",
    [
        "fedavg:period=8",
        "ssp:staleness=3",
        "downpour",
        "easgd:period=4",
        "sparseloco",
        "powersgd",
    ],
)
def test_baselines_are_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"plan has no row for .*: it is a baseline to compare with"
    ):
        plan(**CASE, strategies=["bsp", text])


# -- recommendation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bandwidth", "advice"),
    [
        ("10Gbit/s", "bsp"),  # m = 1 ms
        ("1Gbit/s", "bsp"),  # 10 ms
        ("400Mbit/s", "streaming"),  # 24 ms
        ("1Mbit/s", "streaming"),
    ],
)
def test_advice_changes_as_bandwidth_falls(bandwidth: str, advice: str) -> None:
    """BSP, then streaming."""
    result = plan(**{**SMALL, "bandwidth": bandwidth}, strategies=["bsp", "streaming"])
    assert result.recommendation.strategy == advice
    assert (result.rows[0].idle <= LOST_STEPS) == (advice == "bsp")


def test_advice_without_streaming() -> None:
    """A short period of LocalSGD, then async with a growing staleness."""
    some = ["bsp", "local:period=5", "local:period=8", "async:staleness=2", "async:staleness=194"]
    for bandwidth, strategy in {
        "400Mbit/s": "local:period=5",  # 24 ms
        "200Mbit/s": "async:staleness=2",  # 48 ms
        "1Mbit/s": "async:staleness=194",
    }.items():
        network = {**SMALL, "bandwidth": bandwidth}
        assert plan(**network, strategies=some).recommendation.strategy == strategy


def test_the_recommendation_is_one_of_the_given_strategies() -> None:
    """The fewest steps between means within 5 % of the best throughput; BSP if none is faster."""
    some = plan(**CASE, strategies=["bsp", "local:period=300", "local:period=290"])
    assert some.recommendation.strategy == "local:period=290"
    assert "local:period=290 waits 4.0 %" in some.reason
    alone = plan(**CASE, strategies=["bsp"])
    assert alone.recommendation.strategy == "bsp"
    assert "no other strategy given is faster" in alone.reason
    tied = plan(**CASE, strategies=["diloco:period=40,overlap=20", "local:period=40"])
    assert tied.recommendation.strategy == "diloco:period=40,overlap=20"
    waits = plan(**CASE, strategies=["async"])
    assert "a mean is in flight for 12.1 steps, and async waits 34 %" in waits.reason


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        # Both average every 40 steps, and the mean takes 12.1 steps: the idle shares are equal.
        (["diloco:period=40", "local:period=40"], "local:period=40"),
        # Both are at most 26 steps apart, and the eager schedule waits for less than 1 %.
        (["async:schedule=eager,staleness=26", "async:staleness=26"], "async:staleness=26"),
    ],
)
def test_equal_strategies_are_recommended_in_the_documented_order(
    given: list[str], advice: str
) -> None:
    """The order is that of the list of strategies, with eager ``async`` after cyclic."""
    first, second = (plan(**CASE, strategies=texts) for texts in (given, given[::-1]))
    assert first.recommendation.strategy == second.recommendation.strategy == advice


def test_reasons_contain_the_figures() -> None:
    fast = plan(**{**SMALL, "bandwidth": "10Gbit/s"}, strategies=["bsp"])
    assert fast.reason == (
        "exact synchronous training costs almost nothing here, BSP waits 1.0 % of the time"
    )
    near = plan(**{**SMALL, "bandwidth": "1Gbit/s"}, strategies=["bsp"])
    assert near.reason.startswith("BSP waits 8.8 % of the time, no more than ")
    middle = plan(**{**SMALL, "bandwidth": "400Mbit/s"}, strategies=["bsp", "streaming"])
    assert middle.reason.startswith(
        "BSP would wait 19 % of the time; streaming sends the model in int2 while computing, all "
    )
    short = plan(**{**SMALL, "bandwidth": "400Mbit/s"}, strategies=["local:period=5"])
    assert short.reason == "BSP would wait 19 % of the time; local:period=5 waits 4.6 %"
    slow = plan(**{**CASE, "bandwidth": "10Mbit/s"}, strategies=["async:staleness=2500"])
    assert "2,500 steps apart: watch the final metric" in slow.reason
    assert "2,500 steps apart, watch the final metric" in slow.rows[0].note
    hidden = plan(**CASE, strategies=["async:staleness=26"])
    assert "a mean is in flight for 13 steps, and async:staleness=26 does not wait" in hidden.reason


def test_jitter_alone_is_a_reason() -> None:
    """On a fast network 8 workers with 10 % jitter wait 12.5 % with BSP; 8 steps halve it twice."""
    case = {**SMALL, "bandwidth": 1e12, "workers": 8, "jitter": 0.1}
    wild = plan(**case, strategies=["bsp", "local:period=8"])
    assert wild.rows[0].idle == pytest.approx(0.125, abs=0.008)
    assert wild.recommendation.strategy == "local:period=8"


def test_a_single_worker_never_waits() -> None:
    result = plan(**{**SMALL, "workers": 1}, jitter=0.5)
    assert result.recommendation.strategy == "bsp"
    assert result.reason == "a single worker waits for no other"
    for row in result.rows:
        assert row.step_seconds == pytest.approx(0.1)
        assert (row.idle, row.payload_bytes, row.steady) == (pytest.approx(0), 0, True)
        assert row.note == "nothing to wait for"
    node = plan(**{**CASE, "workers": 2}, workers_per_node=2, strategies=["bsp"])
    assert node.reason == "a single node waits for no other"


# -- nodes -----------------------------------------------------------------------------------------

NODES: dict[str, Any] = dict(
    workers=8, workers_per_node=2, inside="10Gbit/s", inside_latency="10us", parameters="100k"
)


def test_nodes_have_the_default_rows() -> None:
    result = plan(**{**CASE, **NODES})
    assert "between nodes of 2 with 10 Gbit/s" in result.caption()
    kinds = {row.strategy.split(":")[0] for row in result.rows}
    assert kinds == {"bsp", "local", "selsync", "streaming", "async"}
    assert result.node_step_seconds > 0.1
    for row in result.rows:
        assert row.step_seconds >= result.node_step_seconds * (1 - 1e-9)
        assert row.memory_bytes >= 400e3 * 0.99, "the mean inside needs a copy"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 9}, "workers=9 do not fill nodes of workers_per_node=2"),
        ({"workers_per_node": 1}, "inside needs nodes"),
    ],
)
def test_impossible_nodes_of_a_plan_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, offbeat.AttachError), match=message):
        plan(**{**CASE, **NODES, **changes})


# -- arguments and what is shown -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": "25 apples"}, "25M"),
        ({"step_time": "fast"}, "50ms"),
        ({"step_time": -1}, "50ms"),
        ({"bandwidth": "1GB/s"}, "1Gbit/s"),
        ({"bandwidth": 0}, "1Gbit/s"),
        ({"latency": "1"}, "100us"),
        ({"latency": -1e-6}, "100us"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"jitter": 10}, "0.1 for 10 %"),
        ({"jitter": math.nan}, "0.1 for 10 %"),
        ({"wire": "float16"}, "wire must be .float32"),
        ({"strategies": []}, "must be a list like"),
        ({"strategies": "bsp"}, "must be a list like"),
        ({"strategies": ["nothing"]}, "there are async, bsp"),
        ({"strategies": ["local"]}, "local:period=8"),
    ],
)
def test_impossible_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    """The error shows the right form."""
    with pytest.raises(ValueError, match=message):
        plan(**{**CASE, **changes})


@pytest.mark.parametrize(
    "changes",
    [{"parameters": None}, {"workers": 2.5}, {"jitter": "0.1"}, {"strategies": [3]}],
)
def test_wrong_types_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        plan(**{**CASE, **changes})


def test_table_and_dictionary() -> None:
    """Markdown and table show the same cells; the dictionary contains JSON values."""
    result = plan(**CASE, strategies=["bsp", "async:staleness=26", "selsync:delta=inf"])
    table = result.table().rows
    assert all(len(row) == len(HEADINGS) for row in table)
    assert table[0][:6] == ("bsp", "1.243 s", "0.32x", "92 %", "100.0 MB", "100.4 MB")
    lines = result.markdown().splitlines()
    assert lines[0].startswith("25,000,000 parameters (100.0 MB), 100 ms a step, 4 workers")
    assert [line for line in lines if line.startswith("| `")] == [
        f"| {' | '.join((f'`{row[0]}`', *row[1:]))} |" for row in table
    ]
    assert lines[-1] == f"Try `{result.recommendation.strategy}` first: {result.reason}."
    told = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert told["rows"][1]["step_seconds"] == pytest.approx(0.1)
    assert told["rows"][2]["apart_steps"] == "inf"
    assert told["recommendation"] in told["rows"]
    assert (told["model_bytes"], told["workers"], told["bandwidth"]) == (100e6, 4, 1e9)


@pytest.mark.parametrize(
    ("strategy", "note"),
    [
        ("local:period=8", "a mean every 8 steps; "),
        # votes 0.01 and the mean 12.08 steps
        ("async:staleness=26", "a mean every 13 steps, in flight for 13; "),
        ("diloco:period=40,fragments=4", "a part of the model every 10 steps, the whole of it "),
        ("selsync:delta=inf", "no mean; "),
    ],
)
def test_a_note_says_how_often_means_are_taken(strategy: str, note: str) -> None:
    (row,) = plan(**CASE, strategies=[strategy]).rows
    assert row.note.startswith(note)


@pytest.mark.parametrize("parameters", [1, 1000, 20_000])
def test_a_small_model_is_one_part_and_sent_in_each_step(parameters: int) -> None:
    case: dict[str, Any] = dict(step_time=1, workers=2, bandwidth="1Gbit/s")
    (row,) = plan(parameters=parameters, **case, strategies=["streaming"]).rows
    assert row.note.startswith("1 part in int2, the whole model in each step; ")


def test_the_caption_and_the_dictionary_name_the_wire() -> None:
    exact, lossy = (plan(**SMALL, strategies=["bsp"], wire=wire) for wire in (None, "int8"))
    assert "sent as" not in exact.caption()
    assert "200,000 parameters (800.0 kB) sent as int8, 100 ms a step" in lossy.caption()
    assert (exact.to_dict()["wire"], lossy.to_dict()["wire"]) == ("float32", "int8")


def test_a_recipe_is_measured() -> None:
    """Counts parameters and BatchNorm statistics; keeps the random state of the caller."""
    pytest.importorskip("sklearn")
    before = torch.get_rng_state()
    model, step = measure_recipe("digits")
    assert shapes_of(model).count == 151_498 + 2 * (32 + 64)
    assert 1e-5 < step.low <= step.seconds <= step.high
    assert torch.equal(before, torch.get_rng_state())
