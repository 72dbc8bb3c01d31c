"""The papers' figures and tables that can be tried at small scale.

This module answers ``python -m benchmarks papers``: do the papers' speed-ups follow from their own
figures? It has two parts. ``table_one`` and ``selsync``: Table I and Figure 1a of SelSync, 16
workers at 5 Gbit/s; the speed-up of a step follows from the overall speed-up and the iterations,
and the step time from that. ``cyclic``: asynchronous averaging, 4 workers at 1 Gbit/s. Everything
is simulated or arithmetic, and the same in every run. Step times on the papers' GPUs are not known,
so they are a parameter. The figures go to ``results/papers.json``; ``results/papers.md`` discusses
them.
"""

from typing import Any

import torch

import offbeat
from benchmarks.harness import Result, save_json
from benchmarks.papers import cyclic, selsync
from benchmarks.papers.cluster import FOUR

STEP_SECONDS = (0.05, 0.1, 0.2, 0.4)
SHOWN = 0.1  # the step time of the summary


def measure(step_seconds: tuple[float, ...], most_steps: int) -> dict[str, Any]:
    """Return the data of both parts."""
    a, b = selsync.measure(step_seconds, most_steps), cyclic.measure(step_seconds)
    simulated = [row for one in (*a.values(), *b.values()) for row in one["rows"]]
    simulated += [one["at_table_1"] for one in a.values() if one["at_table_1"]]
    setting = {"workers": FOUR.workers, "bandwidth": FOUR.bandwidth}
    return {
        "simulated": True,
        "offbeat": offbeat.__version__,
        "a": {"setting": selsync.setting(), "models": a},
        "b": {"setting": setting, "models": b},
        "off_plan": max(row["off_plan"] for row in simulated),
    }


def results(*, quick: bool = False) -> list[Result]:
    """Return the summary; without ``quick`` also write ``results/papers.json``."""
    step_seconds, most_steps = ((SHOWN,), 25) if quick else (STEP_SECONDS, 100)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # workers take turns on small tensors
    try:
        data = measure(step_seconds, most_steps)
    finally:
        torch.set_num_threads(threads)
    if not quick:
        save_json("papers", data)
    config = {"simulated": True}
    found = []
    for name, model in data["a"]["models"].items():
        row, needed = model["table_1"][0], model["at_table_1"]
        what = f"Table I, {name}, δ = 0.3: speed-up a step that it needs"
        limit = {"limit": row["limit"], "step_seconds": needed and needed["step_seconds"]}
        most = round(row["limit"], 1)
        found.append(Result("papers", what, row["per_step"], most, "x", config, limit))
        if needed:
            what = f"simulated: overall speed-up, {name}, δ = 0.3 (paper {row['overall']})"
            found.append(Result("papers", what, needed["overall"], None, "x", config, limit))
    for name, model in data["b"]["models"].items():
        row = next(row for row in model["rows"] if row["step_seconds"] == SHOWN)
        what = f"simulated: idle share, τ = 8, {name}, 100 ms"
        details = {"idle": row["idle"], "throughput": row["throughput"]}
        found.append(Result("papers", what, 100 * row["idle"]["8"], None, "%", config, details))
    what = "simulated: largest deviation from the formulas"
    return [*found, Result("papers", what, 100 * data["off_plan"], None, "%", config)]
