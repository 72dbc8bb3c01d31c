"""All strategies in virtual time: accuracy at equal time and at equal samples.

Eight workers on links of 100 Mbit/s, steps of 10 ms that vary by 20 %, on ``digits``. Two tables:

- *equal time*: every strategy trains for the time that BSP takes for a fifth of its steps. The
  schedule of its learning rate ends then; a short run finds how many steps that are.
- *equal samples*: every strategy reads the same number of samples, and its schedule ends with them.

The factor on the recipe's learning rate is tuned for each strategy and table, on two seeds that are
not shown.

Writes ``results/strategies.json`` and ``results/strategies.md``.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.harness import Result, save_page
from benchmarks.run_cache import SEEDS, WORKERS, Row, RunCache, arrivals, place, run, spread
from benchmarks.studies.tuning import Tuned, tune_cells, tuned_rows
from offbeat.lab.job import Job

STRATEGIES = (
    "bsp",
    "local:period=8",
    "fedavg:period=8,fraction=0.5",
    "fedavg:period=8,fraction=0.5,unselected=restart",
    "selsync:delta=0.3",
    "selsync:target_lssr=0.9",
    "selsync:target_lssr=0.9,aggregate=gradients",
    "async:staleness=16",
    "async:staleness=16,schedule=eager",
    "ssp:staleness=3",
    "ssp:staleness=100",
    "downpour",
    "downpour:push_every=4,fetch_every=4",
    "easgd:period=4",
    "easgd:period=16",
    "diloco:period=16,outer_lr=0.5,outer_momentum=0.8",
    "diloco:period=16,outer_lr=0.5,outer_momentum=0.8,fragments=4,overlap=4",
)
RECIPE, EPOCHS, TARGET = "digits", 10.0, 0.95
SHARE = 0.2
"""Share of BSP's time in the table of equal time."""
PROBE_STEPS = 24
EVALUATIONS = 12
TUNING_SEEDS = (1000, 1001)


@dataclass(frozen=True)
class Entry:
    """A strategy in one of the tables, ``time`` or ``samples``; tuned independently."""

    table: str
    strategy: str
    epochs: float


def job(entry: Entry, scale: float, seed: int) -> Job:
    """Return the run of an entry at a factor on the learning rate."""
    return Job(
        RECIPE,
        entry.strategy,
        WORKERS,
        epochs=entry.epochs,
        seed=seed,
        evaluations=EVALUATIONS,
        lr_scale=scale,
    )


def epochs_for(steps: int) -> float:
    """Return the epochs in which a worker takes ``steps`` steps."""
    task = Job(RECIPE, "bsp", WORKERS).check()
    return (steps - 0.5) * task.batch_size * WORKERS / len(task.dataset)


def fitted_epochs(cache: RunCache, strategies: Sequence[str], seconds: float) -> dict[str, float]:
    """Return the epochs in which each strategy trains for so many virtual seconds.

    A short run gives a first estimate, a run of about the right length the second, because
    SelSync's steps become cheaper as its trigger settles.
    """
    epochs = dict.fromkeys(strategies, epochs_for(PROBE_STEPS))
    for _ in range(2):
        probes = [job(Entry("time", s, epochs[s]), 1.0, TUNING_SEEDS[0]) for s in strategies]
        for strategy, row in zip(strategies, cache.rows(probes), strict=True):
            steps = max(1, round(seconds * row["steps"] / row["seconds"]))
            epochs[strategy] = epochs_for(steps)
    return epochs


def table(title: str, rows: dict[Entry, list[Row]], tuned: dict[Entry, Tuned]) -> list[str]:
    """Return one table as lines of Markdown."""
    lines = [
        f"## {title}",
        "",
        "| strategy | lr × | inside the grid | accuracy, % | time to "
        f"{100 * TARGET:.0f} % | steps | virtual time | idle | sent |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for entry, found in rows.items():
        seconds, idle, sent = (
            statistics.median(row[key] for row in found)
            for key in ("seconds", "idle", "payload_bytes")
        )
        best = tuned[entry]
        lines.append(
            f"| `{entry.strategy}` | {best.scale:g} | {'yes' if best.inside else '**no**'} | "
            f"{spread([row['final'] for row in found])} | {arrivals(found, TARGET)} | "
            f"{found[0]['steps']} | {seconds:.2f} s | {100 * idle:.0f} % | {sent / 1e6:.1f} MB |"
        )
    return [*lines, ""]


def page(seconds: float, rows: dict[Entry, list[Row]], tuned: dict[Entry, Tuned]) -> str:
    """Return the page with both tables."""
    seeds = len(next(iter(rows.values())))
    outside = sum(not tuned[entry].inside for entry in rows)
    text = [
        "# All strategies, simulated",
        "",
        f"`{RECIPE}`, {WORKERS} simulated workers, {place()}, steps varying by 20 %. The factor on "
        f"the recipe's learning rate is the best for each strategy in each table, on "
        f"{len(TUNING_SEEDS)} seeds of its own, from a grid of about half a decade a step that is "
        f"widened until the best lies inside ({outside} of {len(rows)} do not). Median (range) of "
        f"{seeds} seeds. Every schedule ends where its row ends. "
        "Written by `python -m benchmarks strategies`.",
        "",
    ]
    titles = {
        "time": f"Equal time: {seconds:.2f} virtual seconds, a fifth of BSP's",
        "samples": f"Equal samples: {EPOCHS:g} epochs",
    }
    for name, title in titles.items():
        text += table(title, {e: found for e, found in rows.items() if e.table == name}, tuned)
    return "\n".join(text)


def results(*, quick: bool = False) -> list[Result]:
    """Run the study, two runs at a time, and write its files; it has no single figures."""
    cache = RunCache.named("strategies", run, quick=quick)
    strategies = ("bsp", "local:period=8", "easgd:period=4") if quick else STRATEGIES
    epochs, tuning = (3.0, TUNING_SEEDS[:1]) if quick else (EPOCHS, TUNING_SEEDS)
    bsp = cache.rows([job(Entry("samples", "bsp", epochs), 1.0, TUNING_SEEDS[0])])[0]
    seconds = SHARE * bsp["seconds"]
    fits = fitted_epochs(cache, strategies, seconds)
    entries = [Entry("time", one, fits[one]) for one in strategies]
    entries += [Entry("samples", one, epochs) for one in strategies]
    tuned = tune_cells(cache, entries, job, tuning)
    rows = tuned_rows(cache, tuned, job, SEEDS[:1] if quick else SEEDS)
    text = page(seconds, rows, tuned)
    print(text)
    if not quick:
        saved = [
            {**asdict(entry), "tuned": asdict(tuned[entry]), "rows": found}
            for entry, found in rows.items()
        ]
        save_page("strategies", {"seconds": seconds, "entries": saved}, text)
    return []
