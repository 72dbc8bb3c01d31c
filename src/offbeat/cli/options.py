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
from offbeat.lab.job import Job
from offbeat.lab.options import Panel, option, option_of

USUAL_LATENCY = "100us"
USUAL_WORKERS = 4
NODE_BANDWIDTH, NODE_LATENCY = "100Gbit/s", "10us"  # as in `offbeat.transport.costs`
SHAPED_LINKS = "Limit each link, as in 200Mbit/s (Linux, root, iproute2)."


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options of ``simulate``, ``compare`` and ``plan``: step times that vary, latency, and nodes.

    A *node* is a group of workers that average their gradients over a fast network in every step.
    """

    workers_per_node: int = option(
        1, help="Workers per node, which share its link.", panel=Panel.WORKERS
    )
    inside: str | None = option(
        None,
        help="Bandwidth inside a node.",
        panel=Panel.WORKERS,
        unset=NODE_BANDWIDTH,
    )
    inside_latency: str | None = option(
        None, help="Latency inside a node.", panel=Panel.WORKERS, unset=NODE_LATENCY
    )
    latency: str | None = option(
        None, help="Latency of a message, as in 50us.", panel=Panel.WORKERS, unset=USUAL_LATENCY
    )
    jitter: float = option(
        0.0, help="Relative standard deviation of the step time.", panel=Panel.WORKERS
    )


@dataclass(frozen=True, kw_only=True)
class VirtualClusterOptions(NodeOptions):
    """Options of ``simulate`` and ``compare``: simulated workers."""

    step_time: str | None = option(
        None,
        help="Compute time of a step, as in 80ms; real workers sleep up to it.",
        panel=Panel.WORKERS,
        unset="as measured",
    )
    scenario: Path | None = option(
        None,
        help="TOML file of deaths, joins, speeds and bandwidths during the run.",
        panel=Panel.WORKERS,
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Options that only ``simulate`` has."""

    bandwidth: str = option(
        "1Gbit/s", help="Bandwidth of each link, as in 5Gbit/s.", panel=Panel.WORKERS
    )
    timeline: Path | None = option(
        None, help="Image of the computing and waiting of each worker.", panel=Panel.OUTPUT
    )
    as_json: Path | None = option(
        None, "--json", help="JSON file for totals and timeline.", panel=Panel.OUTPUT
    )


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options that only ``compare`` has."""

    strategy: list[str] = option(
        dataclasses.MISSING,
        "--strategy",
        "-s",
        help="As in `offbeat strategies`, with options of its own if needed; repeatable.",
        panel=Panel.STRATEGIES,
        metavar="METHOD",
    )
    seeds: int = option(1, help="Number of seeds.", panel=Panel.TRAINED)
    tune: int | None = option(
        None,
        help="Tune each method first, in at most N trials on another seed.",
        panel=Panel.STRATEGIES,
        metavar="N",
    )
    bandwidth: str | None = option(None, help=SHAPED_LINKS, panel=Panel.WORKERS)
    output: Path | None = option(
        None,
        "--output",
        "-o",
        help="Directory of results and report.",
        panel=Panel.OUTPUT,
        unset="runs/RECIPE-TIME",
    )
    simulated: bool = option(
        False, "--simulate", help="Use simulated workers, in virtual time.", panel=Panel.WORKERS
    )
    slow: str | None = option(
        None,
        help="Slow workers down, as in 0=2.",
        panel=Panel.WORKERS,
        metavar="RANK=X",
    )


@dataclass(frozen=True, kw_only=True)
class PlanOptions(NodeOptions):
    """Options of ``plan``."""

    bandwidth: str | None = option(
        None, help="Bandwidth of each worker's link, as in 5Gbit/s.", panel=Panel.WORKERS
    )
    parameters: str | None = option(
        None, help="Number of parameters, as in 25M.", panel=Panel.TRAINED
    )
    step_time: str | None = option(
        None, help="Step time without communication, as in 120ms.", panel=Panel.TRAINED
    )
    workers: int | None = option(
        None,
        "--workers",
        "-n",
        help="Number of workers.",
        panel=Panel.WORKERS,
        unset=str(USUAL_WORKERS),
    )
    wire: Precision | None = option(
        None,
        help="Precision of what is sent: float32, bfloat16, int8, int4, int2, auto.",
        panel=Panel.STRATEGIES,
        metavar="NAME",
        unset="float32; streaming chooses",
    )
    strategies: list[str] | None = option(
        None,
        "--strategy",
        "-s",
        help="Strategy to forecast, instead of the default ones; repeatable.",
        panel=Panel.STRATEGIES,
        metavar="METHOD",
    )
    model: str | None = option(
        None,
        help="Recipe or file.py to measure parameters and step time of.",
        panel=Panel.TRAINED,
        metavar="RECIPE",
    )
    data: Path | None = option(None, help="Directory of the recipe's data.", panel=Panel.TRAINED)
    probe: bool = option(
        False, "--probe", help="Measure the network, under torchrun.", panel=Panel.WORKERS
    )
    as_json: bool = option(
        False, "--json", help="Print JSON instead of a table.", panel=Panel.OUTPUT
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of ``run``."""

    workers: str | None = option(
        None,
        "--workers",
        "-n",
        help="Number of workers. 2:4 is 4, or at least 2 after 30 s.",
        panel=Panel.WORKERS,
        metavar="N",
        unset="as in the joined store",
    )
    here: int | None = option(
        None,
        help="Number of workers on this machine.",
        panel=Panel.WORKERS,
        unset="all, or 1 with --join",
    )
    store: str | None = option(
        None,
        help="Store for several machines: host:port of this one, or file:///path.",
        panel=Panel.WORKERS,
        metavar="ADDRESS",
        unset="on this machine alone",
    )
    join: str | None = option(
        None, help="Store that another machine keeps.", panel=Panel.WORKERS, metavar="ADDRESS"
    )
    module: bool = option(False, "--module", "-m", help="SCRIPT is a module.", panel=Panel.WORKERS)
    fresh: bool = option(
        False, "--fresh", help="New interpreters instead of forks.", panel=Panel.WORKERS
    )
    max_restarts: int = option(
        3, help="Restarts of a worker; a minute of life forgets them.", panel=Panel.LIMITS
    )
    grace: str = option(
        "20s", help="Time of the workers to end after SIGTERM or Ctrl-C.", panel=Panel.LIMITS
    )


