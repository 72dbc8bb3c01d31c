"""The cost model: hand-computed values, what must hold for any network, and its advice."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offbeat
from offbeat import BSP, AsyncAveraging, LocalSGD, SelSync, StreamingAveraging, parse_strategy
from offbeat.lab.measure import measure_recipe
from offbeat.plan import HEADINGS, IDLE_LIMIT, LOST_STEPS, Plan, plan
from offbeat.strategies import STRATEGIES
from offbeat.strategies.forecast import Forecast
from offbeat.strategies.node_costs import maximum_of_normals

# 4 workers, 100 MB, 1 Gbit/s = 125 MB/s, 100 us, 100 ms a step
MERGE = 6 * (12 * 1e-4 + 100e6 / (4 * 125e6))  # 2(N−1)·(α + S/(N·B)) in 12 buckets: 1.2072 s
ROLL = 6 * (1e-4 + 56 / (4 * 125e6))  # 600.672 us
CASE: dict[str, Any] = dict(parameters="25M", step_time="100ms", workers=4, bandwidth="1Gbit/s")


def one(strategy: str, **changes: Any) -> Forecast:
    (row,) = plan(**{**CASE, **changes}, strategies=[strategy]).rows
    return row


def text(kind: str, result: Plan) -> list[str]:
    return [r.strategy for r in result.rows if r.strategy.split(":")[0] == kind]


def check(row: Forecast, step: float, payload: float, copies: int, apart: float) -> None:
    assert row.step_seconds == pytest.approx(step, rel=1e-12)
    assert row.throughput == pytest.approx(4 * 0.1 / step, rel=1e-12)
    assert row.idle == pytest.approx(1 - 0.1 / step, abs=1e-12)
    assert row.payload_bytes == pytest.approx(payload, rel=1e-12)
    assert row.memory_bytes == copies * 100e6
    assert row.apart_steps == pytest.approx(apart)


def test_bsp_by_hand() -> None:
    """From when the first MiB of gradients is there the link is busy: 13 buckets, and 9 numbers."""
    row = one("bsp")
    begins = 0.1 * (1 / 3 + 2 / 3 * 2**20 / 100e6)  # a third of the step is forward
    sums = 6 * (13 * 1e-4 + 100e6 / (4 * 125e6)) + 6 * (1e-4 + 72 / (4 * 125e6))
    check(row, begins + sums, 100e6 + 72, 1, 0)
    assert row.overlapped_step_seconds == pytest.approx(sums)
    fast = one("bsp", bandwidth="100Gbit/s")
    assert fast.overlapped_step_seconds == 0.1
    last = 100e6 - 2**20 - 11 * 2**23  # leaves when backward has ended, as do the numbers
    assert fast.step_seconds == pytest.approx(0.1 + 6 * (2e-4 + (last + 72) / (4 * 12.5e9)))


def test_local_sgd_by_hand() -> None:
    """(H·t + r + m)/H a step."""
    check(one("local:period=8"), 0.1 + (MERGE + ROLL) / 8, (100e6 + 56) / 8, 1, 8)
    # m + r at most 1/19 of H·t: 1.2078 ≤ H·0.1/19 from H = 229.5
    assert text("local", plan(**CASE)) == ["local:period=8", "local:period=230"]


def test_selsync_by_hand() -> None:
    """Flags at each step, a mean at one of ten."""
    row = one("selsync:target_lssr=0.9")
    check(row, 0.1 + ROLL + MERGE / 10, 56 + 10e6, 1, 10)
    assert one("selsync:delta=0.3", lssr=0.9).step_seconds == pytest.approx(row.step_seconds)
    check(one("selsync:delta=0"), 0.1 + ROLL + MERGE, 56 + 100e6, 1, 1)
    check(one("selsync:delta=inf"), 0.1 + ROLL, 56, 1, math.inf)
    # The mean interval: a flag after k < 5 steps, or 5; each step has one with probability 0.1.
    interval = sum(k * 0.1 * 0.9 ** (k - 1) for k in range(1, 5)) + 5 * 0.9**4
    row = one("selsync:target_lssr=0.9,max_interval=5")
    check(row, 0.1 + ROLL + MERGE / interval, 56 + 100e6 / interval, 1, interval)
    check(one("selsync:delta=inf,max_interval=5"), 0.1 + ROLL + MERGE / 5, 56 + 20e6, 1, 5)
    check(  # the flags arrive during the next step; a mean waits for those of its own
        one("selsync:target_lssr=0.9,flags=deferred"), 0.1 + (ROLL + MERGE) / 10, 56 + 10e6, 1, 10
    )


def test_cyclic_async_by_hand() -> None:
    """max(β·t, r + m)/β a step: a merge of 12.08 steps is hidden by 13, not by 8."""
    check(one("async:staleness=26"), 0.1, (100e6 + 56) / 13, 2, 26)
    check(one("async"), (ROLL + MERGE) / 8, (100e6 + 56) / 8, 2, 16)
    assert one("async:staleness=26,outer_momentum=0.5").memory_bytes == 400e6
    assert text("async", plan(**CASE))[0] == "async:staleness=26"


def test_eager_async_by_hand() -> None:
    """A roll of 1 step and a merge of 13, so 14 steps a merge and 1 + 2·13 own steps past P."""
    free = "async:schedule=eager,staleness="
    check(one(f"{free}27"), 0.1, (100e6 + 56) / 14, 2, 27)
    # One less: past P there are 13 steps at landing, 1 for the roll, so 12 are left for the merge
    # of 12.072; next time 13 again, since 12 + 1 + 13 = 26. 14 and 13 steps: two merges in 27.
    row = one(f"{free}26")
    assert row.step_seconds == pytest.approx(0.1 + 0.0072 / 27)
    assert row.payload_bytes == pytest.approx((100e6 + 56) * 2 / 27)
    # τ = 1: a step, the whole roll, the whole merge.
    check(one(f"{free}1"), 0.1 + ROLL + MERGE, 100e6 + 56, 2, 1)


def test_a_lossy_wire_by_hand() -> None:
    """Each of 11 full buckets and the last: two stages of 3 messages, each of so many blocks."""
    blocks = 11 * 2**23 // (4 * 4 * 512) + math.ceil((100e6 - 11 * 2**23) / (4 * 4 * 512))
    chunk = 516 * blocks
    mean = 6 * (12 * 1e-4 + chunk / 125e6)
    row = one("local:period=8", wire="int8")
    assert row.step_seconds == pytest.approx(0.1 + (ROLL + mean) / 8)
    assert row.payload_bytes == pytest.approx((56 + 5 * chunk) / 8)
    result = plan(**CASE, wire="int8")
    assert result.mean_seconds == pytest.approx(mean)
    assert "100.0 MB) sent as int8, 100 ms a step" in result.caption()
    assert result.to_dict()["wire"] == "int8"


def test_every_strategy_is_planned() -> None:
    """Over a lossy wire, too."""
    texts = ["bsp", "local:period=8", "fedavg:period=8", "selsync", "async", "streaming"]
    texts.append("diloco:period=8")
    servers = ["ssp:staleness=3", "downpour", "easgd"]
    assert {t.split(":")[0] for t in texts + servers} == set(STRATEGIES)
    found = plan(**CASE, strategies=texts + servers)
    assert [row.strategy for row in found.rows] == texts + servers
    assert found.recommendation in found.rows
    short = plan(**CASE, strategies=texts + servers, wire="bfloat16")
    for row, before in zip(short.rows, found.rows, strict=True):
        if row.strategy not in ("streaming", "downpour"):  # which send as often as they can
            share = row.payload_bytes / before.payload_bytes
            assert share == pytest.approx(0.5 if row.strategy in servers else 0.625, rel=1e-4)


def test_the_recommendation_may_be_any_strategy() -> None:
    """DiLoCo with overlap waits for nobody; of two alike the first in the list of strategies."""
    some = plan(**CASE, strategies=["local:period=40", "diloco:period=40,overlap=20"])
    assert some.recommendation.strategy == "diloco:period=40,overlap=20"
    assert some.reason.endswith("diloco:period=40,overlap=20 waits 0 %")
    alike = plan(**CASE, strategies=["diloco:period=40", "fedavg:period=40", "local:period=40"])
    assert alike.recommendation.strategy == "local:period=40"


OWN = """
from dataclasses import dataclass
from offbeat.strategies.base import Costs, Forecast, Strategy, Worker, setting

