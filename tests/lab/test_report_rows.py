"""Times to targets, and differences."""

from dataclasses import replace

import pytest

from lab.test_report import make
from offbeat_lab import report
from offbeat_lab.report.figures import curve_of
from offbeat_lab.report.intervals import interval_of
from offbeat_lab.report.rows import rows_of

# Arrivals

IDEAL = make("ideal", [(1, 0.5), (2, 0.96), (3, 0.985), (4, 1.0)])


def test_targets_are_shares_of_the_ideals_final_metric() -> None:
    """Targets are 0.95, 0.98 and 0.995 of a final metric of 1."""
    slow = make("bsp", [(5, 0.95), (8, 0.97), (10, 0.984)])
    found = report.times_to_targets([IDEAL, slow])
    assert found is not None
    assert found.headings == ("strategy", "95%: 0.95", "98%: 0.98", "99.5%: 0.995")
    assert found.rows[0] == ("ideal", "2.0 s [100 %]", "2.8 s [100 %]", "3.7 s [100 %]")
    assert found.rows[1] == ("bsp", "5.0 s [40 %]", "9.4 s [30 %]", "never")
    assert report.times_to_targets([slow]) is None


def test_runs_that_do_not_reach_a_target_are_counted() -> None:
    ideals = [IDEAL, replace(IDEAL, job=replace(IDEAL.job, seed=1))]
    runs = [make("bsp", [(5, 0.96)]), make("bsp", [(4, 0.9)], seed=1)]
    found = report.times_to_targets([*ideals, *runs])
    assert found is not None
    assert found.rows[1][1:] == ("1 of 2 runs, 5.0 s at best", "never", "never")


def test_the_target_of_a_loss_is_divided_by_the_share() -> None:
    """A share of a negative metric would be better than the metric itself: it has no targets."""
    one = make("ideal", [(1, 2.2), (2, 2.1), (3, 2.0)], recipe="stdlib-lm")
    found = report.times_to_targets([one])
    assert found is not None
    assert found.headings[1] == f"95%: {2.0 / 0.95:.4g}"
    assert found.rows[0][1] == "1.9 s [100 %]"
    for recipe, final in (("digits", -2.0), ("stdlib-lm", -2.0), ("digits", 0.0)):
        assert report.times_to_targets([make("ideal", [(2, final)], recipe=recipe)]) is None


# Differences


@pytest.mark.parametrize("seeds", [2, 3])
def test_differences_are_paired_by_seed(seeds: int) -> None:
    """Relative to the ideal. With two seeds there is no interval."""
    ours, theirs = (0.91, 0.95, 0.92)[:seeds], (0.90, 0.91, 0.93)[:seeds]
    runs = [make("bsp", [(2, final)], seed=seed) for seed, final in enumerate(ours)]
    runs += [make("ideal", [(1, final)], seed=seed) for seed, final in enumerate(theirs)]
    found = report.differences(runs)
    assert found is not None
    assert found.caption.startswith("Differences from ideal")
    ((name, _, shown_seeds, final, seconds),) = found.rows
    assert (name, shown_seeds) == ("bsp", str(seeds))
    assert final == ("+0.0133 [-0.0492, +0.0759]" if seeds == 3 else "+0.0250")
    assert seconds == ("+1.0 [+1.0, +1.0] s" if seeds == 3 else "+1.0 s")


def test_unpaired_seeds_do_not_count() -> None:
    runs = [make("bsp", [(1, 0.9)], seed=seed) for seed in (0, 1)]
    runs += [make("async", [(1, 0.9)], seed=seed) for seed in (1, 2)]
    assert report.differences(runs) is None


def test_the_interval_is_that_of_student() -> None:
    """Textbook quantiles: 4.303 for two degrees of freedom, 2.064 for 24."""
    found = interval_of((1.0, 2.0, 3.0))
    assert found.mean == 2.0
    assert (found.low, found.high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5))
    many = [float(one % 2) for one in range(24)] + [0.5]  # standard deviation 0.5
    assert interval_of(many).high - interval_of(many).mean == pytest.approx(
        2.064 * 0.5 / 5, rel=1e-3
    )


def test_an_interval_needs_three_values() -> None:
    with pytest.raises(ValueError, match="at least 3 values, got 2"):
        interval_of([1.0, 2.0])


def test_curves_have_bands_up_to_the_end_of_the_shortest() -> None:
    runs = [make("bsp", [(1, 0.4), (2, 0.6), (3, 0.9)]), make("bsp", [(3, 0.8), (4, 0.8)], seed=1)]
    (row,) = rows_of(runs)
    seconds, middle, low, high = curve_of(row)
    assert seconds == [2, 3]
    assert middle == pytest.approx([0.6, 0.7])
    assert (low, high) == ([0.4, 0.6], [0.8, 0.8])
