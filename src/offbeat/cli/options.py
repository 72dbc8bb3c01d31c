"""The options of commands. Those of a job are made from the fields of ``lab.job.Job``."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec

import typer

from offbeat.arguments import types_of
from offbeat.lab.job import Job, option_of
from offbeat.transport.costs import USUAL_INSIDE, USUAL_INSIDE_LATENCY

USUAL_LATENCY = "100us"
USUAL_WORKERS = 4
Latency = Annotated[str, typer.Option(help="Of one message, as in 50us.")]
LatencyUnlessProbed = Annotated[
    str | None, typer.Option(help="Of one message, as in 50us.", show_default=USUAL_LATENCY)
]
Jitter = Annotated[float, typer.Option(help="Standard deviation of a step, relative to it.")]
WorkersPerNode = Annotated[
    int, typer.Option(help="Nodes of so many, which share a link and train as one.")
]
Inside = Annotated[
    str | None,
    typer.Option(
        help="Of each worker's link inside its node, as in 200Gbit/s.", show_default=USUAL_INSIDE
    ),
]
InsideLatency = Annotated[
    str | None,
    typer.Option(help="Of one message inside a node.", show_default=USUAL_INSIDE_LATENCY),
]
StepTime = Annotated[
    str | None,
    typer.Option(
        help="Virtual time of a step, as in 80ms.",
        show_default="as measured on this machine",
    ),
]
Bandwidth = Annotated[
    str | None,
    typer.Option(help="Shape each worker's link, as in 200Mbit/s (Linux, root, iproute2)."),
]

Own = ParamSpec("Own")


def with_job(
    *without: str,
) -> Callable[[Callable[Concatenate[Job, Own], None]], Callable[..., None]]:
    """Give a command ``f(job, …)`` the options of a job, and ``f`` the job made of them.

    Parameters of its own come after them. One with the name of a field of ``Job`` stands in the
    place of that field's option, and the job has the field's default.

    Args:
        without: Fields of ``Job`` that this command does not ask for.
    """

    def decorate(function: Callable[Concatenate[Job, Own], None]) -> Callable[..., None]:
        _, *parameters = inspect.signature(function).parameters.values()
        own = {one.name: one.replace(kind=one.KEYWORD_ONLY) for one in parameters}
        asked = {name: one for name, one in _job_parameters().items() if name not in without}

        @wraps(function)
        def command(*args: Own.args, **values: Own.kwargs) -> None:
            told: dict[str, Any] = {}
            for name in asked.keys() - own.keys():
                value = values.pop(name)
                told[name] = str(value) if isinstance(value, Path) else value
            function(Job(**told), *args, **values)

        # What typer reads: own parameters take the place of those of the same name.
        shown = {**asked, **own}.values()
        command.__signature__ = inspect.Signature(list(shown))  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in shown}
        return command

    return decorate


def _job_parameters() -> dict[str, inspect.Parameter]:
    """A parameter, as typer reads it, for each field of ``Job`` that can be asked for."""
    found = {}
    for one in fields(Job):
        option = option_of(one)
        if option is None:
            continue
        kind = types_of(Job)[one.name]
        if option.is_path:
            kind = Path | None
        if one.default is MISSING:
            about, default = typer.Argument(help=option.help), inspect.Parameter.empty
        else:
            shown = option.unset or True
            about = typer.Option(*option.flags, help=option.help, show_default=shown)
            default = one.default
        found[one.name] = inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, about],
        )
    return found
