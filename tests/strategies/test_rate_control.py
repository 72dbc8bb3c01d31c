"""Rate control of streaming averaging: window, CPU budget, and counts of passes."""

import pytest
from offbeat.strategies.rate_control import RateControl

from offbeat import StreamingAveraging
from strategies.decisions import seen, tally


def test_passes_are_counted_between_landings() -> None:
    """The count begins when the first parts in flight have landed."""
    rate = RateControl(window=4, landed=-2, budget=2.0)
    for landings, step in enumerate((3, 5, 8, 10, 12, 14), 1):
        assert rate.pass_steps(step, 2) is None
        rate.count(launches=0, landings=landings, step=step)
    assert (rate.start_step, rate.landed) == (5, 4)
    assert rate.pass_steps(14, 2) == (14 - 5) * 2 / 4
    rate.restart_count(14)
    assert rate.pass_steps(14, 2) is None


@pytest.mark.parametrize(("ages", "window"), [([], 9), ([1, 1], 9), ([2, 1], 6), ([3, 2, 2], 5)])
def test_the_window_opens_and_closes(ages: list[int], window: int) -> None:
    """It grows by half until the link has been full, and shrinks by one if many parts are late."""
    rate = RateControl(window=6)
    rate.resize(ages, 8)
    assert rate.window == window
    rate.resize([], 8)
    assert rate.window == {9: 13, 6: 7, 5: 6}[window]


def test_no_more_is_sent_than_a_twentieth_of_the_time_allows() -> None:
    """With 4 ms to launch and land a part, steps of 100 ms allow 1.25 parts a step."""
    rate = RateControl()
    for step in range(100):
        rate.step(0.1 * step, [0.002, 0.002] if step > 50 else [], 8)
        rate.budget = 0.0
    rate.step(10.0, [0.002], 8)
    assert rate.budget == pytest.approx(1.25)
    assert rate.step_seconds == pytest.approx(0.1)
    free = RateControl()
    for step in range(3):
        free.step(0.1 * step, [], 8)
    assert free.budget == 16, "no window is wider"


def test_time_is_not_lost_while_a_launch_is_agreed_on() -> None:
    """A part every 2.5 steps is possible, although it is launched two steps after the request."""
    rate, launched, asked = RateControl(), 0, None
    for step in range(1, 1001):
        rate.step(0.1 * step, [0.00625], 2)
        if asked is not None and step == asked + 2:
            launched, asked = launched + 1, None
            rate.count(launched, 0, step)
        if asked is None and rate.budget >= 1:
            asked = step
    assert launched == pytest.approx(400, rel=0.02)


def test_a_part_that_was_kept_from_the_processor_counts_little() -> None:
    """A single 2.5 s instead of 2 ms counts as four times the average, for some steps."""
    rate = RateControl()
    for step in range(1, 41):
        rate.step(0.1 * step, [2.5 if step == 20 else 0.002], 8)
        if step == 20:
            assert rate.part_seconds == pytest.approx(0.004 * 1.3)
    assert rate.part_seconds == pytest.approx(0.004, rel=0.04)


def test_a_large_first_cost_is_soon_forgotten() -> None:
    """On a GPU the first launch may take a second, because it loads the code."""
    rate = RateControl()
    for step in range(20):
        rate.step(0.1 * step, [0.002 if step else 1.0], 4)
    assert rate.part_seconds == pytest.approx(0.004, rel=0.5)


def test_an_evaluation_between_two_steps_is_not_part_of_a_step() -> None:
    rate = RateControl()
    for now in (0.0, 0.1, 0.2, 60.0):
        rate.step(now, [], 2)
    assert rate.step_seconds == pytest.approx(0.1 + 0.1 * (2 * 0.1 - 0.1))


def test_the_steps_of_a_pass_are_read_from_the_votes() -> None:
    """All workers read the same mean, and report it."""
    strategy = StreamingAveraging(parts=2)
    view = seen(size=2, count=2, step=9)
    view.state = strategy.state(view)
    assert strategy.decide(view, tally(2, 2.0, (float("inf"), 18.0, 0.0, 0.0))) == 1
    assert view.state.pass_steps == 0
    assert strategy.decide(view, tally(2, 2.0, (2 * 7.5, 18.0, 0.0, 0.0))) == 1
    assert view.state.pass_steps == 7.5
    strategy.after_step(view)
    assert view.details["pass_steps"] == 7.5
    assert view.details["window"] >= 2


def test_a_worker_waits_rarely_after_waits_that_were_too_short() -> None:
    """The total of all waits is at most half a step and 5 % of the time, and then far less."""
    rate = RateControl(step_seconds=0.1)
    waits = []
    for _ in range(1000):
        waits.append(rate.wait_limit())
        rate.count_wait(waits[-1], timed_out=waits[-1] > 0, share=0.05)
    assert waits[0] == pytest.approx(0.05), "half a step"
    assert not any(waits[1:6]), "the allowance grows again before the next wait"
    assert sum(waits) < 0.1 * (0.5 + 0.05 * 30 + 0.05 / 64 * 1000)
    assert max(waits[1:]) <= 0.05


def test_waits_that_are_long_enough_use_the_whole_allowance() -> None:
    rate = RateControl(step_seconds=0.1, growth=1 / 64, allowance=0.0)
    total = 0.0
    for _ in range(4000):
        wait = min(rate.wait_limit(), 0.03)
        total += wait
        rate.count_wait(wait, timed_out=False, share=0.05)
    assert rate.growth == 1.0
    assert total / (4000 * 0.1) == pytest.approx(0.05, rel=0.2)


def test_a_suspended_process_waits_again_soon() -> None:
    rate = RateControl(step_seconds=0.1)
    rate.count_wait(60.0, timed_out=False, share=0.05)
    for _ in range(5):
        rate.count_wait(0.0, timed_out=False, share=0.05)
    assert rate.wait_limit() == pytest.approx(0.03)
