"""Tables and plots, made from results only."""

import base64
import html
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from offbeat.lab.results import Result
from offbeat.plots import new_figure
from offbeat.strategies import STRATEGIES
from offbeat.table import Table
from offbeat.units import show_bytes

HEADINGS = (
    "strategy",
    "time to target",
    "speed-up",
    "final",
    "training time",
    "LSSR",
    "sent per worker",
    "idle",
)
SHARE = "share of the ideal"
"""The heading that stands behind the speed-up where ``ideal`` was run, too."""
SHARE_MEANS = (
    "Share of the ideal is the time to target of ideal, which has the samples of bsp at the step "
    "time of a worker that trains alone beside the others, divided by that of the row."
)


def groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results by strategy and its own options, each over its seeds, in order of appearance.

    Options that all have are in the caption.
    """
    found: dict[str, list[Result]] = {}
    shared = common_options(results)
    for result in results:
        own = [one for one in result.job.options if one not in shared]
        found.setdefault(" ".join([result.strategy, *own]), []).append(result)
    return found


def common_options(results: Sequence[Result]) -> tuple[str, ...]:
    """The options of the method that all results have, as ``--wire int8``."""
    first, *others = (result.job.options for result in results)
    return tuple(one for one in first if all(one in options for options in others))


def without_lssr(result: Result) -> bool:
    """Whether LSSR says nothing of this run; a strategy of one's own may be out of reach by now.

    Of a peer it is unknown.
    """
    kind = STRATEGIES.get(result.strategy.partition(":")[0])
    return kind is not None and not kind.meets


def _spread(values: Sequence[float | None], form: str, ranges: bool, unit: str = "") -> str:
    """The median, and with several values the range; "-" if they are not known."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "-"
    text = format(statistics.median(known), form)
    if ranges and len(known) > 1:
        text += f" ({format(min(known), form)}-{format(max(known), form)})"
    return text + unit


def table(results: Sequence[Result], *, ranges: bool = True) -> Table:
    """One row a strategy; medians over seeds, with their range, and "-" for what is not known.

    Speed-up is against the first row that is not the ideal. Where the ideal was run, the share of
    it stands behind; see ``SHARE_MEANS``.
    """
    found = groups(results)
    arrivals = {name: _arrival(runs) for name, runs in found.items()}
    first = next((arrivals[name] for name, runs in found.items() if not runs[0].is_ideal), None)
    with_ideal = has_ideal(results)
    ideal = next((arrivals[name] for name, runs in found.items() if runs[0].is_ideal), None)
    rows: list[tuple[str, ...]] = []
    for name, runs in found.items():
        reached = arrivals[name]
        times = _spread([run.time_to_target_seconds for run in runs], ".1f", ranges, " s")
        share = f"{100 * ideal / reached:.0f} %" if ideal and reached else "-"
        rows.append(
            (
                name,
                "not reached" if reached is None else times,
                f"{first / reached:.2f}x" if first and reached else "-",
                *([share] if with_ideal else []),
                _spread([run.final for run in runs], ".4f", ranges),
                _spread([run.seconds for run in runs], ".1f", ranges, " s"),
                "-" if without_lssr(runs[0]) else _spread([r.lssr for r in runs], ".2f", ranges),
                _sent(runs),
                _spread([_percent(run.idle) for run in runs], ".0f", ranges, " %"),
            )
        )
    headings = (*HEADINGS[:3], SHARE, *HEADINGS[3:]) if with_ideal else HEADINGS
    return Table(headings, tuple(rows), caption(results))


def has_ideal(results: Sequence[Result]) -> bool:
    """Whether the ideal was run, so that there are shares of it."""
    return any(result.is_ideal for result in results)


def _sent(runs: Sequence[Result]) -> str:
    known = [run.payload_bytes for run in runs if run.payload_bytes is not None]
    return show_bytes(statistics.median(known)) if known else "-"


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _arrival(runs: Sequence[Result]) -> float | None:
    """Median seconds to the target; None if one run did not reach it."""
    times = [run.time_to_target_seconds for run in runs]
    known = [seconds for seconds in times if seconds is not None]
    return statistics.median(known) if len(known) == len(times) else None


