"""The commands about networks: ``offbeat plan`` and ``offbeat probe``."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.table import Table

from offbeat import plan as planning
from offbeat.cli_options import Wire
from offbeat.cli_view import console
from offbeat.errors import OffbeatError
from offbeat.lab import probe as probing
from offbeat.lab.measure import measure_recipe
from offbeat.units import show_seconds

Latency = Annotated[str, typer.Option(help="Of one message, as in 50us.")]
Jitter = Annotated[float, typer.Option(help="Standard deviation of a step, relative to it.")]


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
    workers: Annotated[int, typer.Option("--workers", "-n", help="How many.")] = 4,
    latency: Latency = "100us",
    jitter: Jitter = 0.0,
    lssr: Annotated[float, typer.Option(help="Share of local steps asked of SelSync.")] = 0.9,
    wire: Wire = "float32",
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help="Forecast these instead of the usual; repeat it."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Measure parameters and step time of this recipe here, on one worker."),
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

    torchrun --nproc-per-node 2 -m offbeat.cli plan --model digits --probe
    """
    told: dict[str, Any] = {"jitter": jitter, "lssr": lssr, "workers": workers, "latency": latency}
    told |= {"wire": wire, "strategies": strategies or None}
    if bandwidth is None and not probe:
        raise ValueError("plan needs --bandwidth, like 5Gbit/s, or --probe under torchrun")
    if model is None and (parameters is None or step_time is None):
        raise ValueError(
            "plan needs --parameters and --step-time, like 25M and 120ms, or --model RECIPE"
        )
    told |= {"parameters": parameters or 1.0, "step_time": step_time or 1.0}
    told |= {"bandwidth": bandwidth or 1.0}
    planning.plan(**told)  # mistakes show before anything is measured
    if probe:
        found = _measure_network()
        slowest = min(pair.bytes_per_second for pair in found.pairs)
        usual = sorted(pair.latency_seconds for pair in found.pairs)[len(found.pairs) // 2]
        told |= {"workers": len(found.ranks), "bandwidth": 8 * slowest, "latency": usual}
        if int(os.environ["RANK"]) != 0:
            return
    if model is not None:
        count, seconds = measure_recipe(model, data=data)
        told |= {"parameters": parameters or count, "step_time": step_time or seconds}
    answer = planning.plan(**told)
    if as_json:
        console.print_json(json.dumps(answer.to_dict()))
        return
    console.print(answer.caption(), style="dim", highlight=False)
    rows = planning.rows(answer)
    _table(planning.HEADINGS[:-1], [row[:-1] for row in rows])
    for row in rows:
        console.print(f"{row[0]}: {row[-1]}", style="dim", highlight=False)
    advice = f"Try {answer.recommendation.strategy} first: {answer.reason}."
    console.print(f"\n{advice}", highlight=False)


def probe(
    seconds: Annotated[float, typer.Option(help="Time to aim for.")] = 20.0,
    pairs: Annotated[bool, typer.Option("--pairs", help="Show every pair, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure the network between the workers that torchrun started, and warn of what is odd.

    [bold]Example[/bold]

    torchrun --nproc-per-node 2 -m offbeat.cli probe --seconds 5
    """
    found = _measure_network(seconds)
    if int(os.environ["RANK"]) != 0:
        return
    if as_json:
        console.print_json(json.dumps(found.to_dict()))
        return
    console.print(probing.caption(found), style="dim", highlight=False)
    _table(probing.HEADINGS, probing.rows(found))
    if pairs:
        _table(probing.PAIR_HEADINGS, probing.pair_rows(found))
    console.print(probing.summary(found), highlight=False, soft_wrap=True)
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        first = heading == headings[0]
        table.add_column(heading, justify="left" if first else "right", no_wrap=first)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def _measure_network(seconds: float = 20.0) -> probing.Probe:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise OffbeatError(
            "probing needs the processes that torchrun starts: "
            "torchrun --nproc-per-node 2 -m offbeat.cli probe"
        )
    dist.init_process_group("gloo")
    try:
        return probing.probe(seconds=seconds)
    finally:
        dist.destroy_process_group()


def measured_step(recipe: str, data: Path | None) -> float:
    """Seconds of a step of ``recipe`` on this machine; says so."""
    _, seconds = measure_recipe(recipe, data=data)
    console.print(f"a step of {recipe} takes {show_seconds(seconds)} here", highlight=False)
    return seconds
