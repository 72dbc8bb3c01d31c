"""SelSync, Figures 9 and 10: SelDP against DefDP, and averaging parameters against gradients.

Figure 9: the CNN on 1,600 images of CIFAR-10, 200 for each worker under DefDP, 30 passes. Few data
and many passes are like the paper's runs of hundreds of epochs. Figure 10: the CNN of
``convergence`` with the paper's δ, and with one that synchronizes more. 8 workers.

    python -m benchmarks.papers.choices
"""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.papers.convergence import WORKERS, run_of, selsync
from benchmarks.papers.runs import Run, by_method, cache_of, percent, save, seeds_asked
from benchmarks.run_cache import Row

NAME = "choices"
SAMPLERS = ("seldp", "defdp")
PASSES = 30.0
ROTATED = {
    "SelSync, δ = 0.3": selsync(0.3),
    "SelSync, δ = 0.5": selsync(0.5),
}
AGGREGATED = (0.1, 0.3)


def rotated(seeds: Sequence[int]) -> list[Run]:
    """Return the runs of Figure 9."""
    return [
        Run("cifar-few", "resnet101", WORKERS, f"{one} --sampler {sampler}", PASSES, 12, seed)
        for one in ROTATED.values()
        for sampler in SAMPLERS
        for seed in seeds
    ]


def aggregated(seeds: Sequence[int]) -> list[Run]:
    """Return the runs of Figure 10."""
    return [
        run_of("cifar", selsync(delta, more), seed)
        for delta in AGGREGATED
        for more in ("", ",aggregate=gradients")
        for seed in seeds
    ]


def _line(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "best": [max(one["metric"] for one in row["points"]) for row in rows],
        "final": [row["final"] for row in rows],
        "lssr": statistics.median(row["lssr"] for row in rows),
    }


def table(data: dict[str, Any], key: str) -> str:
    """Return the table of Figure 9 (``key`` "rotated") or 10 ("aggregated")."""
    names = ("SelDP", "DefDP") if key == "rotated" else ("parameters", "gradients")
    lines = [f"| method | {names[0]}, % | LSSR | {names[1]}, % | LSSR |", "|---|--:|--:|--:|--:|"]
    for one in data[key]:
        cells = [f"{percent(each['final'])} | {each['lssr']:.3f}" for each in one["pair"]]
        lines.append(f"| {one['method']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    seeds = seeds_asked(__doc__)
    cache = cache_of("train")
    first = by_method(cache.rows(rotated(seeds)), "method")
    second = by_method(cache.rows(aggregated(seeds)), "method")
    data = {
        "workers": WORKERS,
        "passes": PASSES,
        "rotated": [
            {
                "method": name,
                "pair": [_line(first[f"{one} --sampler {sampler}",]) for sampler in SAMPLERS],
            }
            for name, one in ROTATED.items()
        ],
        "aggregated": [
            {
                "method": f"SelSync, δ = {delta}",
                "pair": [
                    _line(second[selsync(delta, more),]) for more in ("", ",aggregate=gradients")
                ],
            }
            for delta in AGGREGATED
        ],
    }
    save(NAME, data)
    print(table(data, "rotated"), table(data, "aggregated"), sep="\n\n")


if __name__ == "__main__":
    main()
