"""A self-contained HTML page of a comparison: figure, tables, configurations and the command."""

import base64
import io
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from offbeat_lab.report.comparisons import differences, times_to_targets, tuning
from offbeat_lab.report.figures import plot
from offbeat_lab.report.tables import notes, other_metrics, table
from offbeat_lab.results import Result, public_job
from offbeat_lab.tuning import without_trials


def page(results: Sequence[Result]) -> str:
    """Return the HTML page of a comparison."""
    from jinja2 import Environment  # slow to import, as matplotlib is

    chosen, results = tuning(results), without_trials(results)
    first = results[0]
    common, differing = configurations(results)
    others = {
        "Tuning": chosen,
        "Time to shares of the ideal": times_to_targets(results),
        "Differences, seed by seed": differences(results),
    }
    source = files("offbeat_lab.report").joinpath("page.html").read_text(encoding="utf-8")
    main = table(results)
    figure = io.BytesIO()
    plot(results, figure)
    text: str = (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(source)
        .render(
            title=f"{first.job.recipe}: methods compared",
            caption=main.caption,
            heading=f"{first.metric} against seconds".capitalize(),
            figure=base64.b64encode(figure.getvalue()).decode(),
            table=main,
            metrics=other_metrics(results),
            notes=" ".join(notes(results)),
            others=[(name, other) for name, other in others.items() if other is not None],
            commands=[*dict.fromkeys(run.command for run in results if run.command)],
            versions=", ".join(f"{name} {number}" for name, number in first.versions.items()),
            common=json.dumps(common, indent=2),
            jobs=[(name, "\n".join(map(json.dumps, jobs))) for name, jobs in differing.items()],
        )
    )
    return text


def configurations(
    results: Sequence[Result],
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Return the configuration that all runs share, and the settings in which they differ.

    The second item lists the differing settings of each run, by label (method with its options).
    """
    jobs = [public_job(run.job) for run in results]
    shared = {
        name: value for name, value in jobs[0].items() if all(job[name] == value for job in jobs)
    }
    differing: dict[str, list[dict[str, Any]]] = {}
    for run, job in zip(results, jobs, strict=True):
        rest = {name: value for name, value in job.items() if name not in shared}
        differing.setdefault(run.label, []).append(rest)
    names = ("link", "machine", "simulated", "target", "metric", "model_bytes")
    return {"job": shared, **{name: getattr(results[0], name) for name in names}}, differing
