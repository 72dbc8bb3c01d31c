"""Validation of the simulator: the same jobs on shaped links and in virtual time.

Four worker processes train the ``digits`` recipe over links shaped to 1 Gbit/s and to 200 Mbit/s.
The simulator gets the same bandwidth, a latency that follows from small all-reduces on the real
links, and the computing times of the real run: first their mean over steps and workers, then the
trace of every worker's steps (processes that share cores step unevenly, and so wait for each
other). The figure is predicted / measured training time − 1.
"""

import json
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Result, interleave
from benchmarks.processes import run
from offbeat.simulate import Compute, Network
from offbeat.units import to_bandwidth
from offbeat_lab.compare import run_and_record
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import ShapedLinks, VirtualCluster

STRATEGIES = ("bsp", "local:period=8", "selsync:target_lssr=0.9", "async:staleness=16")
WORKERS = 4
RANKS = range(WORKERS)


def read_steps(path: str) -> list[float]:
    """Return the computing time of every step, from a worker's records."""
    lines = Path(path).read_text().splitlines()
    return [json.loads(line)["compute_seconds"] for line in lines]


def small_all_reduce(repetitions: int) -> dict[str, float]:
    """Measure the seconds of an all-reduce of 40 bytes. Runs on every worker."""
    tensor = torch.zeros(5, dtype=torch.float64)
    seconds = interleave({"small": lambda: dist.all_reduce(tensor)}, repetitions)
    return {"seconds": statistics.median(seconds["small"])}


def measured_step(trace: dict[int, list[float]], rank: int, step: int, _: float) -> float:
    """Return the computing time of a step, in seconds. The steps repeat after the last one."""
    return trace[rank][step % len(trace[rank])]


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    found = []
    for bandwidth in ("1Gbit/s", "200Mbit/s"):
        each = run(small_all_reduce, workers=WORKERS, bandwidth=bandwidth, repetitions=300)
        small = max(one["seconds"] for one in each)
        latency = small / (2 * (WORKERS - 1))  # the ring formula, solved for the latency
        for text in STRATEGIES:
            job = Job("digits", text, WORKERS, epochs=6 if quick else 20, evaluations=2)
            with tempfile.TemporaryDirectory() as folder:
                log = f"{folder}/steps.jsonl"
                with ShapedLinks(WORKERS, to_bandwidth(bandwidth)) as links:
                    real = run_and_record(replace(job, log=log), lambda event: None, links)
                trace = {rank: read_steps(f"{folder}/steps.rank{rank}.jsonl") for rank in RANKS}
            mean = statistics.fmean(seconds for steps in trace.values() for seconds in steps)
            measured = Compute(1.0, slowdown=partial(measured_step, trace))
            for kind, compute in (("mean step", Compute(mean)), ("trace", measured)):
                place = VirtualCluster(Network(bandwidth, latency=latency), compute)
                virtual = run_and_record(job, lambda event: None, place)
                row: dict[str, Any] = {
                    "bandwidth": bandwidth,
                    "strategy": text,
                    "compute": kind,
                    "latency_seconds": latency,
                    "step_seconds": mean,
                    "error": virtual.seconds / real.seconds - 1,
                }
                for key in ("seconds", "idle", "lssr", "final"):
                    row[f"measured_{key}"] = getattr(real, key)
                    row[f"predicted_{key}"] = getattr(virtual, key)
                value = 100 * abs(row["error"])
                what = f"simulated ({kind}) / measured time − 1, {text}, {bandwidth}"
                target = 10 if kind == "trace" else None
                found.append(Result("validation", what, value, target, "%", {}, row))
    return found
