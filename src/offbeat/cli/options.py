"""Options of the commands, declared as dataclasses.

A command is declared as a function such as ``f(job: Job, options: CompareOptions)``. The decorator
``with_options`` turns the fields of the two dataclasses into options of the command line.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from offbeat.arguments import Precision, types_of
from offbeat.lab.job import Job, option, option_of

USUAL_LATENCY = "100us"
USUAL_WORKERS = 4
NODE_BANDWIDTH, NODE_LATENCY = "100Gbit/s", "10us"  # as in `offbeat.transport.costs`
SHAPED_LINKS = "Shape each worker's link, as in 200Mbit/s (Linux, root, iproute2)."


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options of ``simulate``, ``compare`` and ``plan``: step times that vary, latency, and nodes.

    A *node* is a group of workers that average their gradients over a fast network in every step.
    """

    jitter: float = option(
        0.0,
        help="Standard deviation of the step time, relative to its mean.",
    )
    workers_per_node: int = option(
        1, help="Workers per node, which share its link and train as one."
    )
    inside: str | None = option(
        None,
        help="Bandwidth of each worker's link inside its node, as in 200Gbit/s.",
        unset=NODE_BANDWIDTH,
    )
    inside_latency: str | None = option(
        None, help="Latency of one message inside a node.", unset=NODE_LATENCY
    )
    latency: str | None = option(
        None, help="Latency of one message, as in 50us.", unset=USUAL_LATENCY
    )


@dataclass(frozen=True, kw_only=True)
class VirtualClusterOptions(NodeOptions):
    """Options of ``simulate`` and ``compare``: simulated workers."""

    step_time: str | None = option(
        None,
        help="Time to compute a step, as in 80ms: virtual time, or real workers sleep up to it.",
        unset="virtual: measured on this machine, real: as it is",
    )


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Options that only ``simulate`` has."""

    bandwidth: str = option("1Gbit/s", help="Bandwidth of each link, as in 5Gbit/s.")
    timeline: Path | None = option(
        None, help="Image file for a plot of the computing and waiting of each worker."
    )
    as_json: Path | None = option(None, "--json", help="JSON file for totals and timeline.")


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options that only ``compare`` has."""

    strategy: list[str] = option(
        dataclasses.MISSING,
        "--strategy",
        "-s",
        help="A strategy or baseline, optionally with options for it alone. Can be repeated.",
    )
    seeds: int = option(1, help="Number of seeds.")
    tune: int | None = option(
        None,
        help="Tune each method first, with so many trials on a seed of their own. A trial is "
        "better if it sooner reaches the final metric of the ideal's best trial, less 2 % of that "
        "trial's range; the ideal's trials are ranked by their final metric.",
        unset="no tuning",
    )
    bandwidth: str | None = option(None, help=SHAPED_LINKS)
    output: Path | None = option(
        None,
        "--output",
        "-o",
        help="Directory of results, table, plot and report.",
        unset="runs/RECIPE-TIME",
    )
    simulated: bool = option(False, "--simulate", help="Use simulated workers, in virtual time.")
    slow: str | None = option(None, help="Slow workers down: RANK=FACTOR, as in 0=2.")
    lr_scale: str = option(
        "1",
        help="Factor on the recipe's learning rate. With several, as in 0.3,1,3, the best one for "
        "each strategy is shown.",
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions(NodeOptions):
    """Options of ``plan``."""

    bandwidth: str | None = option(None, help="Bandwidth of each worker's link, as in 5Gbit/s.")
    parameters: str | None = option(None, help="Number of parameters of the model, as in 25M.")
    step_time: str | None = option(None, help="Step time without communication, as in 120ms.")
    workers: int | None = option(
        None, "--workers", "-n", help="Number of workers.", unset=str(USUAL_WORKERS)
    )
    lssr: float = option(0.9, help="Share of steps without synchronization, for SelSync.")
    wire: Precision | None = option(
        None,
        help="Precision of models and gradients on the network.",
        unset="float32; chosen at run time by streaming",
    )
    strategies: list[str] | None = option(
        None,
        "--strategy",
        "-s",
        help="A strategy to forecast, instead of the default ones. Can be repeated.",
    )
    model: str | None = option(
        None, help="Recipe or file whose parameters and step time are measured."
    )
    data: Path | None = option(None, help="Directory of the recipe's data.")
    probe: bool = option(False, "--probe", help="Measure the network; start it with torchrun.")
    as_json: bool = option(False, "--json", help="Print JSON instead of a table.")


_SEVERAL = {
    "strategy": "; `offbeat compare` runs several strategies",
    "lr_scale": "; separate several factors by commas, as in 0.3,1,3",
    "slow": "; separate several workers by commas, as in 0=2,1=3",
}
"""What to do instead of repeating an option, by the name of its field."""


class OnceEach(typer.core.TyperCommand):
    """A command that refuses an option given twice. Typer would ignore all values but the last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raise ValueError if an option with a single value is repeated."""
        if not ctx.resilient_parsing:  # not while a shell completes the line
            _, _, given = self.make_parser(ctx).parse_args(args=[*args])
            for parameter in given:
                if given.count(parameter) > 1 and not parameter.multiple:
                    several = _SEVERAL.get(parameter.name or "", "")
                    raise ValueError(f"{parameter.opts[0]} is given twice: give it once{several}")
        return super().parse_args(ctx, args)


def with_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces dataclass parameters of a command by one option per field.

    Only fields declared with ``option`` become options. The command receives dataclass objects with
    the values of the options. If two dataclasses have a field of the same name, there is one option
    for the last of them. Example: ``-s`` of ``compare`` sets ``CompareOptions.strategy``, and
    ``Job.strategy`` keeps its default.

    Args:
        without: Names of fields that this command does not offer. They keep their default values.
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
            for field in expanded:
                if field.name not in without:
                    shown[field.name] = field.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                    owners[field.name] = parameter.name

        @wraps(function)
        def command(**values: Any) -> None:
            fields: dict[str, dict[str, Any]] = {name: {} for name in groups}
            arguments: dict[str, Any] = {}
            for name, value in values.items():
                owner = owners[name]
                if isinstance(value, Path) and issubclass(groups.get(owner, object), Job):
                    value = str(value)  # jobs are stored as JSON, which has no paths
                fields.get(owner, arguments)[name] = value
            for name, kind in groups.items():
                arguments[name] = kind(**fields[name])
            function(**arguments)

        # Typer reads these two attributes.
        command.__signature__ = inspect.Signature([*shown.values()])  # type: ignore[attr-defined]
        command.__annotations__ = {name: field.annotation for name, field in shown.items()}
        return command

    return decorate


def _options_of(kind: Any) -> Iterator[inspect.Parameter]:
    """Yield a parameter for typer from each field declared with ``option``."""
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
