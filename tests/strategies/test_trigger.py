"""SelSync's trigger: values that are not finite or zero, and the bounds of the threshold.

``test_conformance`` compares Δ with its definition.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.strategies.trigger import RelativeChange, ThresholdController

norms = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40)


@given(
    norms,
    st.dictionaries(
        st.integers(0, 40), st.lists(st.sampled_from([math.nan, math.inf]), max_size=2)
    ),
    st.one_of(st.none(), st.integers(1, 6)),
)
def test_an_overflow_now_and_then_changes_nothing(
    values: list[float], bad: dict[int, list[float]], window: int | None
) -> None:
    """At most two in a row give Δ = 0, and do not affect the other steps."""
    clean, disturbed = RelativeChange(window), RelativeChange(window)
    for i, value in enumerate(values):
        for wrong in bad.get(i, []):
            assert disturbed.update(wrong, 0.3) == 0.0
        assert disturbed.update(value, 0.3) == clean.update(value, 0.3)
    assert disturbed == clean


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("times", [3, 50])
def test_after_many_norms_that_are_not_finite_it_starts_again(
    window: int | None, times: int
) -> None:
    """The old mean does not apply to a restored model: Δ = ∞, then as in a new training."""
    trigger, fresh = RelativeChange(window), RelativeChange(window)
    for value in (1e9, 2e9, 3e9):
        trigger.update(value, 0.1)
    assert [trigger.update(math.nan, 0.1) for _ in range(times)] == [0.0] * times
    found = [trigger.update(value, 0.1) for value in (1.0, 1.5, 1.2, 2.0)]
    assert found == [fresh.update(value, 0.1) for value in (1.0, 1.5, 1.2, 2.0)]
    assert found[0] == math.inf


@pytest.mark.parametrize("window", [None, 1, 3])
def test_zero_norms(window: int | None) -> None:
    """0/0 is 0; the first gradient after zeros is an infinite change."""
    trigger = RelativeChange(window)
    assert [trigger.update(s, 0.5) for s in (0.0, 0.0, 2.0)] == [math.inf, 0.0, math.inf]


def test_controller_stays_bounded() -> None:
    """A trigger that always or never fires moves δ to a bound, from which it returns."""
    for fired in (True, False):
        controller = ThresholdController(0.5, 0.3)
        for _ in range(5000):
            controller.update(fired, 0.3)
        assert 1e-12 <= controller.delta <= 1e12
        extreme = controller.delta
        controller.update(not fired, 0.3)
        assert (controller.delta < extreme) == fired
