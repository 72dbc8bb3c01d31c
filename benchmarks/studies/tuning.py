"""A learning rate for each setting: the best of a grid, widened until the best lies inside."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from benchmarks.run_cache import Row, RunCache

GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Factors on a recipe's learning rate."""
FIRST = (0.3, 1.0, 3.0)
"""Factors that are tried first."""
Setting = TypeVar("Setting", bound=Hashable)


@dataclass(frozen=True)
class Tuned:
    """The result for one setting.

    Attributes:
        scale: Best factor.
        inside: True if both neighbours of the best factor were tried.
        scores: Factor → mean final metric over the tuning seeds.
    """

    scale: float
    inside: bool
    scores: dict[float, float]


def tune(
    settings: Sequence[Setting],
    final: Callable[[Sequence[tuple[Setting, float, int]]], Sequence[float]],
    seeds: Sequence[int],
) -> dict[Setting, Tuned]:
    """Return the best factor of each setting; of equal ones the one nearest to 1, then the smaller.

    Args:
        settings: Settings, each tuned independently.
        final: Function that runs (setting, factor, seed) triples and returns the final metric of
            each, higher is better.
        seeds: Seeds of these runs, other than those that are shown.
    """
    found: dict[Setting, dict[float, float]] = {setting: {} for setting in settings}
    wanted = [(setting, scale) for setting in found for scale in FIRST]
    while wanted:
        finals = final([(setting, scale, seed) for setting, scale in wanted for seed in seeds])
        for i, (setting, scale) in enumerate(wanted):
            found[setting][scale] = fmean(finals[i * len(seeds) : (i + 1) * len(seeds)])
        wanted = [
            (setting, scale)
            for setting, scores in found.items()
            for scale in _neighbours(_best(scores))
            if scale not in scores
        ]
    return {
        setting: Tuned(best := _best(scores), len(_neighbours(best)) == 2, scores)
        for setting, scores in found.items()
    }


def tune_cells(
    cache: RunCache,
    settings: Sequence[Setting],
    cell: Callable[[Setting, float, int], Any],
    seeds: Sequence[int],
) -> dict[Setting, Tuned]:
    """Return ``tune`` for runs of a cache; ``cell`` makes a cell of setting, factor and seed."""

    def final(runs: Sequence[tuple[Setting, float, int]]) -> list[float]:
        return [row["final"] for row in cache.rows([cell(*one) for one in runs])]

    return tune(settings, final, seeds)


def tuned_rows(
    cache: RunCache,
    tuned: dict[Setting, Tuned],
    cell: Callable[[Setting, float, int], Any],
    seeds: Sequence[int],
) -> dict[Setting, list[Row]]:
    """Return the rows of each setting at its best factor, one for each seed."""
    cells = [cell(one, best.scale, seed) for one, best in tuned.items() for seed in seeds]
    rows = iter(cache.rows(cells))
    return {one: [next(rows) for _ in seeds] for one in tuned}


def _best(scores: dict[float, float]) -> float:
    return max(sorted(scores), key=lambda scale: (scores[scale], -abs(_place(scale))))


def _place(scale: float) -> int:
    return GRID.index(scale) - GRID.index(1.0)


def _neighbours(scale: float) -> list[float]:
    place = GRID.index(scale)
    return [GRID[i] for i in (place - 1, place + 1) if 0 <= i < len(GRID)]
