"""Accuracy with a quantized wire, in virtual time: fewer bytes, or more means for the same bytes.

Eight workers on links of 100 Mbit/s, steps of 10 ms that vary by 20 %, on ``digits`` and
``mnist:cnn``. A mean in int8 takes a quarter of the bytes. So either the same strategy sends less,
or a quarter of the period or staleness sends the same. Encoding takes no virtual time; the
benchmark ``compression`` measures it. Writes ``results/wire.json`` and ``wire.md``.
"""

import statistics

from benchmarks.harness import MNIST, Result, save_page
from benchmarks.run_cache import SEEDS, WORKERS, RunCache, run, spread
from offbeat.lab.job import Job

ROWS = (
    ("bsp", "float32"),
    ("bsp", "int8"),
    ("local:period=8", "float32"),
    ("local:period=8", "bfloat16"),
    ("local:period=8", "int8"),
    ("local:period=2", "int8"),
    ("async:staleness=16", "float32"),
    ("async:staleness=16", "int8"),
    ("async:staleness=4", "float32"),
    ("async:staleness=4", "int8"),
)


def results(*, quick: bool = False) -> list[Result]:
    """Run the study, two runs at a time, and write its files; it has no single figures."""
    recipes = [("digits", None)]
    if MNIST.is_dir() and not quick:
        recipes.append(("mnist:cnn", str(MNIST)))
    seeds = SEEDS[:1] if quick else SEEDS
    jobs = [
        Job(recipe, strategy, WORKERS, seed=seed, data=data, evaluations=6, wire=wire)
        for recipe, data in recipes
        for strategy, wire in ROWS
        for seed in seeds
    ]
    rows = RunCache.named("wire", run, quick=quick).rows(jobs)
    lines = [
        "# A lossy wire, simulated",
        "",
        "Median (range) of three seeds. Written by `python -m benchmarks wire`.",
        "",
        "| recipe | strategy | wire | accuracy, % | virtual time | idle | sent |",
        "|---|---|---|---|---|---|---|",
    ]
    for start in range(0, len(rows), len(seeds)):
        found = rows[start : start + len(seeds)]
        job = found[0]["job"]
        seconds, idle, sent = (
            statistics.median(row[key] for row in found)
            for key in ("seconds", "idle", "payload_bytes")
        )
        lines.append(
            f"| `{job['recipe']}` | `{job['strategy']}` | {job['wire']} | "
            f"{spread([row['final'] for row in found])} | {seconds:.1f} s | {100 * idle:.0f} % | "
            f"{sent / 1e6:.1f} MB |"
        )
    text = "\n".join([*lines, ""])
    print(text)
    if not quick:
        save_page("wire", {"rows": rows}, text)
    return []
