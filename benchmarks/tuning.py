"""A learning rate for each setting: the best of a grid that is widened until the best is inside."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

GRID = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Factors on a recipe's learning rate; a search begins with ``FIRST``."""
FIRST = (0.3, 1.0, 3.0)
Setting = TypeVar("Setting", bound=Hashable)


@dataclass(frozen=True)
class Tuned:
    """What was found for one setting.

    Attributes:
        scale: The best factor.
        inside: Whether it has a tried neighbour on both sides, so that the grid did not cut it off.
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
    """The best factor of each setting; of equal ones the one nearest to 1, the smaller of two.

    Args:
        settings: What to tune, each by itself.
        final: (setting, factor, seed) of many runs → the final metric of each, higher is better.
        seeds: Of the runs; others than those that are shown.
    """
    found: dict[Setting, dict[float, float]] = {setting: {} for setting in settings}
    wanted = [(setting, scale) for setting in found for scale in FIRST]
    while wanted:
        runs = [(setting, scale, seed) for setting, scale in wanted for seed in seeds]
        finals = final(runs)
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


def _best(scores: dict[float, float]) -> float:
    return max(sorted(scores), key=lambda scale: (scores[scale], -abs(_place(scale))))


def _place(scale: float) -> int:
    return GRID.index(scale) - GRID.index(1.0)


def _neighbours(scale: float) -> list[float]:
    place = GRID.index(scale)
    return [GRID[i] for i in (place - 1, place + 1) if 0 <= i < len(GRID)]
