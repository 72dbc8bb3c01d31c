"""The commands as they are typed: names, options and help.

What carries them out has the same name in another module, which is imported when a command is run.
Nothing here imports torch, so that help and shell completion come at once.
"""

import importlib
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from offbeat.arguments import Precision
from offbeat.cli.options import (
    USUAL_LATENCY,
    USUAL_WORKERS,
    Bandwidth,
    Inside,
    InsideLatency,
    Jitter,
    Latency,
    LatencyUnlessProbed,
    StepTime,
    WorkersPerNode,
    with_job,
)
from offbeat.lab.job import Job

_SAVING = ("checkpoints", "save_every", "resume")  # what only ``train`` offers

Options = ParamSpec("Options")


def carried_out_in(module: str) -> Callable[[Callable[Options, None]], Callable[Options, None]]:
    """The command is what the function of its name in ``offbeat.cli.MODULE`` does."""

    def decorate(function: Callable[Options, None]) -> Callable[Options, None]:
        @wraps(function)
        def command(*args: Options.args, **values: Options.kwargs) -> None:
            importlib.import_module("offbeat.lab.train").find_own_modules()
            home = importlib.import_module(f"offbeat.cli.{module}")
            getattr(home, function.__name__)(*args, **values)

        return command

    return decorate


@with_job()
@carried_out_in("runs")
def train(
    job: Job,
    bandwidth: Bandwidth = None,
) -> None:
    """Train a recipe under one strategy on local worker processes, or on those of torchrun or srun.

    Instead of a strategy also under a baseline; `offbeat strategies` lists both.

    [bold]Examples[/bold]

    offbeat train digits --strategy selsync:delta=0.3 --workers 4

    offbeat train mnist:cnn -s local:period=8 --data ~/mnist --records runs/mnist.jsonl

    offbeat train digits -s diloco --checkpoints runs/digits --save-every 100

    offbeat train digits -s diloco --checkpoints runs/digits --save-every 100 --resume

    torchrun --nproc-per-node 4 -m offbeat.cli train digits -s async:staleness=16

    srun --ntasks 4 offbeat train digits -s async:staleness=16
    """


@with_job("log", "timeout_seconds", *_SAVING)
@carried_out_in("runs")
def simulate(
    job: Job,
    bandwidth: Annotated[str, typer.Option(help="Of each link, as in 5Gbit/s.")] = "1Gbit/s",
    latency: Latency = USUAL_LATENCY,
    step_time: StepTime = None,
    jitter: Jitter = 0.0,
    workers_per_node: WorkersPerNode = 1,
    inside: Inside = None,
    inside_latency: InsideLatency = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw who computed and waited when, as PNG.")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write totals and timeline as JSON.")
    ] = None,
) -> None:
    """Train a recipe on simulated workers in this process: real training, virtual seconds.

    [bold]Examples[/bold]

    offbeat simulate digits -s bsp --workers 16 --bandwidth 5gbit --latency 50us --step-time 80ms

    offbeat simulate digits -s local:period=8 --workers 16 --workers-per-node 8 --step-time 80ms
    """


