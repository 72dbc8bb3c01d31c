"""Pace of self-clocked averaging, on plain numbers: parts in a message, waits, processor time."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.averaging.pace import Line, Pace, Sizer

# -- parts in a message ---------------------------------------------------------------------------


def age(parts: int, number: int, flight: int) -> float:
    """Mean age of a worker's knowledge, from a play of messages that take ``flight`` steps."""
    known, ages, launched = [0] * parts, [], 0
    for step in range(1, 8 * parts * flight + 1):
        if step % flight == 0:  # a message lands, and the next one is launched
            for part in range(launched, launched + number):
                known[part % parts] = step - flight
            launched += number
        if step > 2 * parts * flight:
            ages.append(step + 0.5 - sum(known) / parts)
    return sum(ages) / len(ages)


@given(st.integers(1, 8), st.floats(0, 3), st.floats(0.02, 2))
def test_the_number_of_parts_makes_knowledge_youngest(parts: int, base: float, each: float) -> None:
    """A message is expected to take its time, and a tenth of a step, rounded up to whole steps."""
    sizer = Sizer(parts, time=Line(base, each, known=True))
    sizer.measure(base + each, 1)
    assert (sizer.time.base, sizer.time.each) == (base, each), "what was expected teaches nothing"
    assert sizer.expected_steps == base + each * sizer.number
    flights = {m: int(base + each * m + 0.1) + 1 for m in range(1, parts + 1)}
    ages = {m: age(parts, m, flight) for m, flight in flights.items()}
    # Parts whose number is no multiple of m are a little older than the formula says.
    assert ages[sizer.number] <= 1.15 * min(ages.values())


@pytest.mark.parametrize(
    ("parts", "base", "each"),
    [
        *[(1, 0.4, 0.3), (16, 0, 0.05), (16, 0, 0.24), (16, 0, 24.3)],
        *[(4, 1.2, 0.3), (16, 0.95, 0.02), (16, 2.5, 0.19), (16, 10, 0.1)],
    ],
)
def test_noisy_times_teach_the_best_number(parts: int, base: float, each: float) -> None:
    """After 100 messages, knowledge is at most 15 % older than with known times, on average."""
    noise, sizer = random.Random(0), Sizer(parts)
    ideal = Sizer(parts, time=Line(base, each, known=True))
    best, ages = min(map(ideal.age, range(1, parts + 1))), []
    for _ in range(300):
        ages.append(ideal.age(sizer.number))
        steps = (base + each * sizer.number) * noise.lognormvariate(0, 0.05)
        sizer.measure(steps, sizer.number)
    assert sum(ages[100:]) / 200 <= 1.15 * best


def test_the_bound_and_the_processor_time_limit_a_message() -> None:
    """Without them a link that carries the model in a step gets a message of the whole model."""
    for cost, parts in ((0.0, 16), (0.075, 2)):
        sizer = Sizer(16, time=Line(0.01, 0.04, known=True), cost=Line(0, cost, known=True))
        sizer.measure(0.05, 1, cost=cost)
        assert sizer.number == parts
    # In steps, 10 + m: of more than five parts a message is late.
    sizer = Sizer(16, bound=16, time=Line(10.0, 1.0, known=True))
    sizer.measure(11.0, 1)
    assert sizer.number == 5


def test_a_message_that_is_late_in_any_case_has_what_takes_no_more_steps() -> None:
    """One part takes 2.4 steps, 16 take 2.8: both are rounded up to 3, and the bound is 2."""
    sizer = Sizer(16, bound=2, time=Line(2.37, 0.03, known=True))
    sizer.measure(2.4, 1)
    assert sizer.number == 16
    sizer = Sizer(16, bound=2, time=Line(2.37, 0.13, known=True))  # 3.1 with five parts
    sizer.measure(2.5, 1)
    assert sizer.number == 4


def test_a_fixed_cost_of_messages_is_no_cost_of_parts() -> None:
    """A message costs 4 % of a step, whatever it contains: the whole model costs as much."""
    sizer = Sizer(16)
    for _ in range(50):
        sizer.measure(0.3 + 0.01 * sizer.number, sizer.number, cost=0.04)
    assert sizer.number == 16


