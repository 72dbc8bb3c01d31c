"""Figures of a plan against values computed by hand."""

import math
from typing import Any

import pytest

from offbeat.plan import Forecast, plan

# 96 MiB, so 12 full buckets; 4 workers; 1 Gbit/s = 125 MB/s; 100 us; 100 ms a step
NUMBERS = 96 * 2**18
SIZE = 4 * NUMBERS
RING = 2 * 3
ROLL = 1e-4 + 3 * 56 / 125e6  # seven float64, sent to three workers at the same time
MEAN = RING * (12 * 1e-4 + SIZE / (4 * 125e6))  # 1.2151 s, 12.15 steps
CASE: dict[str, Any] = {
    "parameters": NUMBERS,
    "step_time": "100ms",
    "workers": 4,
    "bandwidth": "1Gbit/s",
}


def one(strategy: str, **changes: Any) -> Forecast:
    (row,) = plan(**{**CASE, **changes}, strategies=[strategy]).rows
    assert row.steady
    return row


def check(row: Forecast, step: float, payload: float, copies: float, apart: float) -> None:
    assert row.step_seconds == pytest.approx(step, rel=1e-9)
    assert row.throughput == pytest.approx(4 * 0.1 / step, rel=1e-9)
    assert row.idle == pytest.approx(1 - 0.1 / step, abs=1e-9)
    assert row.payload_bytes == pytest.approx(payload, rel=1e-9)
    assert row.memory_bytes == pytest.approx(copies * SIZE, rel=1e-5, abs=500)  # and numbers
    assert row.apart_steps == pytest.approx(apart)


def test_a_ring_all_reduce() -> None:
    """2(N−1)·(α + S/(N·B)) for the only bucket, and α + (N−1)·56/B for the votes, in each step."""
    row = one("local:period=1", parameters=2**18, workers=16, latency="1ms")
    ring = 30 * (1e-3 + 2**20 / (16 * 125e6)) + 1e-3 + 15 * 56 / 125e6
    assert row.step_seconds == pytest.approx(0.1 + ring, rel=1e-9)
    assert row.payload_bytes == 2**20 + 56


def test_local_sgd() -> None:
    """(H·t + r + m)/H a step."""
    check(one("local:period=8"), 0.1 + (MEAN + ROLL) / 8, (SIZE + 56) / 8, 1, 8)


def test_bsp_overlaps_backward() -> None:
    """The link is busy from the first MiB of gradients until the end of the step.

    Buckets of 1 MiB, 11 of 8 MiB and 7 MiB; and the numbers that the workers agree on.
    """
    row = one("bsp")
    begins = 0.1 * (1 / 3 + 2 / 3 / 96)  # a third of the step is forward
    numbers = (row.payload_bytes - SIZE) / 8
    assert numbers == 7 + 2 + 96 + 12 * 2, "the vote, two counts and one number per tensor"
    sums = RING * (13 * 1e-4 + SIZE / (4 * 125e6)) + RING * (1e-4 + 8 * numbers / (4 * 125e6))
    assert row.step_seconds == pytest.approx(begins + sums, rel=1e-9)
    assert row.apart_steps == 0


def test_bsp_with_a_single_bucket() -> None:
    """It is sent at the end of backward, with the numbers of the vote as float32 in its tail."""
    row = one("bsp", parameters=2**18)
    tail = row.payload_bytes - 2**20
    assert tail / 4 == pytest.approx(7 + 2 + 64, abs=4)
    assert row.step_seconds == pytest.approx(0.1 + RING * (1e-4 + row.payload_bytes / (4 * 125e6)))


def test_a_lossy_wire() -> None:
    """Two stages per bucket with 3 messages each, of 512 blocks of 516 bytes per worker."""
    chunk = 12 * 2**21 // (4 * 512) * 516
    mean = 2 * (12 * 1e-4 + 3 * chunk / 125e6)
    row = one("local:period=8", wire="int8")
    assert row.step_seconds == pytest.approx(0.1 + (ROLL + mean) / 8, rel=1e-9)
    assert row.payload_bytes == pytest.approx((56 + 5 * chunk) / 8)


