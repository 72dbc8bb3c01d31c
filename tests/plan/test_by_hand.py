"""Figures of a plan against values computed by hand."""

from typing import Any

import pytest

from offbeat import Forecast, plan

# 96 MiB, so 12 full buckets; 4 workers; 1 Gbit/s = 125 MB/s; 100 us; 100 ms a step
NUMBERS = 96 * 2**18
SIZE = 4 * NUMBERS
RING = 2 * 3
VOTES = 1e-4 + 3 * 64 / 125e6  # eight float64, sent to three workers at the same time
MEAN = RING * (1e-4 + SIZE / (4 * 125e6))  # 1.2085 s, 12.09 steps
CASE: dict[str, Any] = {
    "parameters": NUMBERS,
    "step_time": "100ms",
    "workers": 4,
    "bandwidth": "1Gbit/s",
}


def one(strategy: str, **changes: Any) -> Forecast:
    (row,) = plan(**{**CASE, **changes}, strategies=[strategy]).rows
    return row


QUANTIZED = 12 * 2**21 // (4 * 512) * 516  # a chunk of 12,288 blocks
ASYNC = VOTES + 3 * 8 / 125e6 + MEAN  # a mean takes 12.1 steps
CHUNK = 768 * 108  # of one of 16 parts of 6 MiB
ROWS: list[tuple[str, dict[str, Any], float, float, float]] = [
    # (H·t + votes + mean)/H a step
    ("local:period=8", {}, 0.1 + (MEAN + VOTES) / 8, (SIZE + 64) / 8, 8),
    # Two stages with 3 messages each.
    (
        "local:period=8 --wire int8",
        {},
        0.1 + (VOTES + 2 * (1e-4 + 3 * QUANTIZED / 125e6)) / 8,
        (64 + 5 * QUANTIZED) / 8,
        8,
    ),
    # Ten numbers per step and a mean every ten steps.
    ("selsync:target_lssr=0.9", {}, 0.1 + 1e-4 + 240 / 125e6 + MEAN / 10, 80 + SIZE / 10, 10),
    # max(β·t, votes + mean)/β: a cycle of 13 steps hides a mean of 12.2 steps, 8 do not.
    ("async:staleness=26", {}, 0.1, (SIZE + 64) / 13, 13),
    ("async", {}, (VOTES + MEAN) / 8, (SIZE + 64) / 8, 8),
    # 0.1 steps of waiting are 5 % of the time at most.
    ("async:schedule=eager,staleness=25", {}, 0.1 + (ASYNC - 1.2) / 12, (SIZE + 72) / 12, 12),
    # Every other message lands as soon as a step has ended, because the bound is reached.
    ("async:schedule=eager,staleness=13", {}, (2 * ASYNC) / 13, (SIZE + 72) / 6.5, 6.5),
    # The mean overlaps with 5 of 20 steps; workers wait for 7.2. Or it overlaps with 13.
    ("diloco:period=20,overlap=5", {}, 0.1 + (VOTES + MEAN - 0.5) / 20, (SIZE + 64) / 20, 20),
    ("diloco:period=20,overlap=13", {}, 0.1, (SIZE + 64) / 20, 20),
    # Votes of streaming averaging have 11 or 12 numbers.
    ("streaming:schedule=cyclic,staleness=32", {}, 0.1, (SIZE + 16 * 88) / 16, 16),
    # A message of m parts takes about 0.2·m steps. A worker's knowledge is youngest with 4 parts in
    # one step: 1 + 16/8 steps.
    ("streaming", {"bandwidth": "200Mbit/s"}, 0.1, 4 * (4 * CHUNK + 96) + 4 * CHUNK, 16 / 4),
    # One part takes 24.3 steps, and 0.3 steps of waiting are less than 5 % of them.
    (
        "streaming",
        {"bandwidth": "1.64Mbit/s"},
        (2e-4 + 3 * (2 * CHUNK + 96) / 205e3) / 24,
        (5 * CHUNK + 4 * 96) / 24,
        16 * 24,
    ),
]


@pytest.mark.parametrize(("strategy", "changes", "step", "payload", "interval"), ROWS)
def test_a_row(
    strategy: str, changes: dict[str, Any], step: float, payload: float, interval: float
) -> None:
    row = one(strategy, **changes)
    assert row.step_seconds == pytest.approx(step, rel=1e-9)
    assert row.throughput == pytest.approx(4 * 0.1 / step, rel=1e-9)
    assert row.idle == pytest.approx(1 - 0.1 / step, abs=1e-9)
    assert row.payload_bytes == pytest.approx(payload, rel=1e-9)
    assert row.interval_steps == pytest.approx(interval)


def test_bsp_overlaps_backward() -> None:
    """The link is busy from the first MiB of gradients until the end of the step.

    Buckets of 1 MiB, 11 of 8 MiB and 7 MiB; and the agreement of some hundred bytes.
    """
    row = one("bsp")
    begins = 0.1 * (1 / 3 + 2 / 3 / 96)  # a third of the step is forward
    sums = RING * (13 * 1e-4 + SIZE / (4 * 125e6)) + 1e-4 + 3 * 512 / 125e6
    assert row.step_seconds == pytest.approx(begins + sums, rel=1e-4)
    assert row.payload_bytes == pytest.approx(SIZE, rel=1e-4)
