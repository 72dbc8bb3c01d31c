"""The command line: ``offbeat train``, ``compare``, ``recipes``, ``strategies``."""

import contextlib
import dataclasses
import inspect
import os
import sys
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
except ImportError:
    sys.stderr.write("the command line needs typer and rich: pip install 'offbeat[cli]'\n")
    raise SystemExit(2) from None

import torch.distributed as dist

import offbeat
from offbeat.errors import OffbeatError
from offbeat.lab import compare as comparison
from offbeat.lab import report
from offbeat.lab.cluster import Cluster
from offbeat.lab.recipes import RECIPES, find_recipe
from offbeat.lab.train import Event, Job, share_cores, train_worker
from offbeat.strategies import STRATEGIES, Strategy
from offbeat.units import parse_bandwidth, show_bytes

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train PyTorch models data-parallel on slow networks without waiting for them.",
)
console = Console()
INTERRUPTED = "interrupted; all workers have been ended"

RecipeName = Annotated[str, typer.Argument(help="A recipe; `offbeat recipes` lists them.")]
Workers = Annotated[int, typer.Option("--workers", "-n", help="Worker processes to start.")]
Epochs = Annotated[float | None, typer.Option(help="Passes over the data by all workers together.")]
Seed = Annotated[int, typer.Option(help="Seed of model, data order and augmentation.")]
Data = Annotated[Path | None, typer.Option(help="Directory of the data, if the recipe needs one.")]
Bandwidth = Annotated[
    str | None,
    typer.Option(help="Shape each worker's link, as in 200Mbit/s (Linux, root, iproute2)."),
]
Timeout = Annotated[float, typer.Option(help="Seconds an operation between workers may take.")]


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


class _Bar:
    """A progress bar for one run after the other."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", table_column=None),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps"),
            TextColumn("{task.fields[metric]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._metric = self._name = ""
        self._task: Any = None

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, job: Job) -> None:
        """A run begins."""
        self._metric = find_recipe(job.recipe).metric
        self._name = f"{job.strategy} seed {job.seed}" if job.seed else job.strategy
        self._task = self._progress.add_task(self._name, total=None, metric="starting")

    def event(self, event: Event) -> None:
        """An event of the run; a line for each evaluation where no bar can be drawn."""
        if event["event"] == "start":
            self._progress.update(self._task, total=event["steps"])
        elif event["event"] in ("step", "evaluation"):
            self._progress.update(self._task, completed=event["step"])
        if event["event"] == "evaluation":
            metric = f"{self._metric} {event['metric']:.4f}"
            self._progress.update(self._task, metric=metric)
            if not console.is_terminal:
                console.print(f"{self._name}  {_line(event, metric)}", soft_wrap=True)


def _line(event: Event, metric: str) -> str:
    return f"step {event['step']}  {event['seconds']:.1f} s  {metric}"


@contextlib.contextmanager
def _link(bandwidth: str | None, workers: int) -> Iterator[Cluster | None]:
    if bandwidth is None:
        yield None
        return
    with Cluster(workers, parse_bandwidth(bandwidth)) as cluster:
        yield cluster


def _show(results: list[comparison.Result]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in report.HEADINGS:
        first = heading == "strategy"
        table.add_column(heading, justify="left" if first else "right", no_wrap=first)
    for row in report.rows(results, ranges=False):  # there is no room for them
        table.add_row(*row)
    console.print()
    console.print(report.caption(results), style="dim", highlight=False)
    console.print(table)
    console.print()


@app.command()
def train(
    recipe: RecipeName,
    strategy: Annotated[
        str, typer.Option("--strategy", "-s", help="A strategy, as in selsync:delta=0.3.")
    ] = "bsp",
    workers: Workers = 4,
    epochs: Epochs = None,
    seed: Seed = 0,
    data: Data = None,
    bandwidth: Bandwidth = None,
    records: Annotated[  # torchrun has options of its own that begin with --log
        Path | None, typer.Option(help="JSON lines of every step, one file a worker.")
    ] = None,
    timeout: Timeout = 120.0,
) -> None:
    """Train a recipe under one strategy on local worker processes, or on those of torchrun.

    [bold]Examples[/bold]

    offbeat train digits --strategy selsync:delta=0.3 --workers 4

    offbeat train mnist -s local:period=8 --data ~/mnist --records runs/mnist.jsonl

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
    )
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _join(dataclasses.replace(job, workers=int(os.environ["WORLD_SIZE"])), bandwidth)
        return
    job.check()
    with _link(bandwidth, workers) as cluster, _Bar() as bar:
        bar.start(job)
        result = comparison.run_and_record(job, bar.event, cluster)
    _show([result])


