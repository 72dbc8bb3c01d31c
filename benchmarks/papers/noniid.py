"""Data that are not IID, in virtual time: loss of accuracy, and what data injection recovers.

(a) ``mnist:cnn`` with ten workers that each have the images of one digit: local SGD, FedAvg and
SelSync, without and with data injection, against the bytes of models and samples that they send;
and BSP for comparison. (b) IID data, eight workers: SelSync and local SGD with workers that read
all data in rotation (SelDP), an eighth each (DefDP), or another eighth in every epoch (torch's
DistributedSampler). All rows of a table take the same number of steps with about the same batch.

Writes ``results/noniid.json``, ``noniid.md`` and ``docs/images/noniid.png``.
"""

import statistics
from collections.abc import Sequence
from itertools import combinations

from benchmarks.harness import IMAGES, MNIST, Result, save_page
from benchmarks.run_cache import SEEDS, Row, RunCache, grouped, run, spread
from offbeat.display.plots import colours_of
from offbeat_lab.job import Job

INJECTIONS = (None, "0.5,0.5", "0.75,0.75")
FEDAVG = "fedavg:rounds_per_epoch=4,steps_per_epoch=94"
STRATEGIES = {
    "local:period=8": INJECTIONS,
    FEDAVG: INJECTIONS,
    f"{FEDAVG},fraction=0.5": INJECTIONS[:2],
    "selsync:delta=0.05": INJECTIONS,
    "selsync:delta=0.3": INJECTIONS,
    "selsync:delta=0.3,max_interval=16": INJECTIONS[:2],
}
"""Strategy → data injections to try; the paper's FedAvg averages all workers."""
NAMES = {
    "bsp": "BSP",
    "local:period=8": "local SGD, period 8",
    FEDAVG: "FedAvg, all workers",
    f"{FEDAVG},fraction=0.5": "FedAvg, half of the workers",
    "selsync:delta=0.05": "SelSync, δ = 0.05",
    "selsync:delta=0.3": "SelSync, δ = 0.3",
    "selsync:delta=0.3,max_interval=16": "SelSync, δ = 0.3, at least every 16 steps",
}
"""Strategy → its name in the figure."""
SKEWED_SEEDS = (0, 1, 2, 3, 4)
SAMPLERS = ("seldp", "defdp", "distributed")
ROTATED = ("selsync:target_lssr=0.9", "local:period=8")


def skewed(quick: bool) -> list[Job]:
    """Return the runs of table (a)."""
    rows = [("bsp", None)]
    rows += [(strategy, one) for strategy, chosen in STRATEGIES.items() for one in chosen]
    return [
        Job(
            "mnist:cnn",
            strategy,
            10,
            epochs=0.1 if quick else 2,
            seed=seed,
            data=str(MNIST),
            evaluations=1,
            partition="label:1",
            injection=injection,
        )
        for strategy, injection in rows
        for seed in (SKEWED_SEEDS[:1] if quick else SKEWED_SEEDS)
    ]


def rotated(quick: bool) -> list[Job]:
    """Return the runs of table (b)."""
    return [
        Job(
            recipe,
            strategy,
            8,
            epochs=0.5 if quick else None,
            seed=seed,
            data=data,
            evaluations=1,
            sampler=sampler,
        )
        for recipe, data in (("digits", None), ("mnist:cnn", str(MNIST)))
        for strategy in ROTATED
        for sampler in SAMPLERS
        for seed in (SEEDS[:1] if quick else SEEDS)
    ]


def megabytes(rows: Sequence[Row], key: str) -> float:
    """Return the median over the seeds of a field in bytes."""
    return float(statistics.median(row[key] for row in rows)) / 1e6


def apart(rows: Sequence[Row]) -> list[str]:
    """Return a line for each injection: the strategies whose ranges over seeds do not overlap."""
    lines = []
    for injection in INJECTIONS:
        finals = {
            strategy: [row["final"] for row in found]
            for (strategy, one), found in grouped(rows, "strategy", "injection").items()
            if one == injection and strategy != "bsp"
        }
        ahead = [
            f"`{high}` above `{low}`"
            for pair in combinations(finals, 2)
            for high, low in (pair, pair[::-1])
            if min(finals[high]) > max(finals[low])
        ]
        pairs = len(finals) * (len(finals) - 1) // 2
        pairs_ahead = f": {'; '.join(ahead)}" if ahead else ""
        lines.append(
            f"- With injection {injection or 'none'}, {len(ahead)} of {pairs} pairs of strategies "
            f"have ranges that do not overlap{pairs_ahead}."
        )
    return lines


