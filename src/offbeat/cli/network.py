"""Implementation of the command ``probe``, which measures the network between workers."""

import json
import os

import torch.distributed as dist

from offbeat.arguments import POSITIVE, require_number
from offbeat.cli.launcher import connect, is_launched
from offbeat.cli.view import console, print_table
from offbeat.errors import OffbeatError
from offbeat_lab import probe as probing
from offbeat_lab.job import Job
from offbeat_lab.probe import tables


def probe(seconds: float, as_json: bool) -> None:
    """Measure the network between the launcher's workers. Rank 0 prints it, with warnings."""
    require_number("seconds", seconds, POSITIVE)
    result = _measure_network(seconds)
    if int(os.environ["RANK"]) != 0:
        return
    if as_json:
        console.print_json(json.dumps(result.to_dict()))
        return
    print_table(tables.by_rank(result))
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)


def _measure_network(seconds: float = 20.0) -> probing.Probe:
    if not is_launched():
        raise OffbeatError(
            "probing needs the processes that torchrun starts: "
            "torchrun --nproc-per-node 2 -m offbeat.cli probe"
        )
    connect("gloo", Job.timeout_seconds)
    try:
        return probing.probe(seconds=seconds)
    finally:
        dist.destroy_process_group()
