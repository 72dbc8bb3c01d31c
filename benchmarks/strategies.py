"""All strategies in the simulator: accuracy at equal virtual time and at equal samples.

Eight workers on links of 100 Mbit/s, steps of 10 ms that vary by 20 %, on ``digits``. Two tables:

- *equal time*: every strategy trains for as long as BSP takes for a fifth of its steps. Its own
  schedule ends then: how many steps that are is found by running it.
- *equal samples*: every strategy reads as many samples, and its schedule ends with them.

The factor on the recipe's learning rate is chosen for each strategy and each table, by the mean
final accuracy of two seeds that are not shown, from a grid that is widened until the best lies
inside. Real training, virtual seconds. Runs are kept in ``results/cells/strategies.jsonl``, so a
benchmark that was interrupted goes on where it was.

Writes ``results/strategies.json`` and ``results/strategies.md``.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.harness import RESULTS, Result, machine
from benchmarks.tuning import Tuned, tune
from benchmarks.virtual import SEEDS, WORKERS, Cells, Row, arrivals, place, run, spread
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
SHARE = 0.2  # of BSP's time
PROBE_STEPS = 24
EVALUATIONS = 12
TUNING_SEEDS = (1000, 1001)


@dataclass(frozen=True)
class Entry:
    """A strategy in one of the tables: what is tuned by itself."""

    table: str
    strategy: str
    epochs: float


def job(entry: Entry, scale: float, seed: int) -> Job:
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
    """Epochs of which a worker takes ``steps`` steps."""
    task = Job(RECIPE, "bsp", WORKERS).check()
    return (steps - 0.5) * task.batch_size * WORKERS / len(task.dataset)


def fitted(cells: Cells, strategies: Sequence[str], seconds: float) -> dict[str, float]:
    """Epochs of each strategy that end after so many virtual seconds.

    From a short run and then from one of about the right length: SelSync's steps become cheaper
    as its trigger settles.
    """
    epochs = dict.fromkeys(strategies, epochs_for(PROBE_STEPS))
    for _ in range(2):
        probes = [job(Entry("time", s, epochs[s]), 1.0, TUNING_SEEDS[0]) for s in strategies]
        for strategy, row in zip(strategies, cells.rows(probes), strict=True):
            steps = max(1, round(seconds * row["steps"] / row["seconds"]))
            epochs[strategy] = epochs_for(steps)
    return epochs


def table(title: str, rows: dict[Entry, list[Row]], tuned: dict[Entry, Tuned]) -> list[str]:
    """Lines of Markdown."""
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
    """Both tables."""
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
    """Run everything; two runs at a time."""
    cells = Cells.named("strategies", run, quick=quick)
    strategies = ("bsp", "local:period=8", "easgd:period=4") if quick else STRATEGIES
    epochs, tuning = (3.0, TUNING_SEEDS[:1]) if quick else (EPOCHS, TUNING_SEEDS)
    seeds = SEEDS[:1] if quick else SEEDS
    bsp = cells.rows([job(Entry("samples", "bsp", epochs), 1.0, TUNING_SEEDS[0])])[0]
    seconds = SHARE * bsp["seconds"]
    fits = fitted(cells, strategies, seconds)
    entries = [Entry("time", one, fits[one]) for one in strategies]
    entries += [Entry("samples", one, epochs) for one in strategies]

    def final(runs: Sequence[tuple[Entry, float, int]]) -> list[float]:
        return [row["final"] for row in cells.rows([job(*one) for one in runs])]

    tuned = tune(entries, final, tuning)
    chosen = {e: [job(e, tuned[e].scale, seed) for seed in seeds] for e in entries}
    found = iter(cells.rows([one for jobs in chosen.values() for one in jobs]))
    rows = {entry: [next(found) for _ in jobs] for entry, jobs in chosen.items()}
    text = page(seconds, rows, tuned)
    print(text)
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        saved = {
            "simulated": True,
            "seconds": seconds,
            "entries": [
                {**asdict(entry), "tuned": asdict(tuned[entry]), "rows": rows[entry]}
                for entry in entries
            ],
            "machine": machine(),
        }
        (RESULTS / "strategies.json").write_text(json.dumps(saved))
        (RESULTS / "strategies.md").write_text(text)
    return []
