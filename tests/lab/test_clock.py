"""Times on one clock, for a machine whose speed changes."""

from dataclasses import replace

import pytest

from lab.test_report import make
from offbeat.lab import report
from offbeat.lab.events import Calibration
from offbeat.lab.report.clock import at_constant_speed, on_one_clock
from offbeat.lab.results import Result


def took_turns(run: Result, *step_seconds: float) -> Result:
    steps = [0, *(point.step for point in run.points)]
    turns = tuple(Calibration(*one) for one in zip(steps, step_seconds, strict=True))
    return replace(run, turns=turns)


def test_a_run_on_a_machine_of_another_speed() -> None:
    """8 s at 2 s a step and 6 s at a mean of 3 s become 4 s and 2 s at 1 s a step."""
    run = took_turns(make("streaming", [(8, 0.5), (14, 0.9)]), 2.0, 2.0, 4.0)
    found = at_constant_speed(run, 1.0)
    assert [point.seconds for point in found.points] == [4.0, 6.0]
    assert [point.metric for point in found.points] == [0.5, 0.9]


def test_a_machine_that_is_half_as_fast_changes_nothing() -> None:
    """Doubled seconds and doubled turns give the same times."""
    curve = [(3.0, 0.5), (7.0, 0.8), (12.0, 0.9)]
    fast = took_turns(make("streaming", curve), 0.1, 0.2, 0.1, 0.3)
    slow = took_turns(
        make("streaming", [(2 * at, metric) for at, metric in curve]), 0.2, 0.4, 0.2, 0.6
    )
    one, other = (at_constant_speed(run, 0.15) for run in (fast, slow))
    assert [point.seconds for point in one.points] == pytest.approx(
        [point.seconds for point in other.points]
    )


def test_only_runs_with_turns_are_scaled() -> None:
    """They are scaled to the ideal's step with the same seed."""
    curve = [(10.0, 0.5), (20.0, 0.9)]
    ideal = make("ideal", curve, seed=0)
    pace = ideal.seconds / ideal.points[-1].step
    others = [make("bsp", curve, seed=0)] + [
        took_turns(make("streaming", curve, seed=seed), *[2 * pace] * 3) for seed in (0, 1)
    ]
    first, *found = on_one_clock([ideal, *others])
    assert [point.seconds for point in first.points] == pytest.approx([10, 20])
    assert found[0] == others[0]
    assert [point.seconds for point in found[1].points] == pytest.approx([5, 10])
    assert found[2] == others[2]


def test_a_given_step_time_scales_runs_with_turns() -> None:
    curve = [(10.0, 0.5), (20.0, 0.9)]
    ideal = make("ideal", curve, seed=0)
    pace = ideal.seconds / ideal.points[-1].step
    taken = took_turns(make("streaming", curve, seed=0), *[pace] * 3)
    found = on_one_clock([ideal, taken, make("bsp", curve, seed=0)], 3 * pace)
    assert [one.points[-1].seconds for one in found] == pytest.approx([60, 60, 20])


def test_without_an_ideal_it_is_the_mean_of_all_turns() -> None:
    """Steps alone of 2 s and 4 s are both scaled to 3 s."""
    curve = [(10.0, 0.5), (20.0, 0.9)]
    runs = [
        took_turns(make(name, curve, seed=3), *[alone] * 3)
        for name, alone in (("bsp", 2.0), ("streaming", 4.0))
    ]
    found = on_one_clock(runs)
    assert [one.seconds for one in found] == pytest.approx([30, 15])


def test_of_several_ideals_the_one_at_the_recipes_rate_is_the_clock() -> None:
    curve = [(10.0, 0.5), (20.0, 0.9)]
    fast, slow = (make("ideal", [(k * at, metric) for at, metric in curve]) for k in (1, 2))
    fast = replace(fast, job=replace(fast.job, lr_scale=3.0))
    run = took_turns(make("bsp", curve), *[slow.seconds / slow.points[-1].step] * 3)
    for ideals in ([fast, slow], [slow, fast]):
        assert on_one_clock([*ideals, run])[-1].seconds == pytest.approx(20)


def test_scaling_is_idempotent() -> None:
    curve = [(3.0, 0.5), (7.0, 0.8), (12.0, 0.9)]
    for name in ("ideal", "local:period=4"):
        runs = [make(name, curve), took_turns(make("bsp", curve), 0.1, 0.2, 0.1, 0.3)]
        once = on_one_clock(runs)
        assert once != runs
        again = on_one_clock(once)
        for one, other in zip(once, again, strict=True):
            assert [p.seconds for p in one.points] == pytest.approx(
                [p.seconds for p in other.points]
            )


def test_tables_use_the_clock_and_say_so() -> None:
    """Half the seconds are shown if a step alone took twice the ideal's."""
    curve = [(10.0, 0.5), (20.0, 0.95)]
    ideal = make("ideal", curve)
    pace = ideal.seconds / ideal.points[-1].step
    plain = [ideal, make("bsp", [(2 * at, metric) for at, metric in curve])]
    turned = [ideal, took_turns(plain[1], *[2 * pace] * 3)]
    assert report.table(plain).rows[1][-4].startswith("40.0 s")
    assert report.table(turned).rows[1][-4].startswith("20.0 s")
    note = "Seconds are on one clock"
    assert (note in report.markdown(plain), note in report.page(plain)) == (False, False)
    assert (note in report.markdown(turned), note in report.page(turned)) == (True, True)
