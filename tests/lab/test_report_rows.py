"""Times to targets, and differences."""

import math
from dataclasses import replace
from itertools import product

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
    assert found.rows[0] == ("ideal", "2.0 s [100 %]", "3.0 s [100 %]", "4.0 s [100 %]")
    assert found.rows[1] == ("bsp", "5.0 s [40 %]", "10.0 s [30 %]", "never")
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
    assert found.rows[0][1] == "2.0 s [100 %]"
    for recipe, final in (("digits", -2.0), ("stdlib-lm", -2.0), ("digits", 0.0)):
        assert report.times_to_targets([make("ideal", [(2, final)], recipe=recipe)]) is None


# Differences


@pytest.mark.parametrize("seeds", [2, 3])
def test_differences_are_paired_by_seed(seeds: int) -> None:
    """Relative to the ideal. With three seeds the interval is the range; with two there is none."""
    ours, theirs = (0.91, 0.95, 0.92)[:seeds], (0.90, 0.91, 0.93)[:seeds]
    runs = [make("bsp", [(2, final)], seed=seed) for seed, final in enumerate(ours)]
    runs += [make("ideal", [(1, final)], seed=seed) for seed, final in enumerate(theirs)]
    found = report.differences(runs)
    assert found is not None
    assert found.caption.startswith("Differences from ideal")
    ((name, _, shown_seeds, final, seconds),) = found.rows
    assert (name, shown_seeds) == ("bsp", str(seeds))
    assert final == ("+0.0133 [-0.0100, +0.0400]" if seeds == 3 else "+0.0250")
    assert seconds == ("+1.0 [+1.0, +1.0] s" if seeds == 3 else "+1.0 s")


def test_unpaired_seeds_do_not_count() -> None:
    runs = [make("bsp", [(1, 0.9)], seed=seed) for seed in (0, 1)]
    runs += [make("async", [(1, 0.9)], seed=seed) for seed in (1, 2)]
    assert report.differences(runs) is None


@pytest.mark.parametrize("values", [(0.01, 0.04, -0.01), (1.0, 2.0, 3.0, 7.0)])
def test_the_bootstrap_interval_is_that_of_all_resamples(values: tuple[float, ...]) -> None:
    """All 27 or 256 resamples are enumerated; the quantile is the first mean at 2.5 % or above."""
    means = sorted(sum(one) / len(values) for one in product(values, repeat=len(values)))
    at = math.ceil(0.025 * len(means)) - 1
    interval = interval_of(values)
    assert interval.mean == pytest.approx(sum(values) / len(values))
    assert interval.low == pytest.approx(means[at])
    assert interval.high == pytest.approx(means[-1 - at])
    assert interval_of(values) == interval


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
