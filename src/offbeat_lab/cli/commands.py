"""Declarations of the laboratory's commands: their options and help texts.

This module does not import torch, so help and shell completion are fast.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from offbeat.extend import STRATEGIES, Precision, implemented_in
from offbeat_lab.job import USUAL_LATENCY, Job


class Panel(StrEnum):
    """Titles of the groups of options in the help of ``compare``, in their order."""

    TRAINED = "What is trained"
    STRATEGIES = "Strategies and their settings"
    WORKERS = "Workers and network"
    LIMITS = "Time limits"
    OUTPUT = "Output"


def _option(panel: Panel, help: str, *flags: str, unset: str = "", **settings: Any) -> Any:
    """Return an option of ``compare``. ``unset`` is shown in place of a default that is None."""
    shown = unset or True
    return typer.Option(*flags, help=help, rich_help_panel=panel, show_default=shown, **settings)


def _completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return the function that completes one of ``names`` in a shell."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def _recipes() -> Iterable[str]:
    from offbeat_lab.recipes import RECIPES

    return RECIPES


@implemented_in("offbeat_lab.cli.runs")
def compare(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A name in `offbeat recipes`, or path/to/file.py.",
            autocompletion=_completing(_recipes),
        ),
    ],
    *,
    seeds: Annotated[int, _option(Panel.TRAINED, "Number of seeds.")] = 1,
    epochs: Annotated[
        float | None,
        _option(
            Panel.TRAINED, "Passes over the data, by all workers together.", unset="the recipe's"
        ),
    ] = None,
    seed: Annotated[int, _option(Panel.TRAINED, "Seed of all random choices.")] = Job.seed,
    data: Annotated[
        Path | None, _option(Panel.TRAINED, "Data directory, if the recipe needs one.")
    ] = None,
    partition: Annotated[
        str | None,
        _option(
            Panel.TRAINED,
            "label:K (K labels per worker), dirichlet:A, or leased (faster workers take more).",
            metavar="KIND",
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        _option(
            Panel.STRATEGIES,
            "As in `offbeat strategies`, with options of its own if needed; repeatable.",
            "--strategy",
            "-s",
            metavar="METHOD",
            autocompletion=_completing(lambda: STRATEGIES),
            unset=Job.strategy,
        ),
    ] = None,
    tune: Annotated[
        int | None,
        _option(
            Panel.STRATEGIES,
            "Tune each method first, in at most N trials on another seed.",
            metavar="N",
        ),
    ] = None,
    lr_scale: Annotated[
        float, _option(Panel.STRATEGIES, "Factor on the recipe's learning rate.", metavar="FACTOR")
    ] = Job.lr_scale,
    sampler: Annotated[
        str,
        _option(
            Panel.STRATEGIES,
            "Data of a worker: seldp (all), defdp (1/N), distributed (1/N, new each epoch).",
            metavar="NAME",
        ),
    ] = Job.sampler,
    injection: Annotated[
        str | None,
        _option(
            Panel.STRATEGIES,
            "In a step, a share A of the workers sends a share B of its batch.",
            metavar="A,B",
        ),
    ] = None,
    wire: Annotated[
        Precision | None,
        _option(
            Panel.STRATEGIES,
            "Precision of what is sent: float32, int8, int4, int2.",
            metavar="NAME",
            unset="float32; int2 for streaming",
        ),
    ] = None,
    adam_correction: Annotated[
        Literal["on", "off"] | None,
        _option(
            Panel.STRATEGIES, "Lengthen local steps of Adam.", unset="on if models are averaged"
        ),
    ] = None,
    simulated: Annotated[
        bool, _option(Panel.WORKERS, "Use simulated workers, in virtual time.", "--simulate")
    ] = False,
    bandwidth: Annotated[
        str | None,
        _option(
            Panel.WORKERS,
            "Limit of each link, as in 200Mbit/s; real workers need Linux, root, iproute2.",
            unset="none; 1Gbit/s if simulated",
        ),
    ] = None,
    latency: Annotated[
        str | None,
        _option(Panel.WORKERS, "Latency of a simulated message, as in 50us.", unset=USUAL_LATENCY),
    ] = None,
    step_time: Annotated[
        str | None,
        _option(
            Panel.WORKERS,
            "Compute time of a step, as in 80ms; real workers sleep up to it.",
            unset="as measured",
        ),
    ] = None,
    scenario: Annotated[
        Path | None,
        _option(
            Panel.WORKERS,
            "TOML file of deaths, joins, speeds and bandwidths during the run.",
            metavar="FILE",
        ),
    ] = None,
    workers: Annotated[
        int, _option(Panel.WORKERS, "Number of workers.", "--workers", "-n")
    ] = Job.workers,
    jitter: Annotated[
        float, _option(Panel.WORKERS, "Relative standard deviation of the step time.")
    ] = Job.jitter,
    slow: Annotated[
        str | None, _option(Panel.WORKERS, "Slow workers down, as in 0=2.", metavar="RANK=X")
    ] = None,
    workers_per_node: Annotated[
        int, _option(Panel.WORKERS, "Workers per simulated node, which share its link.")
    ] = Job.workers_per_node,
    max_steps: Annotated[
        int | None, _option(Panel.LIMITS, "Stop after this many steps of each worker.")
    ] = None,
    max_seconds: Annotated[
        float | None, _option(Panel.LIMITS, "Stop after this training time.")
    ] = None,
    timeout_seconds: Annotated[
        float, _option(Panel.LIMITS, "Seconds for an operation between workers.", "--timeout")
    ] = Job.timeout_seconds,
    output: Annotated[
        Path | None,
        _option(
            Panel.OUTPUT,
            "Directory of results and report.",
            "--output",
            "-o",
            unset="runs/RECIPE-TIME; none for a single run",
        ),
    ] = None,
    evaluations: Annotated[
        int | None,
        _option(
            Panel.OUTPUT,
            "Number of evaluations, evenly spaced.",
            unset="24, or fewer of a large model",
        ),
    ] = None,
    # Not --log, because torchrun has options that begin with it.
    log: Annotated[
        Path | None,
        _option(
            Panel.OUTPUT,
            "JSON lines of every step of a single run, one file per worker.",
            "--records",
        ),
    ] = None,
) -> None:
    """Train a recipe under one strategy, or under several, one after the other.

    Workers are local processes, those of torchrun, or simulated in virtual
    time. Several runs have the same seeds; they give a table, plot and report.
    The reference ideal is bsp on an infinitely fast network. To continue an
    interrupted comparison, repeat its command, with the same --output.

    [bold]Examples[/bold]

    offbeat compare digits --workers 4
    offbeat compare digits -s bsp -s local:period=8 -s streaming --workers 4
    offbeat compare digits -s bsp -s async --bandwidth 100Mbit/s --seeds 3
    offbeat compare mnist:cnn --data ~/mnist -s diloco --records run.jsonl
    offbeat compare digits -s bsp -s diloco --simulate -n 16 --step-time 80ms
    offbeat compare digits --simulate -n 16 --workers-per-node 8 -o runs/nodes
    offbeat compare digits -s bsp -s diloco --tune 6 --simulate --step-time 20ms
    offbeat compare digits -s bsp -s 'local:period=8 --wire int8 --lr-scale 2'
    offbeat compare digits -s ideal -s bsp -s torch:ddp -s torch:ddp,hook=bf16
    offbeat compare path/to/file.py -s bsp -s local:period=8 --step-time 50ms
    torchrun --nproc-per-node 4 -m offbeat.cli compare digits -s bsp -s diloco
    """


@implemented_in("offbeat_lab.cli.lists")
def report(
    results: Annotated[Path, typer.Argument(help="A results.jsonl, as compare writes it.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The page to write.",
            show_default="report.html in the same directory",
        ),
    ] = None,
) -> None:
    """Write the page of a comparison: one self-contained HTML file.

    [bold]Examples[/bold]

    offbeat report runs/digits/results.jsonl
    offbeat report runs/digits/results.jsonl -o page.html
    """


@implemented_in("offbeat_lab.cli.lists")
def recipes() -> None:
    """List the recipes, and the references to compare strategies with.

    [bold]Example[/bold]

    offbeat recipes
    """


COMMANDS = (compare, report, recipes)
