"""The simulator against reality: the same jobs on shaped links and in virtual time.

4 worker processes train the ``digits`` recipe over links shaped to 1 Gbit/s and to 200 Mbit/s; the
simulator gets the same bandwidth, the step time that the real run measured (computing only, the
mean over its workers) and the latency that the small all-reduces of the real link took. The figure
is predicted / measured training time, less one.

Writes ``results/validation.json``.
"""

import argparse
import json
import statistics
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import HEADER, RESULTS, Result, interleave, machine, report
from benchmarks.processes import run
from offbeat.lab.cluster import Cluster
from offbeat.lab.compare import run_and_record
from offbeat.lab.train import Job
from offbeat.lab.virtual import VirtualCluster
from offbeat.simulate import Compute, Network
from offbeat.units import parse_bandwidth

STRATEGIES = ("bsp", "local:period=8", "selsync:target_lssr=0.9", "async:staleness=16")
WORKERS = 4


def small_all_reduce(repetitions: int) -> dict[str, float]:
    """Runs on every worker: seconds of an all-reduce of 40 bytes."""
    tensor = torch.zeros(5, dtype=torch.float64)
    seconds = interleave({"small": lambda: dist.all_reduce(tensor)}, repetitions)
    return {"seconds": statistics.median(seconds["small"])}


def results(*, quick: bool = False) -> list[Result]:
    """All figures of this benchmark."""
    found, data = [], []
    for bandwidth in ("1Gbit/s", "200Mbit/s"):
        each = run(small_all_reduce, workers=WORKERS, bandwidth=bandwidth, repetitions=300)
        small = max(one["seconds"] for one in each)
        latency = small / (2 * (WORKERS - 1))  # the ring formula, read backwards
        for text in STRATEGIES:
            job = Job("digits", text, WORKERS, epochs=6 if quick else 20, evaluations=2)
            with Cluster(WORKERS, parse_bandwidth(bandwidth)) as cluster:
                real = run_and_record(job, lambda event: None, cluster)
            step = statistics.fmean(s["compute_seconds"] / s["steps"] for s in real["stats"])
            place = VirtualCluster(Network(bandwidth, latency=latency), Compute(step))
            virtual = run_and_record(job, lambda event: None, place)
            error = virtual["seconds"] / real["seconds"] - 1
            row: dict[str, Any] = {
                "bandwidth": bandwidth,
                "strategy": text,
                "latency_seconds": latency,
                "step_seconds": step,
                "measured_seconds": real["seconds"],
                "predicted_seconds": virtual["seconds"],
                "measured_idle": real["idle"],
                "predicted_idle": virtual["idle"],
                "measured_lssr": real["lssr"],
                "predicted_lssr": virtual["lssr"],
                "measured_metric": real["final"],
                "predicted_metric": virtual["final"],
                "error": error,
            }
            data.append(row)
            what = f"simulated / measured time − 1, {text}, {bandwidth}"
            found.append(Result("validation", what, 100 * abs(error), 10, "%", {}, row))
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps({"rows": data, "machine": machine()}, indent=1)
        (RESULTS / "validation.json").write_text(text + "\n")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, nothing saved")
    quick = parser.parse_args().quick
    print(HEADER)
    report(results(quick=quick), save=not quick)
