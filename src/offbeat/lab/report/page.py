"""One HTML file that needs no other: figures, tables, all configurations, the command."""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from offbeat.lab.report import figures
from offbeat.lab.report.tables import (
    arrivals,
    differences,
    further,
    links,
    notes,
    table,
)
from offbeat.lab.results import Result, public_job


def page(results: Sequence[Result]) -> str:
    """The page of a comparison. Without matplotlib it has no figures.

    Raises:
        ImportError: Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment
    except ImportError as error:
        raise ImportError("a report needs Jinja2: pip install 'offbeat[cli]'") from error
    one = results[0]
    shared, own = configurations(results)
    others = {
        "Time to shares of the ideal": arrivals(results),
        "Differences, seed by seed": differences(results),
        "The links": links(results),
    }
    source = files("offbeat.lab.report").joinpath("page.html").read_text(encoding="utf-8")
    shown = table(results)
    text: str = (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(source)
        .render(
            title=f"{one.job.recipe}: methods compared",
            caption=shown.caption,
            figures=drawings(results),
            table=shown,
            further=further(results),
            notes=" ".join(notes(results)),
            others=[(name, found) for name, found in others.items() if found is not None],
            commands=[*dict.fromkeys(run.command for run in results if run.command)],
            versions=", ".join(f"{name} {number}" for name, number in one.versions.items()),
            shared=_text(shared),
            jobs=[(name, "\n".join(map(json.dumps, told))) for name, told in own.items()],
        )
    )
    return text


def drawings(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Figures by what they show, as SVG; none without matplotlib."""
    one = results[0]
    try:
        drawn = [
            (f"{one.metric} against seconds".capitalize(), figures.curves(results)),
            ("Share of the ideal", figures.shares(results)),
            ("Where the time went", figures.times(results)),
        ]
    except ImportError:
        return []
    return [(name, drawing) for name, drawing in drawn if drawing is not None]


def configurations(
    results: Sequence[Result],
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """What all runs share; and by the label of the method what is its own, of each of its runs."""
    told = [public_job(run.job) for run in results]
    shared = {
        name: value for name, value in told[0].items() if all(one[name] == value for one in told)
    }
    own: dict[str, list[dict[str, Any]]] = {}
    for run, values in zip(results, told, strict=True):
        rest = {name: value for name, value in values.items() if name not in shared}
        own.setdefault(run.label, []).append(rest)
    one = results[0]
    kept = ("link", "machine", "simulated", "target", "metric", "model_bytes")
    return {"job": shared, **{name: getattr(one, name) for name in kept}}, own


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2)
