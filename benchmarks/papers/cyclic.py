"""Asynchronous averaging, cyclic: 4 workers at 1 Gbit/s with GoogLeNet's bytes, τ = 2 to 32.

Throughput relative to one worker, and the idle share. GoogLeNet is torchvision's: 6.6 M parameters,
or 13.0 M with the two auxiliary classifiers that training uses.
"""

from typing import Any

from benchmarks.papers.cluster import FOUR, off_formula
from offbeat import BSP, AsyncAveraging

GOOGLENET = {"GoogLeNet": 6_624_904, "GoogLeNet + auxiliary": 13_004_888}
STALENESS = (2, 4, 8, 16, 32)
CYCLES, SETTLING_CYCLES = 6, 2


def measure(step_seconds: tuple[float, ...]) -> dict[str, Any]:
    """Return the data of both sizes."""
    return {name: _size(count, step_seconds) for name, count in GOOGLENET.items()}


def _size(parameters: int, step_seconds: tuple[float, ...]) -> dict[str, Any]:
    rows = []
    for step in step_seconds:
        common = {"parameters": parameters, "step_seconds": step}
        alone = FOUR.run(BSP(), **common, steps=2, workers=1)["step_seconds"]
        strategies = [AsyncAveraging(staleness=staleness) for staleness in STALENESS]
        expected = [FOUR.step_seconds(one, parameters, step) for one in (BSP(), *strategies)]
        found = {"bsp": FOUR.run(BSP(), **common, steps=2)}
        for strategy in strategies:
            cycle = strategy.staleness // 2
            steps, settling = CYCLES * cycle, SETTLING_CYCLES * cycle
            run = FOUR.run(strategy, **common, steps=steps, settling=settling)
            found[str(strategy.staleness)] = run
        rows.append(
            {
                "step_seconds": step,
                "throughput": {
                    key: FOUR.workers * alone / one["step_seconds"] for key, one in found.items()
                },
                "idle": {key: one["idle"] for key, one in found.items()},
                "off_plan": off_formula(found.values(), expected),
            }
        )
    merge = FOUR.mean_seconds(4 * parameters) + FOUR.tally_seconds
    return {
        "parameters": parameters,
        "megabytes": 4 * parameters / 1e6,
        "merge_seconds": merge,
        # idle at τ = 4 and none at τ = 8, as the paper reports: merge/4 ≤ t < merge/2
        "steps_as_the_paper_seconds": [merge / 4, merge / 2],
        "rows": rows,
    }