def test_selsync() -> None:
    """Nine numbers per step and a mean every ten; deferred flags arrive during the next step."""
    votes = 1e-4 + 3 * 72 / 125e6
    check(one("selsync:target_lssr=0.9"), 0.1 + votes + MEAN / 10, 72 + SIZE / 10, 1, 10)
    check(one("selsync:delta=0.3"), 0.1 + votes + MEAN / 10, 72 + SIZE / 10, 1, 10)
    check(one("selsync:delta=0"), 0.1 + votes + MEAN, 72 + SIZE, 1, 1)
    check(one("selsync:delta=inf"), 0.1 + votes, 72, 0, math.inf)
    check(one("selsync:delta=inf,max_interval=5"), 0.1 + votes + MEAN / 5, 72 + SIZE / 5, 1, 5)
    deferred = one("selsync:target_lssr=0.9,flags=deferred")
    check(deferred, 0.1 + (votes + MEAN) / 10, 72 + SIZE / 10, 1, 10)


def test_cyclic_async() -> None:
    """max(β·t, r + m)/β per step: a cycle of 13 steps hides a merge of 12.2 steps, 8 do not."""
    check(one("async:staleness=26"), 0.1, (SIZE + 56) / 13, 2, 26)
    check(one("async"), (ROLL + MEAN) / 8, (SIZE + 56) / 8, 2, 16)


def test_eager_async() -> None:
    """Votes take 1 step and a mean 13: a launch every 14 steps, 1 + 2·13 local steps past P.

    P is kept, too: a worker with nothing finite to send sends an update of 0.
    """
    check(one("async:schedule=eager,staleness=27"), 0.1, (SIZE + 56) / 14, 3, 27)
    # One less: every other merge is waited for, from its 12th step on.
    row = one("async:schedule=eager,staleness=26")
    assert row.step_seconds == pytest.approx(0.1 + (MEAN - 1.2) / 27)
    check(one("async:schedule=eager,staleness=1"), 0.1 + ROLL + MEAN, SIZE + 56, 3, 1)


def test_diloco_with_overlap() -> None:
    """The mean overlaps with 5 of 20 steps; workers wait for 7.2. Memory: θ, v, s and the sum."""
    row = one("diloco:period=20,overlap=5")
    step = 0.1 + (ROLL + MEAN - 0.5) / 20
    check(row, step, (SIZE + 56) / 20, 4, 25)
    assert one("diloco:period=20,overlap=13").step_seconds == pytest.approx(0.1)


def test_cyclic_streaming() -> None:
    """Four parts in 16 steps, each with votes of eleven numbers."""
    row = one("streaming:schedule=cyclic,staleness=32", wire="float32")
    assert row.step_seconds == pytest.approx(0.1)
    assert row.payload_bytes == pytest.approx((SIZE + 4 * 88) / 16)


def test_nodes() -> None:
    """Two nodes of two: t and the mean of the node's gradients, then each worker's part of a mean.

    What comes from the other node is put together inside.
    """
    nodes = {"workers_per_node": 2, "inside": "10Gbit/s", "inside_latency": "10us"}
    result = plan(**{**CASE, **nodes, "parameters": 2**18}, strategies=["local:period=8"])
    inside = 2 * (10e-6 + 2**20 / (2 * 1.25e9))
    assert result.node_step_seconds == pytest.approx(0.1 + inside, rel=1e-5)
    mean = 2 * (1e-4 + 2**20 / (2 * 125e6)) + 10e-6 + 2**19 / 1.25e9
    votes = 1e-4 + 28 / (125e6 / 2)  # gathered inside while the mean travels across
    (row,) = result.rows
    assert row.step_seconds == pytest.approx(result.node_step_seconds + (votes + mean) / 8)
    assert row.idle == pytest.approx(1 - result.node_step_seconds / row.step_seconds)
    assert row.throughput == pytest.approx(4 * 0.1 / row.step_seconds)
    assert row.payload_bytes == pytest.approx((2**20 + 56) / 2 / 8)


def test_the_slowest_of_two_workers() -> None:
    """Log-normal steps with σ of the logarithm s: E max = t·2·Φ(s/√2)."""
    row = one("bsp", parameters=1000, workers=2, bandwidth=1e15, latency=0, jitter=0.1)
    s = math.sqrt(math.log1p(0.1**2))
    expected = 0.1 * (1 + math.erf(s / 2))
    assert row.step_seconds == pytest.approx(expected, rel=0.005)
    assert row.idle == pytest.approx(1 - 0.1 / expected, abs=0.005)
