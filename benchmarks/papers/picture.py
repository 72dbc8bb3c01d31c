"""The picture beside the page."""

from pathlib import Path
from typing import Any

from benchmarks.papers.cyclic import STALENESS
from benchmarks.papers.selsync import WORKERS


def draw(data: dict[str, Any], path: Path) -> None:
    """Table I's speed-ups against step time; BSP against workers; idle share against staleness."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    for number, (name, model) in enumerate(data["a"]["models"].items()):
        colour = f"C{number}"
        _speedups(left, name, model, colour)
        at = model["throughput"]["Figure 1a"]
        middle.plot(WORKERS, at["ring"], "o-", color=colour, label=f"{name}, ring")
        middle.plot(WORKERS, at["one server"], ":", color=colour)
        middle.plot(WORKERS[-1], model["throughput_of_figure_1a"], "*", ms=15, color=colour)
    left.plot([], [], "k*", ms=12, label="what Table I needs, δ = 0.3")
    left.set(xlabel="step time [ms]", ylabel="speed-up of a step over BSP")
    left.set_title("simulated: SelSync, 16 workers, 5 Gbit/s", fontsize="medium")
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=2)
    ticks = [1000 * row["step_seconds"] for row in model["rows"]]
    left.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    left.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    middle.plot([], [], "k*", ms=12, label="Figure 1a")
    middle.plot([], [], "k:", label="one server for all")
    middle.set(xlabel="workers", ylabel="throughput relative to one worker", xticks=WORKERS)
    middle.set_title("simulated: BSP at Figure 1a's step times", fontsize="medium")
    for (name, model), style in zip(data["b"]["models"].items(), ("o-", "s--"), strict=True):
        for number, row in enumerate(model["rows"]):
            right.plot(
                STALENESS,
                [100 * row["idle"][str(staleness)] for staleness in STALENESS],
                style,
                color=f"C{number}",
                label=f"{name}, {1000 * row['step_seconds']:.0f} ms",
            )
    right.set(xlabel="staleness τ", ylabel="idle [%]", ylim=(-3, 100))
    right.set_title("simulated: cyclic averaging, 4 workers, 1 Gbit/s", fontsize="medium")
    right.set_xscale("log", base=2)
    right.set_xticks(STALENESS, [str(staleness) for staleness in STALENESS])
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _speedups(axes: Any, name: str, model: dict[str, Any], colour: str) -> None:
    """One model: simulated speed-ups, and what Table I needs, at the left edge if impossible."""
    needed, exact = model["table_1"][0]["per_step"], model["at_table_1"]
    rows = [*model["rows"], *([exact] if exact else [])]
    rows.sort(key=lambda row: row["step_seconds"])
    xs = [1000 * row["step_seconds"] for row in rows]
    label = f"{name}, LSSR {model['table_1'][0]['lssr']:.3f}"
    axes.plot(xs, [row["per_step"] for row in rows], "o-", color=colour, label=label)
    at = exact["step_seconds"] if exact else rows[0]["step_seconds"]
    axes.plot(1000 * at, needed, "*", ms=15, color=colour)
    if not exact:
        axes.annotate("at no step time", (1000 * at, needed), (8, -3), textcoords="offset points")
