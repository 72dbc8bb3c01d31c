"""Options that several commands share, and their expansion from dataclasses.

A command declares ``f(job: Job, options: CompareOptions)``; the command line shows the fields of
both dataclasses as options.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.arguments import Precision, types_of
from offbeat.lab.job import Job, option_of

USUAL_LATENCY = "100us"
USUAL_WORKERS = 4
USUAL_INSIDE, USUAL_INSIDE_LATENCY = "100Gbit/s", "10us"  # those of `offbeat.transport.costs`
Bandwidth = Annotated[
    str | None,
    typer.Option(help="Shape each worker's link, as in 200Mbit/s (Linux, root, iproute2)."),
]
Jitter = Annotated[float, typer.Option(help="Standard deviation of a step, relative to it.")]
WorkersPerNode = Annotated[
    int, typer.Option(help="Workers per node, which share its link and train as one.")
]
Inside = Annotated[
    str | None,
    typer.Option(
        help="Bandwidth of each worker's link inside its node, as in 200Gbit/s.",
        show_default=USUAL_INSIDE,
    ),
]
InsideLatency = Annotated[
    str | None,
    typer.Option(help="Latency of one message inside a node.", show_default=USUAL_INSIDE_LATENCY),
]
_LATENCY = "Latency of one message, as in 50us."


@dataclass(frozen=True, kw_only=True)
class SimulatedOptions:
    """Options of simulated workers."""

    latency: Annotated[str, typer.Option(help=_LATENCY)] = USUAL_LATENCY
    step_time: Annotated[
        str | None,
        typer.Option(
            help="Virtual time of a step, as in 80ms.", show_default="measured on this machine"
        ),
    ] = None
    jitter: Jitter = 0.0
    workers_per_node: WorkersPerNode = 1
    inside: Inside = None
    inside_latency: InsideLatency = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of ``offbeat compare``."""

    strategy: Annotated[
        list[str],
        typer.Option(
            "--strategy",
            "-s",
            help="A strategy, perhaps with options for it alone; repeat for more.",
        ),
    ]
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 1
    bandwidth: Bandwidth = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Directory of results, table, plot and report.",
            show_default="runs/RECIPE-TIME",
        ),
    ] = None
    simulated: Annotated[
        bool, typer.Option("--simulate", help="Use simulated workers, in virtual time.")
    ] = False
    slow: Annotated[
        str | None,
        typer.Option(help="Slower workers, RANK=FACTOR, as in 0=2; rank 0 has the clock."),
    ] = None
    lr_scale: Annotated[
        str,
        typer.Option(
            help="Factor on the recipe's learning rate. With several, as in 0.3,1,3, the best of "
            "each strategy is shown."
        ),
    ] = "1"
    turns: Annotated[
        bool,
        typer.Option(
            "--turns",
            help="Calibrate: workers train alone for a second at each evaluation, and all seconds "
            "are converted to one machine speed. For machines with other load.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Options of ``offbeat plan``."""

    bandwidth: Annotated[
        str | None,
        typer.Option(help="Bandwidth of each worker's link, as in 5Gbit/s.", show_default=False),
    ] = None
    parameters: Annotated[
        str | None,
        typer.Option(help="Number of the model's parameters, as in 25M.", show_default=False),
    ] = None
    step_time: Annotated[
        str | None,
        typer.Option(help="Step time without communication, as in 120ms.", show_default=False),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-n", help="Number of workers.", show_default=str(USUAL_WORKERS)),
    ] = None
    latency: Annotated[str | None, typer.Option(help=_LATENCY, show_default=USUAL_LATENCY)] = None
    jitter: Jitter = 0.0
    workers_per_node: WorkersPerNode = 1
    inside: Inside = None
    inside_latency: InsideLatency = None
    lssr: Annotated[float, typer.Option(help="Share of local steps, for SelSync.")] = 0.9
    wire: Annotated[
        Precision | None,
        typer.Option(
            help="Precision of models and gradients on the network.",
            show_default="float32; chosen at run time by streaming",
        ),
    ] = None
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help="Forecast these instead of the usual; repeat it."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="Measure parameters and step time of this recipe, or file."),
    ] = None
    data: Annotated[Path | None, typer.Option(help="Directory of the recipe's data.")] = None
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure the network; start it with torchrun.")
    ] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False


def with_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Expand the parameters of a command that are dataclasses into one option per field.

    A later parameter with the name of an earlier field replaces its option, at the same place in
    the help. The field then has its default.

    Args:
        without: Fields that this command does not offer.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, Any] = {}
        owners: dict[str, str] = {}  # option -> parameter of `function`
        options: dict[str, inspect.Parameter] = {}
        for parameter in inspect.signature(function).parameters.values():
            expanded: list[inspect.Parameter] = [parameter]
            if dataclasses.is_dataclass(parameter.annotation):
                groups[parameter.name] = parameter.annotation
                expanded = [*_options_of(parameter.annotation)]
            for option in expanded:
                if option.name not in without:
                    options[option.name] = option.replace(kind=option.KEYWORD_ONLY)
                    owners[option.name] = parameter.name

        @wraps(function)
        def command(**values: Any) -> None:
            fields: dict[str, dict[str, Any]] = {name: {} for name in groups}
            arguments: dict[str, Any] = {}
            for name, value in values.items():
                owner = owners[name]
                if isinstance(value, Path) and issubclass(groups.get(owner, object), Job):
                    value = str(value)  # a job is JSON
                fields.get(owner, arguments)[name] = value
            for name, kind in groups.items():
                arguments[name] = kind(**fields[name])
            function(**arguments)

        # What typer reads.
        shown = options.values()
        command.__signature__ = inspect.Signature([*shown])  # type: ignore[attr-defined]
        command.__annotations__ = {option.name: option.annotation for option in shown}
        return command

    return decorate


def _options_of(kind: Any) -> Iterator[inspect.Parameter]:
    """Yield a parameter, in the form that typer reads, for each field that has an option."""
    annotations = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        annotation = annotations[field.name]
        if issubclass(kind, Job):
            annotation = _annotation_of(kind, field)
        if annotation is not None:
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            yield inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )


def _annotation_of(kind: type, field: "dataclasses.Field[Any]") -> Any:
    option = option_of(field)
    if option is None:
        return None
    if field.default is MISSING:
        shown = typer.Argument(help=option.help)
    else:
        shown = typer.Option(*option.flags, help=option.help, show_default=option.unset or True)
    return Annotated[Path | None if option.is_path else types_of(kind)[field.name], shown]