@with_job("log", *_SAVING)
@carried_out_in("runs")
def compare(
    job: Job,
    strategy: Annotated[
        list[str],
        typer.Option(
            "--strategy",
            "-s",
            help="A strategy, perhaps with options for it alone; repeat for more.",
        ),
    ],
    seeds: Annotated[int, typer.Option(help="Repeat everything with so many seeds.")] = 1,
    bandwidth: Bandwidth = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Directory of results, table, plot and report.",
            show_default="runs/RECIPE-TIME",
        ),
    ] = None,
    simulated: Annotated[
        bool, typer.Option("--simulate", help="On simulated workers, in virtual time.")
    ] = False,
    latency: Latency = USUAL_LATENCY,
    step_time: StepTime = None,
    jitter: Jitter = 0.0,
    workers_per_node: WorkersPerNode = 1,
    inside: Inside = None,
    inside_latency: InsideLatency = None,
    slow: Annotated[
        str | None,
        typer.Option(help="Slower workers, RANK=FACTOR, as in 0=2; the clock is that of rank 0."),
    ] = None,
    lr_scale: Annotated[
        str,
        typer.Option(
            help="Factor on the recipe's learning rate; of several, as in 0.3,1,3, the best of "
            "each strategy is shown."
        ),
    ] = "1",
    turns: Annotated[
        bool,
        typer.Option(
            "--turns",
            help="Let workers train alone for a second at each evaluation, and tell all seconds on "
            "one clock: for machines that others use, too.",
        ),
    ] = False,
) -> None:
    """Run strategies one after the other under the same seeds; write table, plot and report.

    Baselines, too: [bold]ideal[/bold] is what bsp would do on an infinitely fast network,
    [bold]torch:…[/bold] are torch's own methods, others have packages of their own; `offbeat
    strategies` lists them. The same command with the same --output goes on with what was cut short.

    [bold]Examples[/bold]

    offbeat compare digits -s bsp -s local:period=8 -s selsync:target_lssr=0.9 --workers 4

    offbeat compare digits -s bsp -s async:staleness=16 --bandwidth 100Mbit/s --seeds 3

    offbeat compare digits -s bsp -s local:period=8 --simulate --workers 16 --step-time 80ms

    offbeat compare digits -s bsp -s 'local:period=8 --wire int8 --lr-scale 2'

    offbeat compare digits -s ideal -s bsp -s torch:ddp -s torch:ddp,hook=powersgd,rank=2

    offbeat compare digits -s ideal -s bsp -s local:period=8 --lr-scale 0.3,1,3 --seeds 3

    offbeat compare digits -s ideal -s bsp -s local:period=8 --turns

    offbeat compare path/to/file.py -s bsp -s local:period=8

    torchrun --nproc-per-node 4 -m offbeat.cli compare digits -s bsp -s local:period=8
    """


@carried_out_in("reports")
def report(
    results: Annotated[Path, typer.Argument(help="A results.jsonl, as compare writes them.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The page to write.", show_default="report.html beside it"
        ),
    ] = None,
) -> None:
    """Make the page of a comparison from its results: one HTML file that needs no other.

    [bold]Examples[/bold]

    offbeat report runs/digits/results.jsonl

    offbeat report runs/digits/results.jsonl -o page.html
    """


@carried_out_in("network")
def plan(
    bandwidth: Annotated[
        str | None, typer.Option(help="Of each worker's link, as in 5Gbit/s.", show_default=False)
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Of the model, as in 25M.", show_default=False)
    ] = None,
    step_time: Annotated[
        str | None, typer.Option(help="A step computed alone, as in 120ms.", show_default=False)
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-n", help="How many.", show_default=str(USUAL_WORKERS)),
    ] = None,
    latency: LatencyUnlessProbed = None,
    jitter: Jitter = 0.0,
    workers_per_node: WorkersPerNode = 1,
    inside: Inside = None,
    inside_latency: InsideLatency = None,
    lssr: Annotated[float, typer.Option(help="Share of local steps asked of SelSync.")] = 0.9,
    wire: Annotated[
        Precision | None,
        typer.Option(
            help="How models and gradients travel.", show_default="float32; streaming chooses"
        ),
    ] = None,
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help="Forecast these instead of the usual; repeat it."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Measure parameters and step time of this recipe, or file, on one worker."
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Directory of the recipe's data.")] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure the network; start it with torchrun.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Predict the time of a step under each strategy, and say which to try first.

    [bold]Examples[/bold]

    offbeat plan --parameters 25M --step-time 120ms --workers 16 --bandwidth 5gbit

    offbeat plan --model digits --workers 4 --bandwidth 100Mbit/s -s bsp -s diloco:period=50

    offbeat plan --parameters 100M --step-time 200ms -n 32 --workers-per-node 8 --bandwidth 5gbit

    torchrun --nproc-per-node 2 -m offbeat.cli plan --model digits --probe
    """


@carried_out_in("network")
def probe(
    seconds: Annotated[float, typer.Option(help="Time to aim for.")] = 20.0,
    pairs: Annotated[bool, typer.Option("--pairs", help="Show every pair, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the network between the workers that torchrun started, and warn of what is odd.

    [bold]Example[/bold]

    torchrun --nproc-per-node 2 -m offbeat.cli probe --seconds 5
    """


@carried_out_in("lists")
def recipes() -> None:
    """List the recipes.

    [bold]Example[/bold]

    offbeat recipes
    """


@carried_out_in("lists")
def strategies() -> None:
    """List the strategies and their settings, and the baselines that they are compared with.

    [bold]Example[/bold]

    offbeat strategies
    """


COMMANDS = (train, simulate, compare, report, plan, probe, recipes, strategies)
