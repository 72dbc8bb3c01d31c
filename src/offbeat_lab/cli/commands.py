"""Declarations of the laboratory's commands: their options and help texts.

This module does not import torch, so help and shell completion are fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.extend import implemented_in
from offbeat_lab.cli.options import CompareOptions, with_options
from offbeat_lab.job import Job


@with_options
@implemented_in("offbeat_lab.cli.runs")
def compare(options: CompareOptions, job: Job) -> None:
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
