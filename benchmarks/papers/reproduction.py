"""The page ``docs/reproduction.md``: a template with the results' numbers filled in.

python -m benchmarks.papers.reproduction
"""

import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS
from benchmarks.papers import (
    choices,
    convergence,
    costs,
    curvature,
    delta,
    densities,
    distances,
    exponents,
    noniid,
    regret,
    speedup,
)
from benchmarks.papers.runs import grouped, path_of, saved

TEMPLATE = Path(__file__).with_name("reproduction.md")
PAGE = RESULTS.parents[1] / "docs" / "reproduction.md"
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
    return {
        **_of(speedup.NAME, _speedup),
        **{
            f"{study} {key}": one
            for study in ("long", "cifar-long")
            for key, one in _of(f"{speedup.NAME}-{study}", _speedup).items()
        },
        **_of(exponents.NAME, _exponents),
        **_of(costs.NAME, _costs),
        **_of(convergence.NAME, _convergence),
        **_of(distances.NAME, _distances),
        **_of(delta.NAME, _delta),
        **_of(choices.NAME, _choices),
        **_of(regret.NAME, _regret),
        **_of(curvature.NAME, _curvature),
        **_of(densities.NAME, _densities),
        **_discrepancy(json.loads((RESULTS / "discrepancy.json").read_text())),
        **_noniid(json.loads(noniid.PATH.read_text())),
        **_models(json.loads((RESULTS / "papers.json").read_text())),
        **_trigger((RESULTS / "trigger.jsonl").read_text()),
    }


def _of(name: str, values_of: Callable[[dict[str, Any]], dict[str, str]]) -> dict[str, str]:
    """Return the values of a figure; none if it was not run."""
    return values_of(saved(name)) if path_of(name).exists() else {}


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
        ssp = convergence.best_rate(facts)
        found[f"ssp rate {task}"] = ssp["method"].split()[-1]
        for one in facts:
            key = f"{task} {'SSP' if one is ssp else one['method']}"
            if one["seldp"]:
                median = statistics.median(one["seldp"])
                found[f"seldp {key}"] = f"{100 * median:.1f}"
            found[f"best {key}"] = f"{100 * statistics.median(one['best']):.1f}"
            found[f"steps {key}"] = f"{statistics.median(one['steps']):.0f}"
            found[f"lssr {key}"] = f"{one['lssr']:.3f}"
            found[f"overall {key}"] = f"{statistics.median(one['overall']):.2f}"
            less = statistics.median(one["best"]) - statistics.median(facts[0]["best"])
            found[f"step {key}"] = f"{1000 * one['step_seconds']:.0f}"
            found[f"less {key}"] = _signed(100 * less)
    return found


def _seeds(values: Sequence[Any]) -> str:
    return {1: "one seed", 2: "two seeds", 3: "three seeds"}[len(values)]


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _discrepancy(data: dict[str, Any]) -> dict[str, str]:
    found = {}
    for when, slopes in data["slopes"].items():
        for key, name in (("staleness", "τ"), ("workers", "N"), ("delay_workers", "delay")):
            found[f"slope {name} {when}"] = _range(slopes[key])
            found[f"{name} short"] = f"{statistics.median(slopes[key]):.2f}"
    return found


def _distances(data: dict[str, Any]) -> dict[str, str]:
    return {"distances": distances.exponents(data)}


def _exponents(data: dict[str, Any]) -> dict[str, str]:
    found = {"exponents": exponents.table(data)}
    for setting, runs in data["exponents"].items():
        for key in runs[0]:
            found[f"exponent {setting}, {key}"] = f"{statistics.median(r[key] for r in runs):.2f}"
    return found


def _costs(data: dict[str, Any]) -> dict[str, str]:
    small, large = (
        next(one for one in data["batches"] if one["batch"] == size) for size in (32, 512)
    )
    return {
        **{
            f"partition {name} {key}": f"{1000 * seconds:.1f}"
            for name, one in data["partitions"].items()
            for key, seconds in one.items()
        },
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
        for key in ("mean", "own"):
            name = f"{key} {task} {aggregate} {sampler}"
            found[name] = f"{100 * statistics.median(row[key] for row in rows):.1f}"
    for task in choices.PASSES:
        seldp, defdp = (
            statistics.median(row["own"] for row in groups[task, "gradients", sampler])
            for sampler in choices.SAMPLERS
        )
        found[f"more {task}"] = f"{100 * (seldp - defdp):.1f}"
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
    found = {
        f"curvature {key}": _range([one[key] for one in data["correlations"]])
        for key in ("variance", "squared_norm")
    }
    norms = [[one["squared_norm"] ** 0.5 for one in run] for run in data["points"]]
    falls = [max(run) / run[-1] for run in norms]
    return found | {"norms fall": f"{min(falls):.1f} to {max(falls):.1f}"}


def _densities(data: dict[str, Any]) -> dict[str, str]:
    found = {"seeds densities": _seeds(data["seeds"])}
    first, last = (
        [run[i]["spread"] for run in data["layer"]] for i in (1, len(data["epochs"]) - 1)
    )
    found["layer early"], found["layer late"] = (
        f"{1000 * statistics.median(one):.1f}" for one in (first, last)
    )
    for name in densities.NAMES:
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
            found[f"pace {key}"] = f"{one['throughput'][staleness]:.2f}"
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


if __name__ == "__main__":
    PAGE.write_text(render())
    print(PAGE)
