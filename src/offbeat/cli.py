"""The command line: ``offbeat train``, ``compare``, ``simulate`` and the rest."""

import contextlib
import dataclasses
import os
import sys
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

try:
    import typer
except ImportError:
    sys.stderr.write("the command line needs typer and rich: pip install 'offbeat[cli]'\n")
    raise SystemExit(2) from None

import torch.distributed as dist

import offbeat
from offbeat.cli_lists import recipes, strategies
from offbeat.cli_network import Jitter, Latency, measured_step, plan, probe
from offbeat.cli_options import (
    Bandwidth,
    Data,
    Epochs,
    Injection,
    LrScale,
    Partition,
    RecipeName,
    Sampler,
    Seed,
    StepTime,
    StrategyText,
    Timeout,
    Wire,
    Workers,
)
from offbeat.cli_view import Bar, console, line, show
from offbeat.errors import OffbeatError
from offbeat.lab import compare as comparison
from offbeat.lab import report
from offbeat.lab.cluster import Cluster
from offbeat.lab.recipes import find_recipe
from offbeat.lab.train import Event, Job, choose_backend, share_cores, train_worker
from offbeat.lab.virtual import VirtualCluster
from offbeat.simulate import Compute, Network
from offbeat.units import parse_bandwidth, show_bytes

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train PyTorch models data-parallel on slow networks without waiting for them.",
)
INTERRUPTED = "interrupted; all workers have been ended"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offbeat {offbeat.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@contextlib.contextmanager
def _link(bandwidth: str | None, workers: int) -> Iterator[Cluster | None]:
    if bandwidth is None:
        yield None
        return
    with Cluster(workers, parse_bandwidth(bandwidth)) as cluster:
        yield cluster


def _virtual(
    job: Job, bandwidth: str | None, latency: str, step_time: str | None, jitter: float
) -> VirtualCluster:
    network = Network(bandwidth or "1Gbit/s", latency=latency)
    compute = Compute("1s" if step_time is None else step_time, jitter=jitter)  # checked first
    if step_time is None:
        data = None if job.data is None else Path(job.data)
        return VirtualCluster(network, Compute(measured_step(job.recipe, data), jitter=jitter))
    return VirtualCluster(network, compute)


@app.command()
def train(
    recipe: RecipeName,
    strategy: StrategyText = "bsp",
    workers: Workers = 4,
    epochs: Epochs = None,
    seed: Seed = 0,
    data: Data = None,
    bandwidth: Bandwidth = None,
    records: Annotated[  # torchrun has options of its own that begin with --log
        Path | None, typer.Option(help="JSON lines of every step, one file a worker.")
    ] = None,
    timeout: Timeout = 120.0,
    lr_scale: LrScale = 1.0,
    partition: Partition = None,
    sampler: Sampler = "seldp",
    injection: Injection = None,
    wire: Wire = "float32",
) -> None:
    """Train a recipe under one strategy on local worker processes, or on those of torchrun.

    [bold]Examples[/bold]

    offbeat train digits --strategy selsync:delta=0.3 --workers 4

    offbeat train mnist:cnn -s local:period=8 --data ~/mnist --records runs/mnist.jsonl

    torchrun --nproc-per-node 4 -m offbeat.cli train digits -s async:staleness=16
    """
    job = Job(
        recipe,
        strategy,
        workers,
        epochs,
        seed,
        None if data is None else str(data),
        log=None if records is None else str(records),
        timeout_seconds=timeout,
        lr_scale=lr_scale,
        partition=partition,
        sampler=sampler,
        injection=injection,
        wire=wire,
    )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _join(dataclasses.replace(job, workers=int(os.environ["WORLD_SIZE"])), bandwidth)
        return
    job.check()
    with _link(bandwidth, workers) as cluster, Bar() as bar:
        bar.start(job)
        result = comparison.run_and_record(job, bar.event, cluster)
    show([result])


@app.command()
def simulate(
    recipe: RecipeName,
    strategy: StrategyText = "bsp",
    workers: Workers = 4,
    epochs: Epochs = None,
    seed: Seed = 0,
    data: Data = None,
    bandwidth: Annotated[str, typer.Option(help="Of each link, as in 5Gbit/s.")] = "1Gbit/s",
    latency: Latency = "100us",
    step_time: StepTime = None,
    jitter: Jitter = 0.0,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw who computed and waited when, as PNG.")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write totals and timeline as JSON.")
    ] = None,
    lr_scale: LrScale = 1.0,
    partition: Partition = None,
    sampler: Sampler = "seldp",
    injection: Injection = None,
    wire: Wire = "float32",
) -> None:
    """Train a recipe on simulated workers in this process: real training, virtual seconds.

    [bold]Example[/bold]

    offbeat simulate digits -s bsp --workers 16 --bandwidth 5gbit --latency 50us --step-time 80ms
    """
    job = Job(
        recipe,
        strategy,
        workers,
        epochs,
        seed,
        None if data is None else str(data),
        lr_scale=lr_scale,
        partition=partition,
        sampler=sampler,
        injection=injection,
        wire=wire,
    )
    job.check()
    place = _virtual(job, bandwidth, latency, step_time, jitter)
    with Bar() as bar:
        bar.start(job)
        result = comparison.run_and_record(job, bar.event, place)
    show([result])
    assert place.last is not None
    for path in (timeline, as_json):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
    if timeline is not None:
        place.last.plot(timeline)
        console.print(f"timeline {timeline}", highlight=False, soft_wrap=True)
    if as_json is not None:
        as_json.write_text(place.last.to_json(), encoding="utf-8")
        console.print(f"json     {as_json}", highlight=False, soft_wrap=True)