def _join(job: Job, bandwidth: str | None) -> None:
    """Train on the processes that torchrun has started; this is one of them."""
    if bandwidth is not None:
        raise ValueError("--bandwidth shapes the links of processes that offbeat starts itself")
    job.check()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        console.print(f"joined the {dist.get_world_size()} processes that torchrun has started")
    metric = find_recipe(job.recipe).metric

    def tell(event: Event) -> None:
        if event["event"] == "evaluation":
            console.print(_line(event, f"{metric} {event['metric']:.4f}"), soft_wrap=True)
        elif event["event"] == "end":
            one = event["stats"][0]
            console.print(
                f"LSSR {one['lssr']:.2f}, {show_bytes(one['payload_bytes'])} sent, "
                f"idle {100 * one['idle']:.0f} %"
            )

    try:
        share_cores(job.workers)
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
) -> None:
    """Run strategies one after the other under the same seeds; write table, plot and report.

    [bold]Examples[/bold]

    offbeat compare digits -s bsp -s local:period=8 -s selsync:target_lssr=0.9 --workers 4

    offbeat compare digits -s bsp -s async:staleness=16 --bandwidth 100Mbit/s --seeds 3
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
    )
    for one in strategy:
        dataclasses.replace(job, strategy=one).check()
    if output is None:
        output = Path("runs", f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}")
    with _link(bandwidth, workers) as cluster, _Bar() as bar:
        results = comparison.compare(
            job,
            strategy,
            seeds=seeds,
            place=cluster,
            output=output,
            on_start=bar.start,
            on_event=bar.event,
        )
    _show(results)
    for what, path in report.write_report(results, output).items():
        console.print(f"{what:7} {path}", highlight=False, soft_wrap=True)


@app.command()
def recipes() -> None:
    """List the recipes.

    [bold]Example[/bold]

    offbeat recipes
    """
    table = Table(box=None)
    for heading in ("recipe", "what", "target", "needs"):
        table.add_column(heading)
    for one in RECIPES.values():
        needs = f"--data DIR: {one.needs_data}" if one.needs_data else ""
        table.add_row(one.name, one.description, f"{one.metric} {one.target:g}", needs)
    console.print(table)


@app.command()
def strategies() -> None:
    """List the strategies and their settings.

    [bold]Example[/bold]

    offbeat strategies
    """
    table = Table(box=None)
    for heading in ("strategy", "what", "settings"):
        table.add_column(heading)
    for name, kind in STRATEGIES.items():
        table.add_row(name, _summary(kind), _settings(kind))
    console.print(table)
    console.print("\nAs text: name:setting=value,setting=value")


def _summary(kind: type[Strategy]) -> str:
    return (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("``", "")


def _settings(kind: type[Strategy]) -> str:
    """As in ``period (required), warmup_steps=0, flags=blocking|deferred``."""
    shown = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        choices = typing.get_args(hints[field.name])
        if field.default is dataclasses.MISSING:
            shown.append(f"{field.name} (required)")
        elif typing.get_origin(hints[field.name]) is typing.Literal:
            shown.append(f"{field.name}={'|'.join(choices)}")
        else:
            shown.append(f"{field.name}={field.default}")
    return ", ".join(shown)


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
