"""Results of the race in virtual time: times to the target, and comparisons with the rivals.

The time of a method in a cell is its median time to ``SHARE`` of the ideal network's final metric;
it is infinite if the median run never arrives.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import RESULTS
from benchmarks.race.methods import is_default
from benchmarks.race.simulated_settings import MAP, SHARE, Cell
from benchmarks.race.slowdown import best_so_far, seconds_to
from benchmarks.run_cache import Row

FILE = "simulated-race.jsonl"


def read(folder: Path = RESULTS) -> list[Row]:
    """Return the rows of the results; none if there is no file."""
    path = folder / FILE
    if not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{**one, "cell": Cell(**one["cell"])} for one in found]


def arrival(row: Row, target: float) -> float:
    """Return the seconds to the target metric; infinite if the run never reaches it."""
    corners = best_so_far([*map(tuple, row["points"])], lower_is_better=False)
    found = seconds_to(corners, target)
    return math.inf if found is None else found


@dataclass(frozen=True)
class CellTimes:
    """Times to the target in one cell.

    Attributes:
        cell: The cell's name.
        times: Method or family → seconds to the target; infinite if never.
        merge_over_step: Time of a mean of all gradients over the time of a step.
    """

    cell: str
    times: Mapping[str, float]
    merge_over_step: float

    @property
    def best(self) -> float:
        """Smallest time of a method, without the ideal network."""
        return min(seconds for name, seconds in self.times.items() if name != "ideal")

    def share(self, method: str) -> float:
        """Return the ideal network's time over the method's; 0 if it never arrived."""
        return self.times["ideal"] / self.times[method]

    def regret(self, method: str) -> float:
        """Return the method's time over the best method's."""
        return self.times[method] / self.best if math.isfinite(self.best) else math.inf


def times_of(rows: Sequence[Row], workload: str, track: str) -> dict[Cell, CellTimes]:
    """Return the times of every cell of a track; the ideal network is always of ``defaults``."""
    own = [row for row in rows if row["workload"] == workload]
    found = {}
    for cell in dict.fromkeys(row["cell"] for row in own if row["track"] == track):
        here = [row for row in own if row["cell"] == cell]
        ideal = [row for row in here if row["track"] == "defaults" and row["family"] == "ideal"]
        target = SHARE * statistics.median(row["points"][-1][1] for row in ideal)
        members: dict[str, list[Row]] = {"ideal": ideal}
        for row in here:
            if row["track"] == track and row["family"] != "ideal":
                members.setdefault(row["family"], []).append(row)
        times = {
            family: statistics.median(arrival(row, target) for row in of)
            for family, of in members.items()
        }
        found[cell] = CellTimes(cell.name, times, cell.merge_over_step)
    return found


def tuning_runs(rows: Sequence[Row], workload: str = "mlp") -> dict[str, int]:
    """Return how many runs the tuning of each family took."""
    found: dict[str, int] = {}
    for row in rows:
        if row["workload"] == workload and row["track"] == "tuning":
            found[row["family"]] = found.get(row["family"], 0) + 1
    return found


def best_rival(one: CellTimes) -> tuple[str, float]:
    """Return the first rival of streaming averaging at the target, and its seconds."""
    rivals = {
        name: seconds
        for name, seconds in one.times.items()
        if name != "ideal" and not is_default(name)
    }
    best = min(rivals, key=lambda name: rivals[name])
    return best, rivals[best]


def time_ratio(default: float, rival: float) -> float:
    """Return the default's time over the rival's; infinite if the default never arrived."""
    return math.inf if math.isinf(default) else default / rival


def against_best_rival(
    rows: Sequence[Row], track: str, own: str = "defaults", cells: Sequence[Cell] = MAP
) -> dict[Cell, tuple[float, str]]:
    """Return, by cell, the default's time over the best rival's, and the rival's name.

    Args:
        rows: Rows of the results.
        track: Track of the rivals.
        own: Track of the default: ``defaults`` sets only its rate.
        cells: Cells to compare in.
    """
    ours, rivals = (times_of(rows, "mlp", one) for one in (own, track))
    found = {}
    for cell in (one for one in cells if one in ours and one in rivals):
        name, seconds = best_rival(rivals[cell])
        found[cell] = time_ratio(ours[cell].times["streaming"], seconds), name
    return found