def page(first: Sequence[Row], second: Sequence[Row]) -> str:
    """Return the page with both tables."""
    lines = [
        "# Data that are not IID, simulated",
        "",
        f"Median (range) of {len({row['job']['seed'] for row in first})} seeds, and of "
        f"{len({row['job']['seed'] for row in second})} in the second table. Written by "
        "`python -m benchmarks noniid`.",
        "",
        "## One digit a worker",
        "",
        "`mnist:cnn`, ten workers, each with the images of one digit; 188 steps. Bytes are those a "
        "worker sends.",
        "",
        "| strategy | injection (α, β) | accuracy, % | LSSR | models | samples |",
        "|---|---|---|---|---|---|",
    ]
    for (strategy, injection), rows in grouped(first, "strategy", "injection").items():
        models, samples = (megabytes(rows, key) for key in ("payload_bytes", "sample_bytes"))
        lssr = statistics.median(row["lssr"] for row in rows)
        lines.append(
            f"| `{strategy}` | {injection or 'none'} | {spread([r['final'] for r in rows])} | "
            f"{lssr:.2f} | {models:.1f} MB | {samples:.1f} MB |"
        )
    lines += ["", *apart(first)]
    lines += [
        "",
        "## SelDP against DefDP",
        "",
        "IID data, eight workers, equal numbers of steps.",
        "",
        "| recipe | strategy | SelDP, % | DefDP, % | DistributedSampler, % |",
        "|---|---|---|---|---|",
    ]
    groups = grouped(second, "recipe", "strategy", "sampler")
    for recipe, strategy in dict.fromkeys(key[:2] for key in groups):
        cells = [
            spread([r["final"] for r in groups[recipe, strategy, sampler]]) for sampler in SAMPLERS
        ]
        lines.append(f"| `{recipe}` | `{strategy}` | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def draw(rows: Sequence[Row]) -> None:
    """Draw accuracy against bytes, a mark for each setting."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), dpi=120, layout="constrained")
    marks = {None: "o", "0.5,0.5": "s", "0.75,0.75": "^"}
    colours = dict(zip(NAMES, colours_of(list(NAMES)), strict=True))
    for (strategy, injection), found in grouped(rows, "strategy", "injection").items():
        finals = [100 * row["final"] for row in found]
        sent = megabytes(found, "payload_bytes") + megabytes(found, "sample_bytes")
        middle = statistics.median(finals)
        spreads = [[middle - min(finals)], [max(finals) - middle]]
        axes.errorbar(
            [sent],
            [middle],
            yerr=spreads,
            fmt=marks[injection],
            color=colours[strategy],
            capsize=3,
            zorder=3 if strategy == "bsp" else 2,
        )
    axes.set(
        xscale="log",
        xlabel="MB sent by a worker: models and samples",
        ylabel="test accuracy, %",
        title="MNIST, ten workers with one digit each (simulated)",
    )
    named = [(NAMES[one], "o", colour) for one, colour in colours.items()]
    named += [("no injection", "o", "0.3"), ("injection, α = β = 0.5", "s", "0.3")]
    named += [("injection, α = β = 0.75", "^", "0.3")]
    for label, mark, colour in named:
        axes.plot([], [], mark, color=colour, label=label)
    axes.set_xticks([2, 5, 10, 20, 50, 100, 200], ["2", "5", "10", "20", "50", "100", "200"])
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncols=3)
    figure.savefig(IMAGES / "noniid.png")
    plt.close(figure)


def results(*, quick: bool = False) -> list[Result]:
    """Run the study, two runs at a time, and write its files; it has no single figures."""
    if not MNIST.is_dir():
        print(f"looked for MNIST's IDX files in {MNIST}, which does not exist (OFFBEAT_MNIST)")
        return []
    cache = RunCache.named("noniid", run, quick=quick)
    first, second = cache.rows(skewed(quick)), cache.rows(rotated(quick))
    text = page(first, second)
    print(text)
    if not quick:
        save_page("noniid", {"skewed": first, "rotated": second}, text)
        draw(first)
    return []
