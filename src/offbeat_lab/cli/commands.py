"""Declarations of the laboratory's commands: their options and help texts.

This module does not import torch, so help and shell completion are fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.extend import implemented_in
from offbeat_lab.cli.options import (
    CompareOptions,
    SimulateOptions,
    TrainOptions,
    VirtualClusterOptions,
    with_options,
)
from offbeat_lab.job import Job

_SAVING = ("checkpoints", "save_every", "resume")  # only `train` offers them


@with_options()
@implemented_in("offbeat_lab.cli.runs")
def train(job: Job, options: TrainOptions) -> None:
    """Train a recipe under one strategy on local worker processes, or on those of torchrun.

    [bold]Examples[/bold]

    offbeat train digits --strategy selsync:delta=0.3 --workers 4
    offbeat train mnist:cnn -s local:period=8 --data ~/mnist --records run.jsonl
    offbeat train digits -s diloco --checkpoints runs/digits --save-every 100
    offbeat train digits -s diloco --checkpoints runs/digits --resume
    offbeat train digits --workers 4 -s streaming --elastic
    torchrun --nproc-per-node 4 -m offbeat.cli train digits -s async:staleness=16
    """


@with_options("log", "timeout_seconds", *_SAVING)
@implemented_in("offbeat_lab.cli.runs")
def simulate(job: Job, options: SimulateOptions, simulated: VirtualClusterOptions) -> None:
    """Train a recipe on simulated workers in this process: real training, virtual seconds.

    [bold]Examples[/bold]

    offbeat simulate digits -s bsp -n 16 --bandwidth 5gbit --latency 50us
    offbeat simulate digits -s local:period=8 -n 16 --step-time 80ms --jitter 0.2
    offbeat simulate digits -n 16 --workers-per-node 8 --inside 200gbit
    """


@with_options("log", *_SAVING)
@implemented_in("offbeat_lab.cli.runs")
def compare(job: Job, options: CompareOptions, simulated: VirtualClusterOptions) -> None:
    """Run strategies one after the other under the same seeds; write table, plot and report.

    The baseline ideal is bsp on an infinitely fast network. To continue an
    interrupted comparison, repeat its command, with the same --output.

    [bold]Examples[/bold]

    offbeat compare digits -s bsp -s local:period=8 -s selsync --workers 4
    offbeat compare digits -s bsp -s async --bandwidth 100Mbit/s --seeds 3
    offbeat compare digits -s bsp -s diloco --simulate -n 16 --step-time 80ms
    offbeat compare digits -s bsp -s diloco --tune 6 --simulate --step-time 20ms
    offbeat compare digits -s bsp -s 'local:period=8 --wire int8 --lr-scale 2'
    offbeat compare digits -s ideal -s bsp -s torch:ddp,hook=powersgd,rank=2
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
    """List the recipes, and the baselines to compare strategies with.

    [bold]Example[/bold]

    offbeat recipes
    """


COMMANDS = (train, simulate, compare, report, recipes)
