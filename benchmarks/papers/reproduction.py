"""The page ``docs/reproduction.md``: a template with the results' numbers filled in."""

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, ROOT
from benchmarks.papers import (
    choices,
    convergence,
    distances,
    exponents,
    noniid,
    regret,
    speedup,
)
from benchmarks.papers.runs import grouped, saved, spread

TEMPLATE = Path(__file__).with_name("reproduction.md")
PAGE = ROOT / "docs" / "reproduction.md"
VERDICTS = (
    "**reproduced**",
    "**in part**",
    "**not at this scale**",
    "**undecided**",
    "**not tried**",
)
VGG11_ITERATIONS = 10_800  # BSP's, from the paper's Table I


def values() -> dict[str, str]:
    """Return the text for each ``{{name}}`` of the template."""
    found = {key: text for name, of in FIGURES.items() for key, text in of(saved(name)).items()}
    for study in ("long", "cifar-long"):
        texts = _speedup(saved(f"speedup-{study}"))
        found |= {f"{study} {key}": one for key, one in texts.items()}
    found |= _models(json.loads((RESULTS / "papers.json").read_text()))
    return found | _trigger((RESULTS / "trigger.jsonl").read_text())


def render() -> str:
    """Return the page.

    Raises:
        KeyError: The template names a value that does not exist.
    """
    found = values()
    return re.sub(r"\{\{([^}]+)\}\}", lambda one: found[one[1]], TEMPLATE.read_text())


def verdicts(page: str) -> list[tuple[str, str]]:
    """Return figure and verdict of each row of the page's first table."""
    rows = [line for line in page.partition("\n|")[2].partition("\n\n")[0].split("\n|")][2:]
    fields = [[one.strip() for one in row.strip(" |").split(" | ")] for row in rows]
    return [(one[0], one[-1]) for one in fields]


def _speedup(data: dict[str, Any]) -> dict[str, str]:
    found = {
        "speedup": speedup.table(data),
        "seeds speedup": _seeds(data["facts"][0]["finals"]),
        "steps": f"{data['rows'][-1]['steps']:,}",
    }
    alone = {
        one["rate"]: statistics.median(one["finals"])
        for one in data["facts"]
        if one["workers"] == 1
    }
    for one in data["facts"]:
        key = f"{one['rate']:g} {one['workers']} {one['method'].split(',')[0]}"
        known = [each for each in one["speedups"] if each is not None]
        found[f"speedup {key}"] = f"{statistics.median(known):.2f}" if known else "never"
        found[f"throughput {key}"] = f"{one['throughput']:.2f}"
        found[f"final {key}"] = f"{100 * statistics.median(one['finals']):.1f}"
        short = alone[one["rate"]] - statistics.median(one["finals"])
        found[f"short {key}"] = f"{100 * short:.1f}"
        found[f"idle {key}"] = f"{100 * one['idle']:.0f}"
    return found


def _convergence(data: dict[str, Any]) -> dict[str, str]:
    found = {}
    for task, facts in data["facts"].items():
        found[f"convergence {task}"] = convergence.table(data, task)
        found[f"seeds {task}"] = _seeds(facts[0]["best"])
        for one in facts:
            key = f"{task} {one['method']}"
            found[f"overall {key}"] = f"{statistics.median(one['overall']):.2f}"
            less = statistics.median(one["best"]) - statistics.median(facts[0]["best"])
            found[f"less {key}"] = f"{100 * less:+.1f}".replace("-", "−")
    return found


def _seeds(values: Sequence[Any]) -> str:
    return {1: "one seed", 2: "two seeds", 3: "three seeds"}[len(values)]


def _discrepancy(data: dict[str, Any]) -> dict[str, str]:
    found = {}
    for when, slopes in data["slopes"].items():
        for key, name in (("staleness", "τ"), ("workers", "N"), ("delay_workers", "delay")):
            found[f"slope {name} {when}"] = spread(slopes[key], 1, 2)
            found[f"{name} short"] = f"{statistics.median(slopes[key]):.2f}"
    return found


def _costs(data: dict[str, Any]) -> dict[str, str]:
    small, large = (
        next(one for one in data["batches"] if one["batch"] == size) for size in (32, 512)
    )
    epoch = data["partitions"]["ImageNet"]["seldp epoch"]
    return {
        "partition ImageNet seldp epoch": f"{1000 * epoch:.1f}",
        "more memory": f"{large['bytes'] / small['bytes']:.1f}",
        "more time": f"{large['seconds'] / small['seconds']:.1f}",
    }


def _delta(data: dict[str, Any]) -> dict[str, str]:
    found = {}
    for i, name in ((0, "first"), (1, "second"), (-1, "last")):
        found[f"Δ {name}"] = f"{data['pieces'][i]['mean']:.3f}"
    found["seeds delta"] = _seeds(data["facts"][0]["final"])
    for one in data["facts"]:
        key = "∞" if one["delta"] is None else f"{one['delta']:g}"
        found[f"δ {key} lssr"] = f"{statistics.median(one['lssr']):.3f}"
        found[f"δ {key} final"] = f"{100 * statistics.median(one['final']):.1f}"
    return found


