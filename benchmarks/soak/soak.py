"""Faults, one after the other, each held against its policy; and the table of what came of them."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.continuing import Continue
from benchmarks.soak.perform import Outcome, StartError, perform
from benchmarks.soak.plan import Case
from benchmarks.soak.policy import Policy, Stop, Verdict, needs_checkpoints
from benchmarks.soak.worker import Run

POLICIES: dict[str, Policy] = {"stop": Stop(), "continue": Continue()}


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
        key = (case.policy, case.strategy, case.wire, case.workers, case.elements, case.seed)
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
    """Faults by policy and kind."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        kinds[f"{row['policy']}: {row['case']['kind']}"].append(row)
    lines = ["| fault | happened | survived | violations | hangs | noticed, or gone on, within |"]
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
