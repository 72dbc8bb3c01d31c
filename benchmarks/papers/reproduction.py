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
    curvature,
    discrepancy,
    distances,
    exponents,
    gradients,
    noniid,
    orders,
    regret,
    speedup,
    transformer,
)
from benchmarks.papers.runs import grouped, path_of, saved, spread
from benchmarks.papers.runs import speedup as shown

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
    found = {
        key: text
        for name, of in FIGURES.items()
        if path_of(name).exists()  # a study that was not run yet has none
        for key, text in of(saved(name)).items()
    }
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
            found[f"less {key}"] = _minus(f"{100 * less:+.1f}")
            same = statistics.median(one["best"]) - statistics.median(facts[0]["seldp"])
            found[f"less same {key}"] = _minus(f"{100 * same:+.1f}")
    return found


def _seeds(values: Sequence[Any]) -> str:
    return {1: "one seed", 2: "two seeds", 3: "three seeds"}[len(values)]


def _minus(text: str) -> str:
    """Return the text with the sign − of a negative number."""
    return text.replace("-", "−")


def _discrepancy(data: dict[str, Any]) -> dict[str, str]:
    found = {}
    for when, slopes in data["slopes"].items():
        for key, name in (("staleness", "τ"), ("workers", "N"), ("delay_workers", "delay")):
            found[f"slope {name} {when}"] = _minus(spread(slopes[key], 1, 2))
            found[f"{name} short {when}"] = _minus(f"{statistics.median(slopes[key]):.2f}")
    for n in discrepancy.WORKERS:
        rows = {"async": data["async"][str(n)]["16"], "delay": data["gradient_delay"][str(n)]}
        for name, seeds in rows.items():
            found[f"distance {name} {n}"] = f"{statistics.median(r['late'] for r in seeds):.4f}"
    return found


def _distances(data: dict[str, Any]) -> dict[str, str]:
    found = {
        "distances": distances.exponents(data),
        "seeds distances": _seeds(range(data["seeds"])),
    }
    for name in distances.METHODS:
        found[f"exponent {name} pairs"] = _minus(f"{distances.slopes(data, name)[1]:.2f}")
    return found


def _gradients(data: dict[str, Any]) -> dict[str, str]:
    found = {"seeds gradients": _seeds(grouped(data["layers"], "task")[("cifar",)])}
    for task in gradients.LAYERS:
        for share, value in zip(gradients.SHARES, gradients.spreads(data, task), strict=True):
            found[f"layer {task} {share:g}"] = f"{1000 * value:.3g}"
    return found


def _orders(data: dict[str, Any]) -> dict[str, str]:
    rows = grouped(data["orders"], "order")
    paper, ours = (
        statistics.median(row["accuracy"] for row in rows[(order,)]) for order in ("paper", "seldp")
    )
    return {
        "orders": orders.table(data),
        "orders less": f"{100 * (ours - paper):.1f}",
        "seeds orders": _seeds(rows[("paper",)]),
    }


def _transformer(data: dict[str, Any]) -> dict[str, str]:
    found, bsp = {"transformer": transformer.table(data)}, data["facts"][0]
    for one in data["facts"]:
        key, less = one["method"], statistics.median(one["final"]) - statistics.median(bsp["final"])
        found[f"transformer less {key}"] = _minus(f"{less:+.3f}")
        found[f"transformer throughput {key}"] = f"{statistics.median(one['throughput']):.2f}"
        for above, faster in one["faster"].items():
            found[f"transformer {above} {key}"] = shown(faster)
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
        found[f"Δ {name}"] = spread([run[i]["mean"] for run in data["pieces"]], 1, 3)
    found["seeds delta"] = _seeds(data["facts"][0]["final"])
    rows = [("δ", one) for one in data["facts"]]
    rows += [("gradients δ", one) for one in data["gradients"]]
    for name, one in rows:
        key = f"{name} {'∞' if one['delta'] is None else format(one['delta'], 'g')}"
        found[f"{key} lssr"] = f"{statistics.median(one['lssr']):.3f}"
        found[f"{key} final"] = spread(one["final"])
        if "loss" in one:  # older results have none
            found[f"{key} loss"] = f"{statistics.median(one['loss']):.2f}"
    return found


def _choices(data: dict[str, Any]) -> dict[str, str]:
    found = {"rotated": choices.rotated_table(data)}
    groups = grouped(data["rotated"], "task", "aggregate", "sampler")
    for (task, aggregate, sampler), rows in groups.items():
        found[f"seeds {task}"] = _seeds(rows)
        own = statistics.median(row["own"] for row in rows)
        found[f"own {task} {aggregate} {sampler}"] = f"{100 * own:.1f}"
    return found


def _regret(data: dict[str, Any]) -> dict[str, str]:
    found = {}
    small, large = (str(of(regret.STALENESS)) for of in (min, max))
    pairs = {
        "regret ratio": (data["regret"][large], data["regret"][small]),
        "less noise ratio": (data["less noise"][large], data["less noise"][small]),
        "sequential ratio": (data["sequential"][small], data["regret"][small]),
    }
    for name, (over, under) in pairs.items():
        for steps in over:
            ratio = statistics.fmean(over[steps]) / statistics.fmean(under[steps])
            found[f"{name} {steps}"] = f"{ratio:.2f}"
    found["seeds regret"] = _seeds(data["regret"][small]["64"])
    for staleness, slopes in data["slopes"].items():
        found[f"regret slope {staleness}"] = f"−{abs(statistics.median(slopes)):.2f}"
    return found


def _curvature(data: dict[str, Any]) -> dict[str, str]:
    return {
        f"curvature {key}": spread([one[key] for one in data["correlations"]], 1, 2)
        for key in ("variance", "squared_norm")
    } | {"curvature changes": spread([curvature.of_changes(one) for one in data["points"]], 1, 2)}


def _densities(data: dict[str, Any]) -> dict[str, str]:
    found = {}
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
    "distances": _distances,
    "delta": _delta,
    "choices": _choices,
    "regret": _regret,
    "curvature": _curvature,
    "densities": _densities,
    "gradients": _gradients,
    "orders": _orders,
    "transformer": _transformer,
    "discrepancy": _discrepancy,
    "noniid": _noniid,
}
"""Name of results → function of the results that returns values of the template."""
