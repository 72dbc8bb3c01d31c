"""On what clock the race's runs are compared; these results are made up, here alone."""

from dataclasses import replace

import pytest
from benchmarks import paces

from lab.test_report import make
from offbeat.lab.events import Turn
from offbeat.lab.results import Result


def took_turns(run: Result, *step_seconds: float) -> Result:
    steps = [0, *(point.step for point in run.points)]
    turns = tuple(Turn(*one) for one in zip(steps, step_seconds, strict=True))
    return replace(run, turns=turns)


def test_a_run_on_a_machine_of_another_speed() -> None:
    """8 s at steps of 2 s, then 6 s at steps of 2 and of 4: 4 and 2 s, where a step takes 1."""
    run = took_turns(make("streaming", [(8, 0.5), (14, 0.9)]), 2.0, 2.0, 4.0)
    found = paces.at_pace(run, 1.0)
    assert [point.seconds for point in found.points] == [4.0, 6.0]
    assert [point.metric for point in found.points] == [0.5, 0.9]


def test_a_machine_that_is_half_as_fast_changes_nothing() -> None:
    """Whose seconds and turns are all twice as long is told the same."""
    curve = [(3.0, 0.5), (7.0, 0.8), (12.0, 0.9)]
    fast = took_turns(make("streaming", curve), 0.1, 0.2, 0.1, 0.3)
    slow = took_turns(
        make("streaming", [(2 * at, metric) for at, metric in curve]), 0.2, 0.4, 0.2, 0.6
    )
    one, other = (paces.at_pace(run, 0.15) for run in (fast, slow))
    assert [point.seconds for point in one.points] == pytest.approx(
        [point.seconds for point in other.points]
    )


def test_only_who_took_turns_is_told_anew() -> None:
    """At the ideal's pace of the same seed; without an ideal of it as it is."""
    curve = [(10.0, 0.5), (20.0, 0.9)]
    ideal = make("ideal", curve, seed=0)
    pace = ideal.seconds / ideal.points[-1].step
    others = [make("bsp", curve, seed=0)] + [
        took_turns(make("streaming", curve, seed=seed), *[2 * pace] * 3) for seed in (0, 1)
    ]
    first, *found = paces.on_one_clock([ideal, *others])
    assert [point.seconds for point in first.points] == pytest.approx([10, 20])
    assert found[0] == others[0]
    assert [point.seconds for point in found[1].points] == pytest.approx([5, 10])
    assert found[2] == others[2]


def test_one_step_for_all_is_the_pace_of_those_who_took_turns_too() -> None:
    curve = [(10.0, 0.5), (20.0, 0.9)]
    ideal = make("ideal", curve, seed=0)
    pace = ideal.seconds / ideal.points[-1].step
    taken = took_turns(make("streaming", curve, seed=0), *[pace] * 3)
    found = paces.on_one_clock([ideal, taken, make("bsp", curve, seed=0)], 3 * pace)
    assert [one.points[-1].seconds for one in found] == pytest.approx([60, 60, 20])
