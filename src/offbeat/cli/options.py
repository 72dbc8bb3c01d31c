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
from offbeat_lab.job import Job
from offbeat_lab.options import Panel, option, option_of

USUAL_LATENCY = "100us"
USUAL_WORKERS = 4
NODE_BANDWIDTH, NODE_LATENCY = "100Gbit/s", "10us"  # as in `offbeat.simulate.network`
SHAPED_LINKS = "Limit each link, as in 200Mbit/s (Linux, root, iproute2)."


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options of ``simulate``, ``compare`` and ``plan``: step times that vary, latency, and nodes.

    A *node* is a group of workers that average their gradients over a fast network in every step.
    """

    workers_per_node: int = option(
        Panel.WORKERS, "Workers per node, which share its link.", default=1
    )
    inside: str | None = option(Panel.WORKERS, "Bandwidth inside a node.", unset=NODE_BANDWIDTH)
    inside_latency: str | None = option(Panel.WORKERS, "Latency inside a node.", unset=NODE_LATENCY)
    latency: str | None = option(
        Panel.WORKERS, "Latency of a message, as in 50us.", unset=USUAL_LATENCY
    )
    jitter: float = option(
        Panel.WORKERS, "Relative standard deviation of the step time.", default=0.0
    )


@dataclass(frozen=True, kw_only=True)
class VirtualClusterOptions(NodeOptions):
    """Options of ``simulate`` and ``compare``: simulated workers."""

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


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options that only ``train`` has."""

    bandwidth: str | None = option(Panel.WORKERS, SHAPED_LINKS)


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Options that only ``simulate`` has."""

    bandwidth: str = option(
        Panel.WORKERS, "Bandwidth of each link, as in 5Gbit/s.", default="1Gbit/s"
    )
    timeline: Path | None = option(
        Panel.OUTPUT, "Image of the computing and waiting of each worker."
    )
    as_json: Path | None = option(Panel.OUTPUT, "JSON file for totals and timeline.", "--json")


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options that only ``compare`` has."""

    strategy: list[str] = option(
        Panel.STRATEGIES,
        "As in `offbeat strategies`, with options of its own if needed; repeatable.",
        "--strategy",
        "-s",
        default=dataclasses.MISSING,
        metavar="METHOD",
    )
    seeds: int = option(Panel.TRAINED, "Number of seeds.", default=1)
    tune: int | None = option(
        Panel.STRATEGIES,
        "Tune each method first, in at most N trials on another seed.",
        metavar="N",
    )
    bandwidth: str | None = option(Panel.WORKERS, SHAPED_LINKS)
    output: Path | None = option(
        Panel.OUTPUT, "Directory of results and report.", "--output", "-o", unset="runs/RECIPE-TIME"
    )
    simulated: bool = option(
        Panel.WORKERS, "Use simulated workers, in virtual time.", "--simulate", default=False
    )
    slow: str | None = option(Panel.WORKERS, "Slow workers down, as in 0=2.", metavar="RANK=X")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(NodeOptions):
    """Options of ``plan``."""

    bandwidth: str | None = option(Panel.WORKERS, "Bandwidth of each worker's link, as in 5Gbit/s.")
    parameters: str | None = option(Panel.TRAINED, "Number of parameters, as in 25M.")
    step_time: str | None = option(Panel.TRAINED, "Step time without communication, as in 120ms.")
    workers: int | None = option(
        Panel.WORKERS, "Number of workers.", "--workers", "-n", unset=str(USUAL_WORKERS)
    )
    wire: Precision | None = option(
        Panel.STRATEGIES,
        "Precision of what is sent: float32, bfloat16, int8, int4, int2, auto.",
        metavar="NAME",
        unset="float32; streaming chooses",
    )
    strategies: list[str] | None = option(
        Panel.STRATEGIES,
        "Strategy to forecast, instead of the default ones; repeatable.",
        "--strategy",
        "-s",
        metavar="METHOD",
    )
    model: str | None = option(
        Panel.TRAINED, "Recipe or file.py to measure parameters and step time of.", metavar="RECIPE"
    )
    data: Path | None = option(Panel.TRAINED, "Directory of the recipe's data.")
    probe: bool = option(
        Panel.WORKERS, "Measure the network, under torchrun.", "--probe", default=False
    )
    as_json: bool = option(Panel.OUTPUT, "Print JSON instead of a table.", "--json", default=False)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of ``run``."""

    workers: str = option(
        Panel.WORKERS,
        "Number of workers. 2:4 is 4, or at least 2 after 30 s.",
        "--workers",
        "-n",
        default=MISSING,
        metavar="N",
    )
    here: int | None = option(
        Panel.WORKERS, "Number of workers on this machine.", unset="all, without --store"
    )
    store: str | None = option(
        Panel.WORKERS,
        "Store of several machines: host:port of offbeat store, or file:///path.",
        metavar="ADDRESS",
        unset="on this machine alone",
    )
    module: bool = option(Panel.WORKERS, "SCRIPT is a module.", "--module", "-m", default=False)
    fresh: bool = option(
        Panel.WORKERS, "New interpreters instead of forks.", "--fresh", default=False
    )
    max_restarts: int = option(
        Panel.LIMITS, "Restarts of a worker; a minute of life forgets them.", default=3
    )
    grace: str = option(
        Panel.LIMITS, "Time of the workers to end after SIGTERM or Ctrl-C.", default="20s"
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