@dataclass(frozen=True, kw_only=True, repr=False)
class Silent(Strategy):
    every: int = setting(5, least=1)

    def due(self, worker: Worker) -> bool:
        return worker.step % self.every == 0

@dataclass(frozen=True, kw_only=True, repr=False)
class Told(Silent):
    def forecast(self, costs: Costs) -> Forecast:
        mean = costs.mean_seconds(costs.model_bytes)
        return costs.forecast(
            self,
            step=(costs.slowest(self.every) + costs.roll_seconds + mean) / self.every,
            apart=self.every,
            payload=(56 + costs.mean_bytes(costs.model_bytes)) / self.every,
            copies=costs.mean_copies,
            note="as local SGD",
        )
"""


def test_own_strategies_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By text or as objects, once they define ``forecast``."""
    (tmp_path / "planned_by_itself.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    texts = ["local:period=7", "planned_by_itself:Told:every=7"]
    local, own = plan(**CASE, strategies=texts).rows
    assert own.strategy == texts[1]
    assert own.step_seconds == local.step_seconds
    assert own.payload_bytes == local.payload_bytes
    told = parse_strategy(texts[1])
    (again,) = plan(**CASE, strategies=[told]).rows
    assert again == own
    assert plan(**CASE, strategies=[told, "local:period=7"]).recommendation == local
    with pytest.raises(ValueError, match=r"for planned_by_itself:Silent: .* forecast\(costs\)"):
        plan(**CASE, strategies=["planned_by_itself:Silent"])


def test_example_of_the_docstring() -> None:
    """A merge of 7.2 steps is hidden by staleness 16, twice 8."""
    given = ["bsp", "local:period=8", "async:staleness=16", "async:schedule=eager"]
    result = plan(**{**CASE, "step_time": 1.2078 / 7.2}, strategies=given)
    assert result.recommendation.strategy == "async:staleness=16"
    assert result.recommendation.idle == 0
    assert "BSP would wait 87 % of the time" in result.reason
    assert "a merge takes 7.2 steps, so async:staleness=16 hides it" in result.reason


def test_numbers_and_text_mean_the_same() -> None:
    """Base units: seconds, bits a second."""
    numbers = plan(parameters=25_000_000, step_time=0.1, workers=4, bandwidth=1e9, latency=1e-4)
    assert numbers == plan(**CASE)
    assert numbers.mean_seconds == pytest.approx(MERGE)


def test_strategies_are_taken_as_objects_too() -> None:
    given = [BSP(), LocalSGD(period=8), SelSync(target_lssr=0.9), AsyncAveraging(staleness=8)]
    result = plan(**CASE, strategies=given)
    assert [r.strategy for r in result.rows] == [str(s) for s in given]
    assert result.rows == plan(**CASE, strategies=[str(s) for s in given]).rows


networks = st.fixed_dictionaries(
    {
        "parameters": st.floats(1, 1e10),
        "step_time": st.floats(1e-4, 100),
        "workers": st.integers(1, 300),
        "bandwidth": st.floats(1e6, 1e12),
        "latency": st.floats(0, 0.1),
        "jitter": st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
        "lssr": st.floats(0.01, 0.99),
    }
)
FIXED = (
    "bsp",
    "local:period=8",
    "fedavg:period=8,fraction=0.5",
    "selsync:target_lssr=0.9",
    "selsync:target_lssr=0.9,flags=deferred",
    "async:staleness=2",
    "async:staleness=16",
    "diloco:period=8,fragments=2",
    "diloco:period=8,fragments=4,overlap=3",
    "ssp:staleness=0",
    "ssp:staleness=3",
    "downpour:push_every=2,fetch_every=3",
    "easgd:period=4",
    "easgd:period=4,synchronous=true",
)


@settings(deadline=None)
@given(networks, st.sampled_from(["float32", "bfloat16", "int8"]))
def test_what_holds_everywhere(case: dict[str, Any], wire: Any) -> None:
    """Text forms parse, idle is a share, nobody is faster than N workers, the advice is a row."""
    result = plan(**case, wire=wire)
    for row in result.rows:
        parse_strategy(row.strategy)
        assert 0 <= row.idle <= 1
        assert row.throughput <= case["workers"] * (1 + 1e-12)
        assert row.overlapped_step_seconds <= row.step_seconds
        assert row.throughput == pytest.approx(case["workers"] * (1 - row.idle), abs=1e-9)
    assert result.recommendation in result.rows
    bsp, *_, streaming, cyclic, eager = result.rows
    advised = bsp if bsp.idle <= LOST_STEPS else streaming
    assert result.recommendation == advised
    assert streaming.idle <= IDLE_LIMIT + 1e-12
    assert {row.wire for row in result.rows} == {wire}
    assert cyclic.idle <= IDLE_LIMIT + 1e-12
    assert eager.idle == 0, "the suggested bound is not reached"
    json.dumps(result.to_dict(), allow_nan=False)


@settings(deadline=None)
@given(networks, st.floats(1, 1e3))
def test_more_bandwidth_is_never_slower(case: dict[str, Any], factor: float) -> None:
    slow = plan(**case, strategies=FIXED)
    fast = plan(**{**case, "bandwidth": factor * case["bandwidth"]}, strategies=FIXED)
    for before, after in zip(slow.rows, fast.rows, strict=True):
        assert after.step_seconds <= before.step_seconds * (1 + 1e-12)


@settings(deadline=None)
@given(networks, st.floats(0, 1), st.floats(0, 1))
def test_more_jitter_is_never_faster(case: dict[str, Any], one: float, two: float) -> None:
    less, more = sorted((one, two))
    calm = plan(**{**case, "jitter": less}, strategies=FIXED)
    wild = plan(**{**case, "jitter": more}, strategies=FIXED)
    for before, after in zip(calm.rows, wild.rows, strict=True):
        assert before.step_seconds <= after.step_seconds * (1 + 1e-12)


@settings(deadline=None)
@given(networks)
def test_staleness_is_the_smallest_that_hides(case: dict[str, Any]) -> None:
    """Two less would wait for the merge, or, with jitter, more than 5 % for the slowest."""
    result = plan(**case)
    staleness = int(result.rows[-2].apart_steps)
    assert result.rows[-2].strategy == f"async:staleness={staleness}"
    assert staleness % 2 == 0
    if case["jitter"] == 0:
        assert result.rows[-2].idle < 1e-8
    if staleness > 2:
        (less,) = plan(**case, strategies=[f"async:staleness={staleness - 2}"]).rows
        roll = plan(**{**case, "parameters": 14}).mean_seconds
        hides = result.mean_seconds + roll <= (staleness / 2 - 1) * case["step_time"]
        assert not hides or less.idle > IDLE_LIMIT


@settings(deadline=None)
@given(networks)
def test_period_is_the_smallest_that_spreads(case: dict[str, Any]) -> None:
    """One less would wait more than 5 %."""
    result = plan(**case)
    local = [r for r in result.rows if r.strategy.startswith("local")]
    good = min((r for r in local if r.idle <= IDLE_LIMIT), key=lambda r: r.apart_steps)
    if good.apart_steps > 1 and len(local) == 2:
        period = int(good.apart_steps) - 1
        (less,) = plan(**case, strategies=[f"local:period={period}"]).rows
        assert less.idle > IDLE_LIMIT


# A model of 25 million numbers, in 3/4·6.125 bits each, passes 1 Mbit/s in 114.8 s; twice a part of
# it in τ steps is at most t/0.95.
PARTS = StreamingAveraging()._count(100e6)
BOUND = math.ceil(2 * 114.84 / PARTS / (0.1 / 0.95))


@pytest.mark.parametrize(
    ("parameters", "advice"),
    [
        (  # in buckets, most of which backward hides
            "25M",
            {
                "100Gbit/s": "bsp",  # m = 12 ms
                "20Gbit/s": "bsp",  # 60 ms
                "5Gbit/s": "streaming",  # 240 ms
                "10Mbit/s": "streaming",
                "1Mbit/s": f"streaming:staleness={BOUND}",
            },
        ),
        (  # in a single bucket, which leaves when backward has ended
            "200k",
            {
                "10Gbit/s": "bsp",  # 1 ms
                "1Gbit/s": "bsp",  # 10 ms
                "400Mbit/s": "streaming",  # 24 ms
                "1Mbit/s": "streaming",
            },
        ),
    ],
)
def test_advice_changes_as_bandwidth_falls(parameters: str, advice: dict[str, str]) -> None:
    """BSP, then streaming, in the end with a larger bound."""
    case = {**CASE, "parameters": parameters, "latency": "1us"}
    for bandwidth, strategy in advice.items():
        assert plan(**{**case, "bandwidth": bandwidth}).recommendation.strategy == strategy


def test_advice_without_streaming() -> None:
    """A short period of LocalSGD, then async with a growing staleness."""
    case = {**CASE, "parameters": "200k", "latency": "1us"}
    for bandwidth, strategy in {
        "400Mbit/s": "local:period=5",  # 24 ms
        "200Mbit/s": "async:staleness=2",  # 48 ms
        "1Mbit/s": "async:staleness=194",
    }.items():
        network = {**case, "bandwidth": bandwidth}
        others = [
            row.strategy for row in plan(**network).rows if not row.strategy.startswith("streaming")
        ]
        assert plan(**network, strategies=others).recommendation.strategy == strategy


@pytest.mark.parametrize(
    ("precision", "bits"),
    [("float32", 64), ("bfloat16", 32), ("int8", 16.125), ("int4", 8.125), ("int2", 6.125)],
)
def test_streaming_is_planned_in_the_precision_it_would_choose(precision: str, bits: float) -> None:
    """The most exact one in which the model passes in two and a half steps; else the last."""
    # (N−1)/N·(bits of both stages)·M numbers in 2.5·t
    least = 3 / 4 * bits * 25e6 / 0.25
    enough = {**CASE, "latency": "1ns", "bandwidth": 1.001 * least}
    (row,) = plan(**enough, strategies=["streaming"], wire="auto").rows
    assert row.wire == precision
    assert f" in {precision}, " in row.note
    slower = {**enough, "bandwidth": 0.99 * least}
    (less,) = plan(**slower, strategies=["streaming"], wire="auto").rows
    assert (less.wire == precision) == (precision == "int2")
    (told,) = plan(**enough, strategies=["streaming"], wire="int4").rows
    assert told.wire == "int4"


def test_one_part_is_told_as_one() -> None:
    """A model of a thousand numbers: not "1 parts", and not "every 1 steps"."""
    found = plan(
        parameters=1000, step_time=1, workers=2, bandwidth="1Gbit/s", strategies=["streaming"]
    )
    # 100 us and 2 us: both send each other 2 kbit
    note = "1 part in int2, 0.000102 steps each, the whole model in each step"
    assert found.rows[0].note == note


def test_streaming_chooses_about_what_was_planned() -> None:
    """In the simulator, after some tries: the same precision, or the next."""
    precisions = ["float32", "bfloat16", "int8", "int4", "int2"]
    for bandwidth in ("300Mbit/s", "20Mbit/s", "6Mbit/s"):
        case: dict[str, Any] = dict(workers=2, bandwidth=bandwidth, latency="1ms")
        known: dict[str, Any] = dict(
            parameters=65_536, step_time="20ms", strategies=["streaming"], wire="auto"
        )
        (row,) = plan(**known, **case).rows

        def train() -> Any:
            model = torch.nn.Linear(256, 256, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with offbeat.attach(model, optimizer, wire="auto") as sync:
                for _ in range(150):
                    model(torch.ones(1, 256)).sum().backward()
                    optimizer.step()
            return sync.stats.details["wire"]

        network = offbeat.Network(bandwidth, latency="1ms")
        found = offbeat.simulate(train, workers=2, network=network, compute=offbeat.Compute("20ms"))
        chosen = found.results[0]
        assert abs(precisions.index(chosen) - precisions.index(row.wire)) <= 1, bandwidth


def test_reasons_have_the_figures() -> None:
    small = {**CASE, "parameters": "200k", "latency": "1us"}
    fast = plan(**{**small, "bandwidth": "10Gbit/s"})
    assert fast.reason == (
        "exact synchronous training costs almost nothing here, BSP waits 1.0 % of the time"
    )
    near = plan(**{**small, "bandwidth": "1Gbit/s"})
    assert near.reason.startswith("BSP waits 8.8 % of the time, no more than ")
    middle = plan(**{**small, "bandwidth": "400Mbit/s"})
    assert middle.reason == (
        "BSP would wait 19 % of the time; streaming sends the model in int2 beside computing, "
        "all of it in each step, and waits 0 %"
    )
    given = ["bsp", "local:period=5", "local:period=8"]
    short = plan(**{**small, "bandwidth": "400Mbit/s"}, strategies=given)
    assert short.reason == "BSP would wait 19 % of the time; local:period=5 waits 4.6 %"
    slow = plan(**{**CASE, "bandwidth": "10Mbit/s"})
    assert "2,402 steps apart" in slow.rows[-2].note
    # (N−1)/N·6.125 bits of 25 million numbers at 10 Mbit/s are 11.5 s
    assert (
        "in int2 beside computing, all of it every 115 steps, and waits 0 %: watch the final"
        in (slow.reason)
    )
    without = plan(**{**CASE, "bandwidth": "10Mbit/s"}, strategies=["bsp", "async:staleness=2402"])
    assert "2,402 steps apart: watch the final metric" in without.reason


def test_advice_is_among_the_given() -> None:
    """Without async the least drift within 5 % of the best throughput; BSP if nothing is faster."""
    some = plan(**CASE, strategies=["bsp", "local:period=300", "local:period=290"])
    assert some.recommendation.strategy == "local:period=290"
    assert "local:period=290 waits 4.0 %" in some.reason
    alone = plan(**CASE, strategies=["bsp"])
    assert alone.recommendation.strategy == "bsp"
    assert "no other strategy given is faster" in alone.reason
    tied = plan(**CASE, strategies=["async:schedule=eager,staleness=30", "async:staleness=30"])
    assert tied.recommendation.strategy == "async:staleness=30"
    waits = plan(**CASE, strategies=["async"])
    assert "a merge takes 12.1 steps, and with async workers wait 34 %" in waits.reason


def test_jitter_alone_is_a_reason() -> None:
    """On a fast network 8 workers with 10 % jitter wait 12.5 % with BSP; 8 steps halve it twice."""
    result = plan(
        parameters="1M", step_time=0.1, workers=8, bandwidth=1e12, latency="1us", jitter=0.1
    )
    assert result.rows[0].idle == pytest.approx(0.125, abs=0.001)
    assert result.recommendation.strategy == "streaming"
    given = ["bsp", "local:period=8"]
    wild = plan(
        **{**CASE, "parameters": "1M", "bandwidth": 1e12, "workers": 8},
        jitter=0.1,
        strategies=given,
    )
    assert wild.recommendation.strategy == "local:period=8"


def test_a_single_worker_waits_for_nobody() -> None:
    result = plan(**{**CASE, "workers": 1}, jitter=0.5)
    assert result.recommendation.strategy == "bsp"
    assert result.reason == "a single worker has nobody to wait for"
    for row in result.rows:
        assert (row.step_seconds, row.throughput, row.idle, row.payload_bytes) == (0.1, 1, 0, 0)


NODES: dict[str, Any] = dict(
    workers=8, workers_per_node=2, inside="10Gbit/s", inside_latency="10us", parameters="100k"
)


def test_nodes_by_hand() -> None:
    """4 nodes of 2 at 1.25 GB/s inside: t and a mean of the node's gradients, then a worker's."""
    inside = 2 * 1 * (10e-6 + (400e3 + 4 * 3) / (2 * 1.25e9))  # one bucket, three numbers
    put_together = 10e-6 + 400e3 / 2 / 1.25e9
    mean = 6 * (1e-4 + 400e3 / (4 * 125e6)) + put_together
    roll = 6 * (1e-4 + 56 / (4 * 125e6)) + 10e-6 + 28 / 1.25e9
    row = one("local:period=8", **NODES)
    step = 0.1 + inside + (roll + mean) / 8
    assert row.step_seconds == pytest.approx(step, rel=1e-12)
    assert row.idle == pytest.approx(1 - (0.1 + inside) / step, abs=1e-12)
    assert row.throughput == pytest.approx(8 * 0.1 / step)
    assert row.payload_bytes == pytest.approx((400e3 + 56) / 2 / 8)
    result = plan(**{**CASE, **NODES})
    assert result.node_step_seconds == pytest.approx(0.1 + inside)
    assert "between nodes of 2 with 10 Gbit/s" in result.caption()
    kinds = {row.strategy.split(":")[0] for row in result.rows}
    assert kinds == {"bsp", "local", "selsync", "streaming", "async"}
    assert any(row.strategy.startswith("async:schedule=eager") for row in result.rows)
    slow = plan(**{**CASE, **NODES, "bandwidth": "20Mbit/s"})
    (streaming,) = (row for row in slow.rows if row.strategy == "streaming")
    often = streaming.note.rpartition("the whole model ")[2]
    assert f"all of it {often}, " in slow.reason, "of the node, not of one of its workers"
    agreed = 2 * 1 * (10e-6 + 8 / (2 * 1.25e9))  # one number more than without nodes
    eager = one("async:schedule=eager,staleness=16", **NODES)
    assert eager.step_seconds == pytest.approx(0.1 + inside + agreed, rel=1e-12)


def test_a_server_between_nodes_by_hand() -> None:
    """A header for each worker; all answers but that of the last slice queue behind pushes."""
    result = plan(**{**CASE, **NODES}, strategies=["easgd:period=4"])
    push, answer = (2 * 56 + 1e5) / 125e6, (2 * 24 + 1e5) / 125e6
    exchange = 3 * push + 3 * answer + 1e-4
    agreed = 2 * (10e-6 + 2 * 8 / (2 * 1.25e9))
    put_together = 10e-6 + 400e3 / 2 / 1.25e9
    row = result.rows[0]
    step = result.node_step_seconds + (exchange + agreed + put_together) / 4
    assert row.step_seconds == pytest.approx(step, rel=1e-12)
    assert row.payload_bytes == pytest.approx(3 * (2 * 56 + 1e5) / 2 / 4)
    # staging, the mean inside, what is put together; the shard of a slice, a buffer for each other
    # node, and d of one of them
    assert row.memory_bytes == pytest.approx((3 + (4 + 1) / 8) * 400e3)
    alone = plan(**{**CASE, **NODES, "workers": 2}, strategies=["ssp:staleness=2", "downpour"])
    assert [row.payload_bytes for row in alone.rows] == [0, 0]
    assert alone.rows[0].step_seconds == alone.node_step_seconds


def test_the_slowest_worker_of_a_node_sets_its_pace() -> None:
    """Of two with 10 % of jitter: 0.1/√π more, and √(1 − 1/π) of the spread."""
    result = plan(**{**CASE, **NODES}, jitter=0.1, strategies=["local:period=1"])
    inside = 2 * (10e-6 + (400e3 + 12) / (2 * 1.25e9))
    alone = 0.1 * (1 + 0.1 / math.sqrt(math.pi)) + inside
    assert result.node_step_seconds == pytest.approx(alone)
    calm = plan(**{**CASE, **NODES}, strategies=["local:period=1"])
    added = result.rows[0].step_seconds - calm.rows[0].step_seconds
    z = maximum_of_normals(4)[0]
    spread = 0.1 * 0.1 * math.sqrt(1 - 1 / math.pi)
    assert added == pytest.approx(0.1 * 0.1 / math.sqrt(math.pi) + spread * z)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 9}, "workers=9 do not fill nodes of workers_per_node=2"),
        ({"workers_per_node": 1}, "inside needs nodes"),
        ({"wire": "auto", "strategies": ["bsp"]}, 'wire="auto" chooses'),
    ],
)
def test_nodes_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, offbeat.AttachError), match=message):
        plan(**{**CASE, **NODES, **changes})


