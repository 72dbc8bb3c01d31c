"""Declarations of the library's commands: their options and help texts.

This module does not import torch, so help and shell completion are fast.
"""

from pathlib import Path
from typing import Annotated

import typer

from offbeat.cli.command import complete_strategy, implemented_in


@implemented_in("offbeat.cli.plan")
def plan(
    *,
    parameters: Annotated[str, typer.Option(help="Number of parameters, as in 25M.")],
    step_time: Annotated[str, typer.Option(help="Step time without communication, as in 120ms.")],
    bandwidth: Annotated[str, typer.Option(help="Bandwidth of each worker's link, as in 5Gbit/s.")],
    workers: Annotated[int, typer.Option("--workers", "-n", help="Number of workers.")] = 4,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "-s",
            metavar="METHOD",
            autocompletion=complete_strategy,
            help="Strategy, as in 'bsp --wire int4', instead of the default ones; repeatable.",
        ),
    ] = None,
    latency: Annotated[str, typer.Option(help="Latency of a message, as in 50us.")] = "100us",
    device_memory: Annotated[
        str | None, typer.Option(help="Memory of a worker's device, as in 80GB: does it suffice?")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Predict the time of a step under each strategy, and recommend one to try first.

    The speed-up counts steps, not the time to a metric: a strategy may need
    more steps.

    A node of several workers counts as one worker: give the number of nodes,
    the step time of a node, and the bandwidth of its link.

    [bold]Examples[/bold]

    offbeat plan --parameters 25M --step-time 120ms -n 16 --bandwidth 5gbit
    offbeat plan --parameters 1B --step-time 2s --bandwidth 5gbit -s streaming
    """


@implemented_in("offbeat.launcher.launch")
def run(
    script: Annotated[str, typer.Argument(help="The script. Its own arguments follow it.")],
    arguments: Annotated[list[str] | None, typer.Argument(show_default=False)] = None,
    *,
    workers: Annotated[
        str,
        typer.Option(
            "--workers",
            "-n",
            metavar="N",
            help="Number of workers. 2:4 is 4, or at least 2 after 30 s.",
        ),
    ],
    here: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of workers on this machine.", show_default="all, without --store"
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Store of several machines: host:port of offbeat store, or file:///path.",
            show_default="on this machine alone",
        ),
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="New interpreters instead of forks.")
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="Restarts of a worker, counted anew after it has lived a minute."),
    ] = 3,
    grace: Annotated[
        str, typer.Option(help="Time of the workers to end after SIGTERM or Ctrl-C.")
    ] = "20s",
) -> None:
    """Run a script on several workers, and restart a worker that fails while the others train.

    The script calls `offbeat.attach`. One written for torchrun needs a change:
    torch.distributed has one worker here, rank 0 of 1, so a DistributedSampler
    gives each worker all data. Use offbeat.data.LeasedSampler, and sync.rank
    and sync.size.

    [bold]Examples[/bold]

    offbeat run --workers 4 train.py --lr 0.1
    offbeat run --workers 4 -m package.train
    offbeat run --workers 4 --here 2 --store 10.0.0.1:29500 train.py
    offbeat run --workers 2:4 --here 1 --store file:///shared/store train.py
    """


@implemented_in("offbeat.launcher.store")
def store(
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")
    ] = 29500,
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


@implemented_in("offbeat.cli.lists")
def strategies() -> None:
    """List the strategies and their settings.

    [bold]Example[/bold]

    offbeat strategies
    """


@implemented_in("offbeat.cli.checkpoints")
def to_dcp(
    checkpoints: Annotated[Path, typer.Argument(help="Directory that offbeat.save wrote.")],
    output: Annotated[Path, typer.Argument(help="New directory.")],
    *,
    step: Annotated[int | None, typer.Option(help="Step.", show_default="the newest")] = None,
) -> None:
    """Convert a checkpoint of all workers for torch.distributed.checkpoint.

    OUTPUT has "model", the mean over the workers, and "optimizer" of rank 0.

    [bold]Example[/bold]

    offbeat to-dcp checkpoints checkpoints-dcp
    """


COMMANDS = (run, store, plan, strategies, to_dcp)
