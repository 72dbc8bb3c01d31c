"""Table I of SelSync, repeated with a small transformer: SelSync against BSP.

The gradient change Δ and the learning rate both change in these runs: AdamW has a warm-up and a
cosine. The byte transformer of ``benchmarks/models`` has 4 workers, and links on which averaging
takes as many steps as that of the paper's Transformer at 5 Gbit/s. All methods get their data from
``SelDPSampler``. The paper has 16 workers, SGD and WikiText-103; its Transformer has 108 million
parameters, this one 0.14 million. Times are to 2 and 10 % above the loss with which BSP ends.
"Longer steps" is the correction of Adam, which Offbeat has by default and the paper does not.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.papers.convergence import selsync
from benchmarks.papers.runs import SEEDS, Setting, markdown, speedup, spread
from offbeat_lab.results import Result

SETTING = Setting("bytes", "transformer", workers=4, epochs=0.33, evaluations=24)
DELTAS = (0.1, 0.3, 0.5)
LEVELS = (0.02, 0.1)  # above BSP's loss at the end
METHODS = {
    "BSP": "bsp",
    **{f"SelSync, δ = {delta}": f"{selsync(delta)} --adam-correction off" for delta in DELTAS},
    "δ = 0.3, longer steps": selsync(0.3),
    "target LSSR 0.9, longer steps": "selsync:target_lssr=0.9",
}
LONG = replace(SETTING, epochs=0.495)  # 480 steps instead of 320
MORE = {f"SelSync, δ = {d}, 480 steps": METHODS[f"SelSync, δ = {d}"] for d in DELTAS[:2]}
"""Methods that run a second time with 1.5 times as many steps. In the paper SelSync takes 1.38 and
1.65 times as many steps as BSP."""


def facts(runs: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """Return the data of each method. ``runs`` has its name → one run per seed, in order."""

    def faster(one: Result, bsp: Result, above: float) -> float | None:
        level = (1 + above) * bsp.final
        seconds, theirs = one.seconds_to(level), bsp.seconds_to(level)
        return None if seconds is None or theirs is None else theirs / seconds

    found = []
    for name in runs:
        pairs = [*zip(runs[name], runs["BSP"], strict=True)]
        found.append(
            {
                "method": name,
                "lssr": [one.lssr for one, _ in pairs],
                "final": [one.final for one, _ in pairs],
                "throughput": [bsp.seconds / one.seconds for one, bsp in pairs],
                "faster": {
                    f"{above:g}": [faster(*pair, above) for pair in pairs] for above in LEVELS
                },
            }
        )
    return found


def table(data: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    headings = ("method", "LSSR", "bits per byte at the end", "minus BSP's", "whole run")
    bsp = statistics.median(data["facts"][0]["final"])
    rows = [
        [
            one["method"],
            f"{statistics.median(one['lssr']):.3f}",
            spread(one["final"], 1, 3),
            f"{statistics.median(one['final']) - bsp:+.3f}".replace("-", "−"),
            f"{statistics.median(one['throughput']):.2f} ×",
            *map(speedup, one["faster"].values()),
        ]
        for one in data["facts"]
    ]
    return markdown(
        [*headings, *(f"to {100 * above:g} % above BSP's end" for above in LEVELS)], rows
    )


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return the data of all methods."""
    runs: dict[str, Sequence[Result]] = {}
    for setting, methods in ((SETTING, METHODS), (LONG, MORE)):
        found = setting.run([*methods.values()], seeds)
        runs |= {name: found[method] for name, method in methods.items()}
    return {"facts": facts(runs)}
