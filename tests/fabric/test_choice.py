"""The precision of means that workers wait for, from figures written by hand."""

import random

import pytest

from offbeat.fabric.choice import MOST_WAITING, PRECISIONS, Choice

BITS = {"float32": 64.0, "bfloat16": 32.0, "int8": 16.125}  # of a number, on both stages


def follow(choice: Choice, float32_waiting: float, looks: int, rounding: float = 0.0) -> list[str]:
    """The precisions after each look at steps of 1 s, on a link that goes with the bits."""
    trace = []
    for _ in range(looks):
        waiting = float32_waiting * BITS[choice.precision] / 64
        choice.look(1.0 + rounding * (choice.precision != "float32"), waiting)
        trace.append(choice.precision)
    return trace


@pytest.mark.parametrize(
    ("waiting", "chosen"),
    [
        (0.0, "float32"),
        (0.11, "float32"),  # 0.0991 of the time
        (0.12, "bfloat16"),
        (0.22, "bfloat16"),  # 0.11 / 1.11
        (0.23, "int8"),
        (0.44, "int8"),  # 0.1109 / 1.1109
        (30.0, "int8"),  # not enough, but there is no more
    ],
)
def test_the_most_exact_that_brings_waiting_under_a_tenth(waiting: float, chosen: str) -> None:
    """At the first look, and it stays so."""
    assert follow(Choice(), waiting, 50) == [chosen] * 50


def test_more_bits_when_the_link_has_become_faster() -> None:
    """One after the other, once less than half a tenth is expected."""
    choice = Choice()
    assert follow(choice, 1.0, 3) == ["int8"] * 3
    assert follow(choice, 0.09, 4) == ["bfloat16"] * 4  # 0.083 in float32 is no reason yet
    assert follow(choice, 0.05, 3) == ["float32"] * 3
    # It has turned once, so that it waits for the fourth look; then for the 16th.
    assert follow(choice, 1.0, 2) == ["float32", "int8"]
    assert follow(choice, 0.05, 17) == ["int8"] * 15 + ["bfloat16"] * 2


def test_patience_is_regained() -> None:
    """Once it has been quiet for eight times as long as it would wait."""
    choice = Choice()
    follow(choice, 1.0, 1)
    follow(choice, 0.05, 1)
    assert choice.patience == 4
    follow(choice, 0.08, 31)  # in bfloat16
    assert choice.patience == 4
    follow(choice, 0.08, 1)
    assert choice.patience == 1


def test_fewer_bits_in_vain_are_taken_back() -> None:
    """Where rounding takes as long as is saved; tried again after 4, 16, 64, … looks."""
    trace = follow(Choice(), 0.2, 200, rounding=0.5)
    tries = [i for i, one in enumerate(trace) if one != "float32"]
    assert tries == [0, 5, 22, 87]  # 1 look at work, then 4^n until the next


def test_more_bits_in_vain_are_taken_back() -> None:
    """Of a merge that is hidden in few bits, and waited for in more."""
    choice, trace = Choice(), []
    for _ in range(200):
        choice.look(1.0, {"float32": 1.0, "bfloat16": 0.3, "int8": 0.0}[choice.precision])
        trace.append(choice.precision)
    assert [i for i, one in enumerate(trace) if one == "bfloat16"] == [1, 18, 83]
    assert trace.count("int8") == 197


def test_it_settles_whatever_the_noise() -> None:
    """Waiting that varies by a half around any mean: few changes, and fewer and fewer."""
    for seed in range(20):
        noise, choice, changes = random.Random(seed), Choice(), []
        mean = noise.uniform(0.02, 1.0)
        for look in range(1000):
            waiting = mean * noise.uniform(0.5, 1.5) * BITS[choice.precision] / 64
            if choice.look(1.0, waiting):
                changes.append(look)
        assert len(changes) <= 12, (mean, changes)
        assert sum(look >= 500 for look in changes) <= 2, (mean, changes)


def test_reasons_are_in_words() -> None:
    choice = Choice()
    assert choice.look(1.0, 0.0) == ""
    assert choice.look(3.0, 1.0) == (
        "the link keeps all waiting 25 % of the time in float32: int8 from now on"
    )
    assert choice.look(5.0, 0.1) == "steps are not shorter in int8: float32 from now on"
    assert PRECISIONS[0] == "float32"
    assert MOST_WAITING == 0.1
