"""SelSync, Table I at small scale: iterations, LSSR, accuracy and speed-up of each method.

8 workers, on links on which a mean takes as many steps as ResNet-101's at 5 Gbit/s. A CNN on
CIFAR-10 and one on MNIST, each at a constant rate, the same for all methods except SSP, whose rate
is tuned. As in the paper, SelSync reads SelDP and the other methods read DefDP; for comparison, the
table also has the accuracy of the others under SelDP. A run has *converged* at its first evaluation
within a point of its best; both are means of three evaluations. The overall speed-up is BSP's time
to its convergence over the method's time to its own, as in the paper. The table also has the
speed-up to *BSP's* level, within the same point.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.papers.runs import SEEDS, Setting, best_of, markdown, speedup, spread
from offbeat_lab.events import Evaluation
from offbeat_lab.results import Result

WORKERS = 8
WITHIN = 0.01
SETTINGS = {
    "cifar": Setting("cifar", "resnet101", WORKERS, epochs=6.0, evaluations=30),
    "mnist": Setting("mnist", "resnet101", WORKERS, epochs=1.5, evaluations=30),
}
SSP_SCALES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
DEFDP = " --sampler defdp"
AN_EPOCH = {"cifar": 62, "mnist": 117}  # steps of each worker


def methods(task: str) -> dict[str, str]:
    """Return the methods by the paper's names."""
    epoch = f"steps_per_epoch={AN_EPOCH[task]}"
    found = {"BSP": f"bsp{DEFDP}"}
    for fraction in (1, 0.5):
        for share, rounds in ((0.25, 4), (0.125, 8)):
            drawn = "" if fraction == 1 else f",fraction={fraction}"
            found[f"FedAvg ({fraction}, {share})"] = (
                f"fedavg:rounds_per_epoch={rounds},{epoch}{drawn}{DEFDP}"
            )
    for scale in SSP_SCALES:  # s = 100 is a bound that is never reached here, as 200 is
        found[f"SSP, rate × {scale:g}"] = f"ssp:staleness=100 --lr-scale {scale:g}{DEFDP}"
    return found | {f"SelSync, δ = {d}": selsync(d) for d in (0.3, 0.5)}


def selsync(delta: float, name: str = "selsync") -> str:
    """Return SelSync with the paper's smoothing for 16 workers, 0.16, over 25 steps."""
    return f"{name}:delta={delta:g},smoothing=0.16,window=25"


def smoothed(result: Result) -> Result:
    """Average each metric with the two before it: one of 2,000 images is off by a point."""
    points = [
        replace(
            one, metric=statistics.fmean(p.metric for p in result.points[max(0, i - 2) : i + 1])
        )
        for i, one in enumerate(result.points)
    ]
    return replace(result, points=tuple(points))


def converged(result: Result, within: float = WITHIN) -> Evaluation:
    """Return the first evaluation within this distance of the best one."""
    return next(one for one in result.points if one.metric >= best_of(result) - within)


def facts(task: str, runs: Mapping[str, Sequence[Result]]) -> list[dict[str, Any]]:
    """Return the data of each method; runs are paired with BSP's by seed."""
    smooth = {method: [smoothed(one) for one in found] for method, found in runs.items()}
    bsp = smooth[methods(task)["BSP"]]
    found = []
    for name, method in methods(task).items():
        own = smooth[method]
        ends, theirs = ([converged(one) for one in group] for group in (own, bsp))
        levels = [best_of(one) - WITHIN for one in bsp]
        times, earliest = (
            [one.seconds_to(level) for one, level in zip(group, levels, strict=True)]
            for group in (own, bsp)
        )
        found.append(
            {
                "method": name,
                "steps": [end.step for end in ends],
                "lssr": statistics.median(one.lssr or 0.0 for one in own),
                "best": [best_of(one) for one in own],
                "loss": [one.final_metrics["loss"] for one in runs[method]],
                "seldp": [best_of(one) for one in smooth.get(method.removesuffix(DEFDP), [])],
                "overall": [b.seconds / a.seconds for a, b in zip(ends, theirs, strict=True)],
                "to_bsp": [
                    None if late is None or early is None else early / late
                    for late, early in zip(times, earliest, strict=True)
                ],
                "step_seconds": statistics.median(one.mean_step_seconds for one in own),
            }
        )
    return found


def best_rate(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return SSP's data at the rate of its highest accuracy."""
    rows = [one for one in found if one["method"].startswith("SSP")]
    return max(rows, key=lambda one: statistics.median(one["best"]))


def table(data: dict[str, Any], task: str) -> str:
    """Return the table as Markdown, with SSP at its best rate."""
    headings = ("method", "iterations", "LSSR", "best accuracy, %", "minus BSP's", "on SelDP, %")
    found, rows = data["facts"][task], []
    bsp, ssp = found[0], best_rate(found)
    for one in found:
        if one["method"].startswith("SSP") and one is not ssp:
            continue
        less = 100 * (statistics.median(one["best"]) - statistics.median(bsp["best"]))
        # A speed-up to an accuracy far below BSP's says nothing.
        far = statistics.median(one["best"]) < 0.75 * statistics.median(bsp["best"])
        rows.append(
            [
                one["method"],
                f"{statistics.median(one['steps']):.0f}",
                "-" if one is ssp else f"{one['lssr']:.3f}",
                spread(one["best"]),
                f"{less:+.1f}",
                f"{100 * statistics.median(one['seldp']):.1f}" if one["seldp"] else "-",
                "-" if far else f"{statistics.median(one['overall']):.2f} ×",
                speedup(one["to_bsp"]),
            ]
        )
    return markdown([*headings, "overall speed-up", "to BSP's level"], rows)


def measure(seeds: int = SEEDS) -> dict[str, Any]:
    """Return the data of both tasks."""
    found = {}
    for task, setting in SETTINGS.items():
        names = [*methods(task).values()]
        names += [one.removesuffix(DEFDP) for one in names if one.startswith(("bsp", "fedavg"))]
        found[task] = facts(task, setting.run(names, seeds))
    return {"facts": found}
