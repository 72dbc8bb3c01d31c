"""Options of ``compare``, declared as dataclasses.

A command is declared as a function such as ``f(job: Job, options: CompareOptions)``. The decorator
``with_options`` turns the fields of the two dataclasses into options of the command line.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.extend import STRATEGIES, types_of
from offbeat_lab.job import Job
from offbeat_lab.options import Panel, option, option_of

USUAL_LATENCY = "100us"
NODE_BANDWIDTH, NODE_LATENCY = "100Gbit/s", "10us"  # as in `offbeat.simulate.network`


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of ``compare`` that are not fields of ``Job``."""

    strategy: list[str] | None = option(
        Panel.STRATEGIES,
        "As in `offbeat strategies`, with options of its own if needed; repeatable.",
        "--strategy",
        "-s",
        metavar="METHOD",
        names=lambda: STRATEGIES,
        unset=Job.strategy,
    )
    tune: int | None = option(
        Panel.STRATEGIES,
        "Tune each method first, in at most N trials on another seed.",
        metavar="N",
    )
    seeds: int = option(Panel.TRAINED, "Number of seeds.", default=1)
    simulated: bool = option(
        Panel.WORKERS, "Use simulated workers, in virtual time.", "--simulate", default=False
    )
    bandwidth: str | None = option(
        Panel.WORKERS,
        "Limit of each link, as in 200Mbit/s; real workers need Linux, root, iproute2.",
        unset="none; 1Gbit/s if simulated",
    )
    latency: str | None = option(
        Panel.WORKERS, "Latency of a simulated message, as in 50us.", unset=USUAL_LATENCY
    )
    inside: str | None = option(
        Panel.WORKERS, "Bandwidth inside a simulated node.", unset=NODE_BANDWIDTH
    )
    inside_latency: str | None = option(
        Panel.WORKERS, "Latency inside a simulated node.", unset=NODE_LATENCY
    )
    step_time: str | None = option(
        Panel.WORKERS,
        "Compute time of a step, as in 80ms; real workers sleep up to it.",
        unset="as measured",
    )
    scenario: Path | None = option(
        Panel.WORKERS,
        "TOML file of deaths, joins, speeds and bandwidths during the run.",
        metavar="FILE",
    )
    output: Path | None = option(
        Panel.OUTPUT,
        "Directory of results and report.",
        "--output",
        "-o",
        unset="runs/RECIPE-TIME; none for a single run",
    )


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Replace dataclass parameters of a command by one option per field declared with ``option``.

    The command receives dataclass objects with the values of the options. The options are in the
    order of their panels.
    """
    kinds = {one.name: one.annotation for one in inspect.signature(function).parameters.values()}
    declared = {name: [*_options_of(kind)] for name, kind in kinds.items()}
    shown = sorted(itertools.chain(*declared.values()), key=_panel_number)

    @wraps(function)
    def command(**values: Any) -> None:
        # Jobs are stored as JSON, which has no paths.
        paths = {f.name for f in dataclasses.fields(Job) if (o := option_of(f)) and o.is_path}
        values |= {name: str(values[name]) for name in paths if values[name] is not None}
        fields = {name: {one.name: values[one.name] for one in declared[name]} for name in kinds}
        function(**{name: kind(**fields[name]) for name, kind in kinds.items()})

    # Typer reads these two attributes.
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in shown}
    return command


def _panel_number(parameter: inspect.Parameter) -> int:
    """Return the position of a parameter's panel in the help; the recipe, an argument, is first."""
    panel = getattr(parameter.annotation.__metadata__[0], "rich_help_panel", None)
    return [*Panel].index(panel) if panel in [*Panel] else -1


def _completion(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def _options_of(kind: Any) -> Iterator[inspect.Parameter]:
    """Yield a parameter for typer from each field declared with ``option``."""
    for field in dataclasses.fields(kind):
        declared = option_of(field)
        if declared is None:
            continue
        complete = None if declared.names is None else _completion(declared.names)
        required = field.default is MISSING
        if required:
            shown = typer.Argument(help=declared.help, autocompletion=complete)
        else:
            shown = typer.Option(
                *declared.flags,
                help=declared.help,
                metavar=declared.metavar or None,
                autocompletion=complete,
                rich_help_panel=declared.panel,
                show_default=declared.unset or True,
            )
        annotation = Path | None if declared.is_path else types_of(kind)[field.name]
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if required else field.default,
            annotation=Annotated[annotation, shown],
        )
