"""Declarations of the commands: their options and help texts.

Each decorated function only declares a command. A function with the same name in another module
implements it, and is imported when the command runs. This module does not import torch, so help and
shell completion are fast.
"""

import importlib
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from offbeat.cli.options import (
    CompareOptions,
    PlanOptions,
    RunOptions,
    SimulateOptions,
    TrainOptions,
    VirtualClusterOptions,
    with_options,
)
from offbeat_lab.job import Job

_SAVING = ("checkpoints", "save_every", "resume")  # only `train` offers them

Options = ParamSpec("Options")


def implemented_in(
    module: str, *, loads_files: bool = True
) -> Callable[[Callable[Options, None]], Callable[Options, None]]:
    """Return a decorator that makes a command call its implementation.

    The implementation is the function with the same name in the module ``offbeat.cli.<module>``.
    ``loads_files`` is False for a command that imports no recipe or strategy of the user.
    """

    def decorate(function: Callable[Options, None]) -> Callable[Options, None]:
        @wraps(function)
        def command(*args: Options.args, **values: Options.kwargs) -> None:
            if loads_files:
                importlib.import_module("offbeat_lab.train").import_from_current_directory()
            implementation = importlib.import_module(f"offbeat.cli.{module}")
            getattr(implementation, function.__name__)(*args, **values)

        return command

    return decorate


@with_options()
@implemented_in("runs")
def train(job: Job, options: TrainOptions) -> None:
    """Train a recipe under one strategy on local worker processes, or on those of torchrun.

    [bold]Examples[/bold]

    offbeat train digits --strategy selsync:delta=0.3 --workers 4
    offbeat train mnist:cnn -s local:period=8 --data ~/mnist --records run.jsonl
    offbeat train digits -s diloco --checkpoints runs/digits --save-every 100
    offbeat train digits -s diloco --checkpoints runs/digits --resume
    torchrun --nproc-per-node 4 -m offbeat.cli train digits -s async:staleness=16
    """


@with_options("log", "timeout_seconds", *_SAVING)
@implemented_in("runs")
def simulate(job: Job, options: SimulateOptions, simulated: VirtualClusterOptions) -> None:
    """Train a recipe on simulated workers in this process: real training, virtual seconds.

    [bold]Examples[/bold]

    offbeat simulate digits -s bsp -n 16 --bandwidth 5gbit --latency 50us
    offbeat simulate digits -s local:period=8 -n 16 --step-time 80ms --jitter 0.2
    offbeat simulate digits -n 16 --workers-per-node 8 --inside 200gbit
    """


@with_options("log", *_SAVING)
@implemented_in("runs")
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


@implemented_in("lists")
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


@implemented_in("watch")
def watch(
    records: Annotated[
        Path,
        typer.Argument(
            help="What --records or attach(log=…) names, one of its files, or a directory of them."
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Show the state once, and exit.")] = False,
) -> None:
    """Show a training by its records: a row per worker, every second until it has finished.

    Speed, idle share and sent data are those of the last 30 s of training.

    [bold]Examples[/bold]

    offbeat watch runs/mnist.jsonl

    offbeat watch runs --once
    """


@with_options()
@implemented_in("network")
def plan(options: PlanOptions) -> None:
    """Predict the time of a step under each strategy, and recommend one to try first.

    The speed-up counts steps, not the time to a metric: a strategy may need
    more steps.

    [bold]Examples[/bold]

    offbeat plan --parameters 25M --step-time 120ms -n 16 --bandwidth 5gbit
    offbeat plan --model digits --bandwidth 100Mbit/s -s bsp -s diloco:period=50
    offbeat plan --model digits -n 32 --workers-per-node 8 --bandwidth 5gbit
    torchrun --nproc-per-node 2 -m offbeat.cli plan --model digits --probe
    """


@implemented_in("network")
def probe(
    seconds: Annotated[float, typer.Option(help="Target duration.")] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the network between the workers of torchrun, and warn of anomalies.

    [bold]Example[/bold]

    torchrun --nproc-per-node 2 -m offbeat.cli probe --seconds 5
    """


@with_options()
@implemented_in("elastic", loads_files=False)
def run(
    script: Annotated[str, typer.Argument(help="The script. Its own arguments follow it.")],
    arguments: Annotated[list[str] | None, typer.Argument(show_default=False)] = None,
    *,
    options: RunOptions,
) -> None:
    """Run a script on several workers, and restart a worker that fails while the others train.

    The script calls `offbeat.attach`. One written for torchrun runs unchanged.

    [bold]Examples[/bold]

    offbeat run --workers 4 train.py --lr 0.1
    offbeat run --workers 4 -m package.train
    offbeat run --workers 4 --here 2 --store 10.0.0.1:29500 train.py
    offbeat run --workers 2:4 --here 1 --store file:///shared/store train.py
    """


@implemented_in("elastic", loads_files=False)
def store(
    port: Annotated[int, typer.Option(help="Port; 0 chooses a free one.")] = 29500,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on.", metavar="ADDRESS", show_default="all interfaces"
        ),
    ] = None,
) -> None:
    """Keep a store for `offbeat run --store` until SIGTERM or Ctrl-C.

    It outlives all workers. It has no password.

    [bold]Examples[/bold]

    offbeat store --port 29500

    offbeat store --port 29500 --host 10.0.0.1
    """


@implemented_in("lists")
def recipes() -> None:
    """List the recipes.

    [bold]Example[/bold]

    offbeat recipes
    """


@implemented_in("lists")
def strategies() -> None:
    """List the strategies and their settings, and the baselines to compare them with.

    [bold]Example[/bold]

    offbeat strategies
    """


COMMANDS = (
    *(train, simulate, compare, report, watch),
    *(run, store),
    *(plan, probe, recipes, strategies),
)