def _join(job: Job, bandwidth: str | None) -> None:
    """Train on the processes that torchrun has started; this is one of them."""
    if bandwidth is not None:
        raise ValueError("--bandwidth shapes the links of processes that offbeat starts itself")
    job.check()
    dist.init_process_group(choose_backend())
    if dist.get_rank() == 0:
        console.print(f"joined the {dist.get_world_size()} processes that torchrun has started")
    metric = find_recipe(job.recipe).metric

    def tell(event: Event) -> None:
        if event["event"] == "evaluation":
            console.print(line(event, f"{metric} {event['metric']:.4f}"), soft_wrap=True)
        elif event["event"] == "end":
            one = event["stats"][0]
            console.print(
                f"LSSR {one['lssr']:.2f}, {show_bytes(one['payload_bytes'])} sent, "
                f"idle {100 * one['idle']:.0f} %"
            )

    try:
        share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", job.workers)))
        train_worker(job, tell)
    finally:
        dist.destroy_process_group()


@app.command()
def compare(
    recipe: RecipeName,
    strategy: Annotated[
        list[str], typer.Option("--strategy", "-s", help="A strategy; repeat for more.")
    ],
    workers: Workers = 4,
    epochs: Epochs = None,
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(help="Repeat everything with so many seeds.")] = 1,
    data: Data = None,
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
    timeout: Timeout = 120.0,
    simulated: Annotated[
        bool, typer.Option("--simulate", help="On simulated workers, in virtual time.")
    ] = False,
    latency: Latency = "100us",
    step_time: StepTime = None,
    jitter: Jitter = 0.0,
    lr_scale: LrScale = 1.0,
    partition: Partition = None,
    sampler: Sampler = "seldp",
    injection: Injection = None,
    wire: Wire = "float32",
) -> None:
    """Run strategies one after the other under the same seeds; write table, plot and report.

    [bold]Examples[/bold]

    offbeat compare digits -s bsp -s local:period=8 -s selsync:target_lssr=0.9 --workers 4

    offbeat compare digits -s bsp -s async:staleness=16 --bandwidth 100Mbit/s --seeds 3

    offbeat compare digits -s bsp -s local:period=8 --simulate --workers 16 --step-time 80ms
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    job = Job(
        recipe,
        strategy[0],
        workers,
        epochs,
        seed,
        None if data is None else str(data),
        timeout_seconds=timeout,
        lr_scale=lr_scale,
        partition=partition,
        sampler=sampler,
        injection=injection,
        wire=wire,
    )
    for one in strategy:
        dataclasses.replace(job, strategy=one).check()
    if output is None:
        output = Path("runs", f"{recipe.replace(':', '-')}-{time.strftime('%Y%m%d-%H%M%S')}")
    virtual = _virtual(job, bandwidth, latency, step_time, jitter) if simulated else None
    with _link(None if simulated else bandwidth, workers) as cluster, Bar() as bar:
        results = comparison.compare(
            job,
            strategy,
            seeds=seeds,
            place=virtual or cluster,
            output=output,
            on_start=bar.start,
            on_event=bar.event,
        )
    show(results)
    for what, path in report.write_report(results, output).items():
        console.print(f"{what:7} {path}", highlight=False, soft_wrap=True)


app.command()(plan)
app.command()(probe)
app.command()(recipes)
app.command()(strategies)


def main() -> None:
    """The ``offbeat`` command. Exit status 2: a user's mistake, 1: a failed run, 130: Ctrl-C."""
    try:
        status = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        _fail(INTERRUPTED, 130)
    except OffbeatError as error:
        _fail(f"error: {error}", 1)
    except (ValueError, TypeError, FileNotFoundError, ImportError) as error:
        _fail(f"error: {error}", 2)
    except Exception as error:
        show = getattr(error, "format_message", None)  # a usage error of the parser
        if show is None:
            raise
        _fail(f"error: {show()}", 2)
    if status == 130:  # the parser's way to tell of Ctrl-C
        _fail(INTERRUPTED, 130)
    raise SystemExit(status)


def _fail(message: str, status: int) -> typing.NoReturn:
    typer.echo(message, err=True)
    raise SystemExit(status) from None


if __name__ == "__main__":
    main()
