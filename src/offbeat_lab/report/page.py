"""A self-contained HTML page of a comparison: figure, tables, configurations and the command."""

import base64
import io
import json
from collections.abc import Sequence
from importlib.resources import files

from offbeat_lab.report.comparisons import other_tables
from offbeat_lab.report.figures import plot
from offbeat_lab.report.tables import notes, other_metrics, table, winner
from offbeat_lab.results import Result, public_job
from offbeat_lab.tuning import without_trials


def page(results: Sequence[Result]) -> str:
    """Return the HTML page of a comparison."""
    from jinja2 import Environment  # slow to import, as matplotlib is

    others, results = other_tables(results), without_trials(results)
    first = results[0]
    jobs = [public_job(run.job) for run in results]
    names = ("link", "machine", "simulated", "target", "metric", "model_bytes")
    shared = {k: v for k, v in jobs[0].items() if all(job[k] == v for job in jobs)}
    common = {"job": _known(shared), **_known({name: getattr(first, name) for name in names})}
    differing: dict[str, list[str]] = {}  # JSON lines of the settings that differ, by label
    for run, job in zip(results, jobs, strict=True):
        own = {name: value for name, value in job.items() if name not in shared}
        differing.setdefault(run.label, []).append(json.dumps(own))
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
            winner=winner(results),
            heading=f"{first.metric} against seconds".capitalize(),
            figure=base64.b64encode(figure.getvalue()).decode(),
            table=main,
            metrics=other_metrics(results),
            notes=" ".join(notes(results)),
            others=others.items(),
            commands=[*dict.fromkeys(run.command for run in results if run.command)],
            versions=", ".join(f"{name} {number}" for name, number in first.versions.items()),
            common=json.dumps(common, indent=2),
            jobs=[(name, "\n".join(lines)) for name, lines in differing.items()],
        )
    )
    return text


def _known(values: dict[str, object]) -> dict[str, object]:
    """Return the settings and figures that are given."""
    return {name: value for name, value in values.items() if value is not None}
