"""The command line: ``offbeat train``, ``compare``, ``recipes``, ``strategies``."""

import contextlib
import dataclasses
import inspect
import os
import sys
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
from offbeat.lab.train import Event, Job, train_worker
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
        self._metric = ""
        self._task: Any = None

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, job: Job) -> None:
        """A run begins."""
        self._metric = find_recipe(job.recipe).metric
        seed = f" seed {job.seed}" if job.seed else ""
        self._task = self._progress.add_task(f"{job.strategy}{seed}", total=None, metric="")

    def event(self, event: Event) -> None:
        """An event of the run."""
        if event["event"] == "start":
            self._progress.update(self._task, total=event["steps"])
        elif event["event"] in ("step", "evaluation"):
            self._progress.update(self._task, completed=event["step"])
        if event["event"] == "evaluation":
            self._progress.update(self._task, metric=f"{self._metric} {event['metric']:.4f}")


@contextlib.contextmanager
def _link(bandwidth: str | None, workers: int) -> Iterator[Cluster | None]:
    if bandwidth is None:
        yield None
        return
    with Cluster(workers, parse_bandwidth(bandwidth)) as cluster:
        yield cluster


def _show(results: list[comparison.Result]) -> None:
    table = Table(
        title=report.caption(results), title_justify="left", title_style="dim", padding=(0, 0)
    )
    for heading in report.HEADINGS:
        first = heading == "strategy"
        table.add_column(heading, justify="left" if first else "right", no_wrap=first)
    for row in report.rows(results):
        table.add_row(*row)
    console.print(table)


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
    log: Annotated[
        Path | None, typer.Option(help="JSON lines of every step, one file a worker.")
    ] = None,
    timeout: Timeout = 120.0,
) -> None:
    """Train a recipe under one strategy on local worker processes, or on those of torchrun.

    [bold]Examples[/bold]

    offbeat train digits --strategy selsync:delta=0.3 --workers 4

    offbeat train mnist -s local:period=8 --data ~/mnist --log runs/mnist.jsonl

    torchrun --nproc-per-node 4 -m offbeat.cli train digits -s async:staleness=16
    """
    job = Job(
        recipe,
        strategy,
        workers,
        epochs,
        seed,
        None if data is None else str(data),
        log=None if log is None else str(log),
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
    metric = find_recipe(job.recipe).metric

    def tell(event: Event) -> None:
        if event["event"] == "evaluation":
            console.print(
                f"step {event['step']}  {event['seconds']:.1f} s  {metric} {event['metric']:.4f}"
            )
        elif event["event"] == "end":
            one = event["stats"][0]
            console.print(
                f"LSSR {one['lssr']:.2f}, {show_bytes(one['payload_bytes'])} sent, "
                f"idle {100 * one['idle']:.0f} %"
            )

    try:
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
        Path, typer.Option("--output", "-o", help="Directory of results, table, plot and report.")
    ] = Path("runs"),
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
    with _link(bandwidth, workers) as cluster, _Bar() as bar:
        results = comparison.compare(
            job,
            strategy,
            seeds=seeds,
            cluster=cluster,
            output=output,
            on_start=bar.start,
            on_event=bar.event,
        )
    _show(results)
    for what, path in report.write_report(results, output).items():
        console.print(f"{what:7} {path}", highlight=False, soft_wrap=True)


@app.command()
def recipes() -> None:
    """List the recipes."""
    table = Table(box=None)
    for heading in ("recipe", "what", "target", "needs"):
        table.add_column(heading)
    for one in RECIPES.values():
        needs = f"--data DIR: {one.needs_data}" if one.needs_data else ""
        table.add_row(one.name, one.description, f"{one.metric} {one.target:g}", needs)
    console.print(table)


@app.command()
def strategies() -> None:
    """List the strategies and their settings."""
    table = Table(box=None)
    for heading in ("strategy", "what", "settings"):
        table.add_column(heading)
    for name, kind in STRATEGIES.items():
        table.add_row(name, (inspect.getdoc(kind) or "").partition("\n\n")[0], _settings(kind))
    console.print(table)
    console.print("\nAs text: name:setting=value,setting=value")


def _settings(kind: type[Strategy]) -> str:
    shown = []
    for field in dataclasses.fields(kind):
        needed = field.default is dataclasses.MISSING
        shown.append(field.name if needed else f"{field.name}={field.default}")
    return ", ".join(shown)


def main() -> None:
    """The ``offbeat`` command. Exit status 2: a user's mistake, 1: a failed run, 130: Ctrl-C."""
    try:
        app()
    except KeyboardInterrupt:
        typer.echo("interrupted; all workers have been ended", err=True)
        raise SystemExit(130) from None
    except OffbeatError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
    except (ValueError, TypeError, FileNotFoundError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