def _choices(data: dict[str, Any]) -> dict[str, str]:
    found = {"rotated": choices.rotated_table(data)}
    groups = grouped(data["rotated"], "task", "aggregate", "sampler")
    for (task, aggregate, sampler), rows in groups.items():
        found[f"seeds {task}"] = _seeds(rows)
        own = statistics.median(row["own"] for row in rows)
        found[f"own {task} {aggregate} {sampler}"] = f"{100 * own:.1f}"
    for one in data["aggregated"]:
        found["seeds aggregated"] = _seeds(one["pair"][0]["final"])
        for which, each in zip("ab", one["pair"], strict=True):
            name = f"aggregated {one['method']} {which}"
            found[name] = f"{100 * statistics.median(each['final']):.1f}"
    return found


def _regret(data: dict[str, Any]) -> dict[str, str]:
    found = {}
    most, least = (data["regret"][str(of(regret.STALENESS))] for of in (max, min))
    for steps in most:
        ratio = statistics.fmean(most[steps]) / statistics.fmean(least[steps])
        found[f"regret ratio {steps}"] = f"{ratio:.2f}"
    for staleness, slopes in data["slopes"].items():
        found[f"regret slope {staleness}"] = f"−{abs(statistics.median(slopes)):.2f}"
    return found


def _curvature(data: dict[str, Any]) -> dict[str, str]:
    return {
        f"curvature {key}": spread([one[key] for one in data["correlations"]], 1, 2)
        for key in ("variance", "squared_norm")
    }


def _densities(data: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name, i in (("early", 1), ("late", -1)):
        found[f"layer {name}"] = (
            f"{1000 * statistics.median(r[i]['spread'] for r in data['layer']):.1f}"
        )
    for name in data["seeds"][0]:
        last = [run[name]["looks"][-1]["distance"] for run in data["seeds"]]
        found[f"density {name}"] = f"{100 * statistics.median(last):.1f}"
    nearer = [
        run[f"{delta:g} parameters"]["looks"][i]["distance"]
        < run[f"{delta:g} gradients"]["looks"][i]["distance"]
        for run in data["seeds"]
        for delta in data["deltas"]
        for i in range(len(data["looks"]))
    ]
    return found | {"densities nearer": f"{sum(nearer)} of {len(nearer)}"}


def _noniid(data: dict[str, Any]) -> dict[str, str]:
    found = {"noniid": noniid.table(data)}
    groups = grouped(data["skewed"], "strategy", "injection", field="job")
    for (strategy, injection), rows in groups.items():
        median = statistics.median(row["final"] for row in rows)
        found[f"noniid {strategy} {injection or 'none'}"] = f"{100 * median:.1f}"
    return found


def _models(data: dict[str, Any]) -> dict[str, str]:
    """Return the values that follow from the papers' own figures."""
    found = {}
    for name, model in data["a"]["models"].items():
        rows = model["table_1"]
        for row, key in zip(rows, ("0.3", "0.5"), strict=True):
            found[f"needs {name} {key}"] = f"{row['per_step']:.1f}"
            if row["limit"] is not None:
                found[f"limit {name} {key}"] = f"{row['limit']:.1f}"
            if name == "VGG11":
                most = VGG11_ITERATIONS * row["limit"] / row["overall"]
                found[f"most {name} {key}"] = f"{most / 1000:.1f}"
        for which, one in model["throughput"].items():
            found[f"{which} {name}"] = f"{one['ring'][-1]:.2f}"
            found[f"{which} {name} step"] = f"{1000 * one['step_seconds']:.0f}"
    for one in data["b"]["models"]["GoogLeNet"]["rows"]:
        for staleness, idle in one["idle"].items():
            key = f"GoogLeNet {1000 * one['step_seconds']:.0f} {staleness}"
            found[f"idle {key}"] = f"{100 * idle:.0f}"
    return found


def _trigger(lines: str) -> dict[str, str]:
    rows = {one["what"]: one for one in map(json.loads, lines.splitlines())}
    large = rows["trigger / read of every gradient, ResNet-50, 1 thread"]
    small = rows["trigger, 20 tensors, 41.6 k parameters"]
    return {
        "trigger large": f"{1000 * large['details']['ours_seconds']:.1f}",
        "trigger ratio": f"{large['value']:.2f}",
        "trigger small": f"{small['value']:.0f}",
    }


FIGURES: dict[str, Callable[[dict[str, Any]], dict[str, str]]] = {
    "speedup": _speedup,
    "exponents": lambda data: {"exponents": exponents.table(data)},
    "costs": _costs,
    "convergence": _convergence,
    "distances": lambda data: {"distances": distances.exponents(data)},
    "delta": _delta,
    "choices": _choices,
    "regret": _regret,
    "curvature": _curvature,
    "densities": _densities,
    "discrepancy": _discrepancy,
    "noniid": _noniid,
}
"""Name of results → function of the results that returns values of the template."""