_SEVERAL = {
    "strategy": "; `offbeat compare` runs several strategies",
    "slow": "; separate several workers by commas, as in 0=2,1=3",
}
"""What to do instead of repeating an option, by the name of its field."""


class Command(typer.core.TyperCommand):
    """A command that refuses an option given twice. Typer would ignore all values but the last.

    Its help lists ``--help`` in the last panel, not in one of its own before the others.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raise ValueError if an option with a single value is repeated."""
        if not ctx.resilient_parsing:  # not while a shell completes the line
            _, _, given = self.make_parser(ctx).parse_args(args=[*args])
            for parameter in given:
                if given.count(parameter) > 1 and not parameter.multiple:
                    several = _SEVERAL.get(parameter.name or "", "")
                    raise ValueError(f"{parameter.opts[0]} is given twice: give it once{several}")
        return super().parse_args(ctx, args)

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option ``--help``."""
        shown: Any = super().get_help_option(ctx)
        panels = [getattr(parameter, "rich_help_panel", None) for parameter in self.params]
        if shown is not None:
            shown.rich_help_panel = next(filter(None, reversed(panels)), None)
        return shown


def with_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces dataclass parameters of a command by one option per field.

    Only fields declared with ``option`` become options. The command receives dataclass objects with
    the values of the options. If two dataclasses have a field of the same name, there is one option
    for the last of them. Example: ``-s`` of ``compare`` sets ``CompareOptions.strategy``, and
    ``Job.strategy`` keeps its default. The options are in the order of their panels.

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

        ordered = sorted(shown.values(), key=_panel_number)

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
        command.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in ordered}
        return command

    return decorate


def _panel_number(parameter: inspect.Parameter) -> int:
    """Return the position of a parameter's panel in the help; parameters without one are last."""
    shown = getattr(parameter.annotation, "__metadata__", (None,))[0]
    panel = getattr(shown, "rich_help_panel", None)
    return [*Panel].index(panel) if panel in [*Panel] else len(Panel)


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
                *declared.flags,
                help=declared.help,
                metavar=declared.metavar or None,
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