@pytest.mark.parametrize(
    ("workers", "value"),
    [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi)), (100, 2.5075936)],
)
def test_expected_maximum_of_normals(workers: int, value: float) -> None:
    """The known values (order statistics of the normal distribution)."""
    assert maximum_of_normals(workers)[0] == pytest.approx(value, abs=1e-7)


@pytest.mark.parametrize("workers", [2, 4, 16, 64])
@pytest.mark.parametrize("period", [1, 4, 16])
def test_jitter_agrees_with_a_monte_carlo(workers: int, period: int) -> None:
    """The mean of the slowest of N sums of H steps, each N(t, 0.1·t)."""
    random = np.random.default_rng(seed=workers * 100 + period)
    steps = random.normal(0.1, 0.01, size=(4000, period, workers))
    slowest = steps.sum(axis=1).max(axis=1)
    wide = {**CASE, "workers": workers, "jitter": 0.1}
    row = one(f"local:period={period}", **wide)
    calm = one(f"local:period={period}", **{**wide, "jitter": 0})
    predicted = 0.1 + row.step_seconds - calm.step_seconds
    error = slowest.std() / math.sqrt(4000) / period
    assert predicted == pytest.approx(slowest.mean() / period, abs=4 * error)


@pytest.mark.parametrize("workers", [2, 4, 16, 64])
@pytest.mark.parametrize("slack", [-4, 0, 1, 2, 4, 8])
def test_cyclic_jitter_is_near_a_monte_carlo(workers: int, slack: int) -> None:
    """The recursion of the cyclic schedule: L ← max(L + β steps, the slowest's L + merge)."""
    random = np.random.default_rng(seed=workers)
    cycles = 3000
    work = random.standard_normal((cycles, workers))
    work -= work.mean(axis=0)
    launch = np.zeros(workers)  # in σ_C, without the mean of a cycle
    for worked in work:
        launch = np.maximum(launch + worked, launch.max() - slack)
    measured = launch.max() / cycles

    # β = 1, t = 1, σ = 0.1, so a merge of 1 − 0.1·slack
    merge_seconds, latency = 1 - 0.1 * slack, 1e-9
    rate = 2 * (workers - 1) / workers * 4e6 / merge_seconds * 8
    row = one(
        "async:staleness=2",
        parameters=1_000_000,
        step_time=1.0,
        workers=workers,
        bandwidth=rate,
        latency=latency,
        jitter=0.1,
    )
    predicted = (row.step_seconds - 1) / 0.1
    assert 0.82 * measured - 0.02 <= predicted
    assert predicted <= (1.15 if slack >= 2 or slack < 0 else 1.9) * measured + 0.02


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": "25 apples"}, "25M"),
        ({"parameters": 0}, "like 25e6 or 25M"),
        ({"parameters": math.inf}, "like 25e6 or 25M"),
        ({"step_time": "fast"}, "50ms"),
        ({"step_time": -1}, "50ms"),
        ({"bandwidth": "1GB/s"}, "1Gbit/s"),
        ({"bandwidth": 0}, "1Gbit/s"),
        ({"latency": "1"}, "100us"),
        ({"latency": -1e-6}, "100us"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"jitter": 10}, "0.1 for 10 %"),
        ({"jitter": math.nan}, "0.1 for 10 %"),
        ({"lssr": 1}, "like 0.9"),
        ({"bytes_per_parameter": -4}, "like 4"),
        ({"wire": "float16"}, "wire must be .float32"),
        ({"strategies": []}, "must be a list like"),
        ({"strategies": "bsp"}, "must be a list like"),
        ({"strategies": ["nothing"]}, "there are async, bsp"),
        ({"strategies": ["local"]}, "local:period=8"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any], message: str) -> None:
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
    """Markdown and rows show the same; the dictionary is JSON and holds the numbers."""
    result = plan(**CASE, strategies=["bsp", "async:staleness=26", "selsync:delta=inf"])
    table = result.table().rows
    assert all(len(row) == len(HEADINGS) for row in table)
    assert table[0][:6] == ("bsp", "1.242 s", "0.32x", "92 %", "100.0 MB", "100.0 MB")
    lines = result.markdown().splitlines()
    assert lines[0].startswith("25,000,000 parameters (100.0 MB), 100 ms a step, 4 workers")
    assert [line for line in lines if line.startswith("| `")] == [
        f"| {' | '.join((f'`{row[0]}`', *row[1:]))} |" for row in table
    ]
    assert lines[-1] == f"Try `{result.recommendation.strategy}` first: {result.reason}."
    told = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert told["rows"][1]["step_seconds"] == 0.1
    assert told["rows"][2]["apart_steps"] == "inf"
    assert told["recommendation"] in told["rows"]
    assert (told["model_bytes"], told["workers"], told["bandwidth"]) == (100e6, 4, 1e9)


def test_a_recipe_is_measured() -> None:
    """Parameters and BatchNorm's statistics; the random state of the caller stays as it was."""
    pytest.importorskip("sklearn")
    before = torch.get_rng_state()
    parameters, seconds = measure_recipe("digits", steps=5, warmup_steps=1)
    assert parameters == 151_498 + 2 * (32 + 64)
    assert 1e-5 < seconds < 10
    assert torch.equal(before, torch.get_rng_state())
    assert plan(parameters=parameters, step_time=seconds, workers=4, bandwidth="1Gbit/s").rows
    with pytest.raises(ValueError, match="at least 5"):
        measure_recipe("digits", steps=4)
    with pytest.raises(ValueError, match="there are digits"):
        measure_recipe("nothing")
