"""Rate control of streaming averaging: window, CPU budget, and counts of passes.

tests/quantization tests the choice of the precision.
"""

import pytest

from offbeat import StreamingAveraging
from offbeat.quantization.precision import PrecisionControl
from offbeat.strategies.base import Launch
from offbeat.strategies.rate_control import RateControl
from strategies.decisions import seen, tally

BITS = {"float32": 64.0, "bfloat16": 32.0, "int8": 16.125, "int4": 8.125, "int2": 6.1875}


def test_passes_are_counted_between_landings_of_one_precision() -> None:
    """The count begins when all parts of the previous precision have landed.

    A link that was full at any time since then does not count as free.
    """
    rate = RateControl(window=4, landed=-2, budget=2.0)
    for landings, step in enumerate((3, 5, 8, 10, 12, 14), 1):
        assert rate.pass_steps(step, 2, chooses=True) is None
        rate.resize([5] if step == 10 else [], 2)
        rate.count(launches=0, landings=landings, step=step)
    assert (rate.start_step, rate.landed, rate.window) == (5, 4, 4)
    assert rate.pass_steps(14, 2, chooses=True) == (14 - 5) * 2 / 4, "a part was late at step 10"
    assert rate.choose(4.5, 14, BITS, 2)
    assert (rate.landed, rate.start_step, rate.crowded, rate.probing) == (-2, 14, False, True)
    assert not rate.choose(2.4, 20, BITS, 2), "no change"
    assert (rate.landed, rate.start_step) == (0, 20)


@pytest.mark.parametrize(
    ("window", "chooses", "passes"), [(4, True, 1.0), (3, True, 4.0), (4, False, 4.0)]
)
def test_a_link_is_free_where_the_window_is_open(window: int, chooses: bool, passes: float) -> None:
    """Fewer bits would not help then. Without a choice the counted passes are reported."""
    rate = RateControl(window=window, landed=4, probing=False, budget=2.0)
    assert rate.pass_steps(8, 2, chooses=chooses) == passes


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


@pytest.mark.parametrize("wire", [None, "int4"])
def test_only_an_automatic_wire_is_given_a_precision(wire: str | None) -> None:
    """The precision follows the steps of a pass, which all workers read in the same tally."""
    strategy = StreamingAveraging(parts=2)
    view = seen(size=2, count=2, precision=wire, bits=BITS, step=9)
    view.state = strategy.state(view)
    view.state.rate.control = PrecisionControl("int4")
    assert strategy.decide(view, tally(2, 2.0, (float("inf"), 18.0, 0.0, 0.0))).parts == 1
    launch = strategy.decide(view, tally(2, 2.0, (2 * 7.5, 18.0, 0.0, 0.0)))
    assert launch == Launch(1, None if wire else "int2"), "a pass of 7.5 steps takes too long"
    assert view.state.pass_steps == 7.5
    strategy.after_step(view)
    assert view.details["pass_steps"] == 7.5
    assert view.details["window"] >= 2
    assert view.details.get("wire") == (None if wire else "int2")


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
