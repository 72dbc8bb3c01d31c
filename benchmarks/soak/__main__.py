"""Inject random faults for some time: ``python -m benchmarks.soak --seed 1 --minutes 20``."""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import machine
from benchmarks.soak.plan import Case, case
from benchmarks.soak.runner import working_folder
from benchmarks.soak.soak import Soak, table
from offbeat.quantization.kernels import kernels
from offbeat_lab.launch.cluster import Cluster


def main() -> int:
    """Run the command; return exit status 1 if there was a violation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of all faults (default 0)")
    parser.add_argument("--minutes", type=float, default=20.0, help="time to run (default 20)")
    parser.add_argument("--most", type=int, default=10**9, help="largest number of faults")
    parser.add_argument("--first", type=int, default=0, help="number of the first fault")
    parser.add_argument("--kind", help="only faults of this kind")
    parser.add_argument(
        "--output", type=Path, help="append a JSON line for each fault to this file"
    )
    parser.add_argument("--table", type=Path, help="only print the table of such a file")
    options = parser.parse_args()
    if options.table is not None:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return 0
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports modules that every worker needs
    kernels()
    reason = Cluster.why_not()
    if reason is not None:
        print(f"no shaped links here: {reason}")
    deadline = time.monotonic() + 60 * options.minutes
    rows: list[dict[str, Any]] = []
    index = options.first
    while time.monotonic() < deadline and len(rows) < options.most:
        one = case(options.seed, index, shaped=reason is None)
        if options.kind in (None, one.kind):
            rows.append(_run(one, options))
        index += 1
    print(table(rows))
    return int(any(row["violations"] for row in rows))


def _run(one: Case, options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    with working_folder() as folder:
        verdict, outcomes = Soak(folder).survive(one)
    row = {
        "seed": options.seed,
        "case": asdict(one),
        "policy": "stop",
        "missed": verdict.missed,
        "violations": verdict.violations,
        "hangs": [rank for outcome in outcomes for rank in outcome.hung],
        "notice_seconds": round(verdict.notice_seconds, 3),
        "seconds": round(time.monotonic() - began, 1),
    }
    mark = "VIOLATION" if verdict.violations else "missed" if verdict.missed else "survived"
    print(f"{one.index:4} {mark:9} {verdict.notice_seconds:5.1f} s  {one.name}", flush=True)
    for violation in verdict.violations:
        print(f"     {violation}", flush=True)
    if verdict.violations:
        for outcome in outcomes:
            for rank, report in enumerate(outcome.reports):
                print(f"     {outcome.run.name} rank {rank}: {report}", flush=True)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("a") as file:
            file.write(json.dumps({**row, "machine": machine()}) + "\n")
    return row


if __name__ == "__main__":
    sys.exit(main())
