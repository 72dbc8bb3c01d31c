"""``python -m benchmarks.soak --seed 1 --minutes 20``."""

import argparse
import json
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import machine
from benchmarks.soak.faults import Outcome, StartError, perform, working_folder
from benchmarks.soak.plan import Case, case
from benchmarks.soak.policy import POLICIES, Policy, Verdict, needs_checkpoints
from benchmarks.soak.worker import Run
from offbeat.kernels import kernels
from offbeat.lab.cluster import Cluster


@dataclass
class Soak:
    """Faults, one after the other.

    Attributes:
        policy: What must hold.
        folder: For the files of the workers.
        expected: What runs without a fault end with, by all that it depends on.
    """

    policy: Policy
    folder: Path
    expected: dict[tuple[Any, ...], list[str]] = field(default_factory=dict)
    _runs: int = 0

    def survive(self, case: Case) -> tuple[Verdict, list[Outcome]]:
        """One fault, and all runs that it takes."""
        checkpoints = str(self.folder / f"checkpoints{self._runs}")
        if not needs_checkpoints(case):
            outcomes = [self._run(case, Run("training"))]
        elif case.kind == "kill in load":
            before = self._run(case, Run("before", checkpoints, breaks=False, until=6))
            broken = self._run(case, Run("loading", checkpoints, loads=True))
            again = self._run(case, Run("again", checkpoints, loads=True, breaks=False))
            outcomes = [broken, before, again]
        else:
            broken = self._run(case, Run("saving", checkpoints))
            again = self._run(case, Run("again", checkpoints, loads=True, breaks=False))
            outcomes = [broken, again]
        wanted = self._unbroken(case) if case.repeatable and len(outcomes) > 1 else None
        if case.kind in ("pause", "slow") and case.repeatable:
            wanted = self._unbroken(case)
            finished = [one for one in outcomes[0].reports if one is not None]
            verdict = self.policy.judge(case, outcomes, None)
            if any(one.values != wanted for one in finished) and not verdict.violations:
                verdict.violations.append(f"{finished[0].values}, and {wanted} without a fault")
            return verdict, outcomes
        return self.policy.judge(case, outcomes, wanted), outcomes

    def _unbroken(self, case: Case) -> list[str]:
        key = (case.strategy, case.wire, case.workers, case.elements, case.seed)
        if key not in self.expected:
            outcome = self._run(case, Run("unbroken", breaks=False))
            report = outcome.reports[0]
            if report is None or report.outcome != "finished":
                raise RuntimeError(f"a run without a fault has failed: {outcome}")
            self.expected[key] = report.values
        return self.expected[key]

    def _run(self, case: Case, run: Run) -> Outcome:
        for attempt in range(3):
            self._runs += 1
            try:
                return perform(case, run, self.folder / f"run{self._runs}")
            except StartError:
                if attempt == 2:
                    raise
        raise AssertionError


def table(rows: list[dict[str, Any]]) -> str:
    """Faults by kind."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        kinds[row["case"]["kind"]].append(row)
    lines = ["| fault | happened | survived | violations | hangs | noticed within |"]
    lines.append("|---|---|---|---|---|---|")
    shown = [*sorted(kinds.items()), *([("all", rows)] if len(kinds) > 1 else [])]
    for kind, some in shown:
        happened = [row for row in some if not row["missed"]]
        bad = [row for row in some if row["violations"]]
        hangs = [row for row in some if row["hangs"]]
        longest = max((row["notice_seconds"] for row in happened), default=0.0)
        good = sum(not row["violations"] for row in happened)
        within = f"{longest:.1f} s" if longest and kind != "all" else ""
        lines.append(
            f"| {kind} | {len(happened)} | {good} | {len(bad)} | {len(hangs)} | {within} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Exit status 1 if something did not survive."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of all faults (default 0)")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default 20)")
    parser.add_argument("--most", type=int, default=10**9, help="as many faults at most")
    parser.add_argument("--first", type=int, default=0, help="number of the first fault")
    parser.add_argument("--kind", help="only faults of this kind")
    parser.add_argument("--policy", choices=list(POLICIES), default="stop", help="what must hold")
    parser.add_argument("--output", type=Path, help="append a line of JSON a fault to this file")
    parser.add_argument("--table", type=Path, help="only show the table of such a file")
    options = parser.parse_args()
    if options.table is not None:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return 0
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports, once, what every worker needs
    kernels()
    reason = Cluster.why_not()
    if reason is not None:
        print(f"no shaped links here: {reason}")
    deadline, rows = time.monotonic() + 60 * options.minutes, []
    index = options.first
    while time.monotonic() < deadline and len(rows) < options.most:
        one = case(options.seed, index, shaped=reason is None)
        index += 1
        if options.kind not in (None, one.kind):
            continue
        rows.append(_one(one, options))
    print(table(rows))
    return int(any(row["violations"] for row in rows))


def _one(one: Case, options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    with working_folder() as folder:
        verdict, outcomes = Soak(POLICIES[options.policy], folder).survive(one)
    row = {
        "seed": options.seed,
        "case": asdict(one),
        "policy": options.policy,
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
