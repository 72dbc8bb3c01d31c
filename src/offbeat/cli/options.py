"""Options that several commands share, and their expansion from dataclasses.

A command declares ``f(job: Job, options: CompareOptions)``; the command line shows the fields of
both dataclasses as options.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from offbeat.arguments import Precision, types_of
from offbeat.lab.job import Job, option, option_of

USUAL_LATENCY = "100us"
USUAL_WORKERS = 4
USUAL_INSIDE, USUAL_INSIDE_LATENCY = "100Gbit/s", "10us"  # those of `offbeat.transport.costs`
SHAPED_LINKS = "Shape each worker's link, as in 200Mbit/s (Linux, root, iproute2)."
_LATENCY = "Latency of one message, as in 50us."


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options of ``simulate``, ``compare`` and ``plan``: steps that vary, and nodes."""

    jitter: float = option(0.0, help="Standard deviation of a step, relative to it.")
    workers_per_node: int = option(
        1, help="Workers per node, which share its link and train as one."
    )
    inside: str | None = option(
        None,
        help="Bandwidth of each worker's link inside its node, as in 200Gbit/s.",
        unset=USUAL_INSIDE,
    )
    inside_latency: str | None = option(
        None, help="Latency of one message inside a node.", unset=USUAL_INSIDE_LATENCY
    )


@dataclass(frozen=True, kw_only=True)
class VirtualClusterOptions(NodeOptions):
    """Options of the network and the steps of simulated workers."""

    latency: str = option(USUAL_LATENCY, help=_LATENCY)
    step_time: str | None = option(
        None, help="Virtual time of a step, as in 80ms.", unset="measured on this machine"
    )


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Options of ``simulate`` alone."""

    bandwidth: str = option("1Gbit/s", help="Bandwidth of each link, as in 5Gbit/s.")
    timeline: Path | None = option(
        None, help="Draw the computing and waiting of each worker, as PNG."
    )
    as_json: Path | None = option(None, "--json", help="Write totals and timeline as JSON.")


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of ``compare`` alone."""

    strategy: list[str] = option(
        dataclasses.MISSING,
        "--strategy",
        "-s",
        help="A strategy, perhaps with options for it alone; repeat for more.",
    )
    seeds: int = option(1, help="Number of seeds.")
    bandwidth: str | None = option(None, help=SHAPED_LINKS)
    output: Path | None = option(
        None,
        "--output",
        "-o",
        help="Directory of results, table, plot and report.",
        unset="runs/RECIPE-TIME",
    )
    simulated: bool = option(False, "--simulate", help="Use simulated workers, in virtual time.")
    slow: str | None = option(
        None, help="Slower workers, RANK=FACTOR, as in 0=2; rank 0 has the clock."
    )
    lr_scale: str = option(
        "1",
        help="Factor on the recipe's learning rate. With several, as in 0.3,1,3, the best of each "
        "strategy is shown.",
    )
    turns: bool = option(
        False,
        "--turns",
        help="Calibrate: workers train alone for a second at each evaluation, and all seconds are "
        "converted to one machine speed. For machines with other load.",
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions(NodeOptions):
    """Options of ``plan``."""

    bandwidth: str | None = option(None, help="Bandwidth of each worker's link, as in 5Gbit/s.")
    parameters: str | None = option(None, help="Number of the model's parameters, as in 25M.")
    step_time: str | None = option(None, help="Step time without communication, as in 120ms.")
    workers: int | None = option(
        None, "--workers", "-n", help="Number of workers.", unset=str(USUAL_WORKERS)
    )
    latency: str | None = option(None, help=_LATENCY, unset=USUAL_LATENCY)
    lssr: float = option(0.9, help="Share of local steps, for SelSync.")
    wire: Precision | None = option(
        None,
        help="Precision of models and gradients on the network.",
        unset="float32; chosen at run time by streaming",
    )
    strategies: list[str] | None = option(
        None, "--strategy", "-s", help="Forecast these instead of the usual; repeat it."
    )
    model: str | None = option(
        None, help="Measure parameters and step time of this recipe, or file."
    )
    data: Path | None = option(None, help="Directory of the recipe's data.")
    probe: bool = option(False, "--probe", help="Measure the network; start it with torchrun.")
    as_json: bool = option(False, "--json", help="Print JSON instead of a table.")


def with_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Expand the parameters of a command that are dataclasses into one option per field.

    A later parameter with the name of an earlier field replaces its option, at the same place in
    the help. The field then has its default.

    Args:
        without: Fields that this command does not offer.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, Any] = {}
        owners: dict[str, str] = {}  # name of an option -> parameter of `function`
        shown: dict[str, inspect.Parameter] = {}
        for parameter in inspect.signature(function).parameters.values():
            expanded: list[inspect.Parameter] = [parameter]
            if dataclasses.is_dataclass(parameter.annotation):
                groups[parameter.name] = parameter.annotation
                expanded = [*_options_of(parameter.annotation)]
            for one in expanded:
                if one.name not in without:
                    shown[one.name] = one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                    owners[one.name] = parameter.name

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

        # Typer reads these two.
        command.__signature__ = inspect.Signature([*shown.values()])  # type: ignore[attr-defined]
        command.__annotations__ = {name: one.annotation for name, one in shown.items()}
        return command

    return decorate


def _options_of(kind: Any) -> Iterator[inspect.Parameter]:
    """Yield a parameter, in the form that typer reads, for each field that has an option."""
    for field in dataclasses.fields(kind):
        declared = option_of(field)
        if declared is None:
            continue
        required = field.default is MISSING
        if required and not declared.flags:
            shown = typer.Argument(help=declared.help)
        else:
            shown = typer.Option(
                *declared.flags, help=declared.help, show_default=declared.unset or True
            )
        annotation = Path | None if declared.is_path else types_of(kind)[field.name]
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if required else field.default,
            annotation=Annotated[annotation, shown],
        )