def further(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Strategy and final value of each metric besides the target's; medians over seeds."""
    told = []
    for strategy, runs in groups(results).items():
        values = [
            f"{name} {_spread([run.final_metrics[name] for run in runs], '.4f', True)}"
            for name in runs[0].final_metrics
            if name != runs[0].metric
        ]
        if values:
            told.append((strategy, ", ".join(values)))
    return told


def caption(results: Sequence[Result]) -> str:
    """What was compared: recipe, target, workers, link, machine, options; simulated or real."""
    one = results[0]
    seeds = len({run.job.seed for run in results})
    kind = "simulated" if one.simulated else "real processes"
    return (
        f"{one.job.recipe}, target {one.metric} {one.target:g}, {one.job.workers} workers "
        f"({kind}), {one.link}, {one.machine}, {seeds} seed{'s' if seeds > 1 else ''}"
        f"{''.join(f', {option}' for option in common_options(results))}"
    )


def markdown(results: Sequence[Result]) -> str:
    """The table as Markdown, with its caption; below, what shares mean, and further metrics."""
    more = [f"- `{strategy}`: {values}" for strategy, values in further(results)]
    below = "\nAt the end:\n\n" + "\n".join(more) + "\n" if more else ""
    shares = f"\n{SHARE_MEANS}\n" if has_ideal(results) else ""
    return table(results).markdown() + shares + below


def plot(results: Sequence[Result], path: Path) -> None:
    """Metric against training seconds, a line a strategy (thin ones for further seeds), as PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, axes = new_figure(8, 4.5, dpi=150)
    one = results[0]
    for number, (strategy, runs) in enumerate(groups(results).items()):
        for seed, run in enumerate(runs):
            axes.plot(
                [point.seconds for point in run.points],
                [point.metric for point in run.points],
                color=f"C{number}",  # of matplotlib's cycle
                linewidth=2 if seed == 0 else 0.8,
                alpha=1 if seed == 0 else 0.6,
                marker="o" if seed == 0 else None,
                markersize=3,
                label=strategy if seed == 0 else None,
            )
    axes.axhline(one.target, color="0.5", linewidth=1, linestyle=":")
    axes.annotate(
        f"target {one.target:g}",
        (1, one.target),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color="0.4",
    )
    if one.higher_is_better:  # the interesting part is near the target
        worst = min(run.points[0].metric for run in results)
        axes.set_ylim(bottom=max(worst - 0.02, one.target - 0.25))
    axes.set_xlim(left=0)
    axes.set_xlabel("training seconds" + (" (simulated)" if one.simulated else ""))
    axes.set_ylabel(one.metric)
    axes.set_title(caption(results), fontsize=8, color="0.3", loc="left", wrap=True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right" if one.higher_is_better else "best")
    figure.savefig(path, format="png")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Offbeat: {title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
        color: #222; }}
table {{ border-collapse: collapse; font-size: .9rem; }}
th, td {{ padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; font-family: ui-monospace, monospace; }}
img {{ max-width: 100%; }} pre {{ background: #f6f6f6; padding: 1rem; overflow-x: auto; }}
p.caption {{ color: #666; }}
</style></head><body>
<h1>{title}</h1><p class="caption">{caption}</p>
{image}
<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>
{further}
<p>Training time is computing and waiting, without evaluation. Time to target is that of the first
evaluation at the target. Speed-up is against the first row that is not the ideal. {shares}LSSR is
the share of steps without synchronization, for strategies whose workers meet to synchronize. Idle
is the share of training time spent waiting for other workers. What a method does not tell is
"-".</p>
<h2>Configuration</h2><pre>{configuration}</pre>
</body></html>
"""


def page(results: Sequence[Result], image: Path | None) -> str:
    """A self-contained HTML page: plot, table, configuration."""
    shown, whole = table(results), results[0].to_dict()
    rows = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in shown.rows]
    picture = ""
    if image is not None:
        data = base64.b64encode(image.read_bytes()).decode()
        picture = f'<img alt="metric against time" src="data:image/png;base64,{data}">'
    more = "".join(
        f"<li><code>{html.escape(strategy)}</code>: {html.escape(values)}</li>"
        for strategy, values in further(results)
    )
    kept = ("job", "link", "machine", "versions", "simulated", "target", "metric")
    return _PAGE.format(
        title=html.escape(f"{results[0].job.recipe}: strategies compared"),
        caption=html.escape(shown.caption),
        image=picture,
        head="".join(f"<th>{heading}</th>" for heading in shown.headings),
        body="".join(f"<tr>{row}</tr>" for row in rows),
        shares=f"{SHARE_MEANS} " if has_ideal(results) else "",
        further=f"<p>At the end:</p><ul>{more}</ul>" if more else "",
        configuration=html.escape(json.dumps({key: whole[key] for key in kept}, indent=2)),
    )


def write_report(results: Sequence[Result], output: Path) -> dict[str, Path]:
    """Write ``table.md``, ``plot.png`` and ``report.html`` into ``output``.

    Without matplotlib there is no plot. Returns the paths written, by what they are.
    """
    paths = {"table": output / "table.md"}
    paths["table"].write_text(markdown(results), encoding="utf-8")
    try:
        plot(results, output / "plot.png")
        paths["plot"] = output / "plot.png"
    except ImportError:
        pass
    paths["report"] = output / "report.html"
    paths["report"].write_text(page(results, paths.get("plot")), encoding="utf-8")
    return paths