# -- waits ----------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.floats(0, 1), st.sampled_from([0.0, 0.05, 0.5]))
def test_waits_take_the_share_of_the_time_that_patience_allows(
    seed: int, fails: float, share: float
) -> None:
    """Whatever happens: what was saved before the first step may be waited, too."""
    chance, pace = random.Random(seed), Pace(share, step_seconds=0.1)
    total = 0.0
    for step in range(500):
        limit = pace.wait_seconds()
        assert limit <= 0.1
        in_vain = limit > 0 and chance.random() < fails
        waited = limit if in_vain else chance.random() * limit
        pace.waited(waited, in_vain=in_vain)
        total += waited
        assert total <= 0.1 * (0.7 * (share > 0) + share * step) + 1e-9


def test_waits_that_are_long_enough_use_the_whole_patience() -> None:
    pace = Pace(0.05, step_seconds=0.1)
    total = 0.0
    for _ in range(4000):
        wait = min(pace.wait_seconds(), 0.03)
        pace.waited(wait, in_vain=False)
        total += wait
    assert total == pytest.approx(4000 * 0.05 * 0.1, rel=0.02)


def test_out_of_phase_a_worker_tries_again_ever_more_rarely() -> None:
    """It saves 0.7 steps before each attempt, each time half as fast, down to a 64th."""
    pace, attempts = Pace(0.05, step_seconds=0.1), []
    for step in range(3000):
        wait = pace.wait_seconds()
        assert wait == 0 or wait == pytest.approx(0.07, rel=0.05)
        attempts += [step] if wait else []
        pace.waited(wait, in_vain=wait > 0)
    gaps = [b - a for a, b in itertools.pairwise(attempts)]
    assert gaps == pytest.approx([28, 56, 112, 224, 448, 896, 896], abs=2)
    while not pace.wait_seconds():
        pace.waited(0.0, in_vain=False)
    pace.waited(0.06, in_vain=False)
    assert pace.in_phase
    assert pace.wait_seconds() == pytest.approx(0.1 * (0.7 - 0.6 + 0.05), abs=0.002)
    pace.waited(pace.wait_seconds(), in_vain=True)
    assert not pace.in_phase
    assert pace.growth == 1, "the first attempt comes soon"


def test_a_suspended_process_waits_again_soon() -> None:
    pace = Pace(0.05, step_seconds=0.1, in_phase=True)
    for seconds in (60.0, *[0.0] * 5):
        pace.waited(seconds, in_vain=False)
    assert pace.wait_seconds() == pytest.approx(0.03)


# -- step times and processor time ----------------------------------------------------------------


def test_the_step_time_leaves_out_barriers_and_evaluations() -> None:
    """Steps of 0.1 s; then 0.3 s count as twice the mean; 60 s at a barrier do not count."""
    pace, now = Pace(0.05), 0.0
    for seconds in (0.1, 0.1, 0.3, 60.0):
        pace.began = now
        now += seconds
        if seconds == 60:
            pace.began = None
        pace.step_ended(now)
        now += 1.0  # waits do not count
    assert pace.step_seconds == pytest.approx(0.1 + 0.1 * (2 * 0.1 - 0.1))


@pytest.mark.parametrize(("cost", "every"), [(0.004, 1), (0.02, 4), (0.1, 20)])
def test_messages_take_a_twentieth_of_the_time(cost: float, every: int) -> None:
    """Of steps of 0.1 s. Costs vary by half; a message of 4 ms is launched after each step."""
    pace, chance, spent, launches = Pace(0.05), random.Random(0), 0.0, 0
    for step in range(2000):
        pace.began = 0.1 * step
        pace.step_ended(0.1 * (step + 1))
        if pace.credit_seconds >= 0:
            seconds = cost * chance.uniform(0.5, 1.5)
            pace.credit_seconds -= seconds
            spent, launches = spent + seconds, launches + 1
    assert spent <= 0.05 * 200 + 1.5 * cost
    assert launches == pytest.approx(2000 / every, rel=0.1)
