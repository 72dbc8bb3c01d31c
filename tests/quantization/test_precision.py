"""The automatic precision, with loads computed by hand."""

import random

import pytest

from offbeat.quantization.precision import PrecisionControl

BITS = {"float32": 64.0, "bfloat16": 32.0, "int8": 16.125, "int4": 8.125, "int2": 6.1875}
CHOICES = ("float32", "bfloat16", "int8")


def measure(control: PrecisionControl, computing: float, waiting: float) -> bool:
    """Report a step of ``computing`` + ``waiting`` seconds. A tenth of it may be waiting."""
    load = waiting / (computing / 9)
    seconds = computing + waiting
    return control.update(load, BITS, choices=CHOICES, margin=0.5, seconds=seconds)


def follow(
    control: PrecisionControl, float32_waiting: float, count: int, quantizing: float = 0.0
) -> list[str]:
    """Return the precision after each measurement. The waiting is proportional to the bits."""
    trace = []
    for _ in range(count):
        waiting = float32_waiting * BITS[control.precision] / 64
        measure(control, 1.0 + quantizing * (control.precision != "float32"), waiting)
        trace.append(control.precision)
    return trace


@pytest.mark.parametrize(
    ("waiting", "chosen"),
    [
        (0.0, "float32"),
        (0.11, "float32"),  # 0.0991 of the time
        (0.12, "bfloat16"),
        (0.22, "bfloat16"),  # 0.11 / 1.11
        (0.23, "int8"),
        (0.44, "int8"),
        (30.0, "int8"),  # not enough, but there are no fewer bits
    ],
)
def test_the_most_exact_precision_that_keeps_the_load(waiting: float, chosen: str) -> None:
    assert follow(PrecisionControl(), waiting, 50) == [chosen] * 50


def test_more_bits_when_the_link_becomes_faster() -> None:
    """One precision at a time, once less than half of the allowed load is expected."""
    control = PrecisionControl()
    assert follow(control, 1.0, 3) == ["int8"] * 3
    assert follow(control, 0.09, 4)[-1] == "bfloat16"  # 0.083 in float32 is too much to try it
    assert follow(control, 0.05, 8)[-1] == "float32"


def test_fewer_bits_without_benefit_are_reversed() -> None:
    """Quantization takes as long as it saves. The next tries follow after 4 and 64 measurements."""
    trace = follow(PrecisionControl(), 0.2, 200, quantizing=0.5)
    assert [i for i, one in enumerate(trace) if one != "float32"] == [0, 5, 70]


def test_more_bits_that_cause_waiting_are_reversed() -> None:
    """A mean that overlaps with computing in int8 and makes workers wait in bfloat16."""
    control, trace = PrecisionControl(), []
    waiting = {"float32": 1.0, "bfloat16": 0.3, "int8": 0.0}
    for _ in range(200):
        measure(control, 1.0, waiting[control.precision])
        trace.append(control.precision)
    assert [i for i, one in enumerate(trace) if one == "bfloat16"] == [1, 18]


def test_it_settles_under_noise() -> None:
    """Waiting that varies by half its mean causes few changes, and hardly any late ones."""
    for seed in range(20):
        noise, control, changes = random.Random(seed), PrecisionControl(), []
        mean = noise.uniform(0.02, 1.0)
        for index in range(1000):
            waiting = mean * noise.uniform(0.5, 1.5) * BITS[control.precision] / 64
            if measure(control, 1.0, waiting):
                changes.append(index)
        assert len(changes) <= 12, (mean, changes)
        assert sum(index >= 500 for index in changes) <= 2, (mean, changes)


def test_a_long_time_without_change_shortens_the_patience() -> None:
    control = PrecisionControl()
    follow(control, 1.0, 1)
    follow(control, 0.05, 1)  # more bits: a reversal
    assert control.patience == 4
    follow(control, 0.08, 32)  # in bfloat16; float32 would load too much
    assert control.patience == 1


def test_without_durations_fewer_bits_are_not_on_trial() -> None:
    """As in streaming averaging, whose load is the steps of a pass relative to the target."""
    control = PrecisionControl("int4")
    assert control.update(1.2, BITS)
    assert control.precision == "int2"
    assert not control.update(1.2, BITS)  # no fewer bits
    assert control.update(0.5, BITS)  # 0.5 · 8.125 / 6.1875 ≤ 1
    assert control.precision == "int4"
    assert [control.update(0.1, BITS) for _ in range(4)] == [False, False, False, True]
    assert control.precision == "int8"
