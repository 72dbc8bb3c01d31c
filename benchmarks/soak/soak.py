"""All runs that a fault takes, their verdict, and the table of many faults."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak.plan import SAVING, Case
from benchmarks.soak.policy import Verdict, judge
from benchmarks.soak.records import Run
from benchmarks.soak.runner import Outcome, StartError, perform


@dataclass
class Soak:
    """Faults, one after the other.

    Attributes:
        folder: Directory for the files of the workers.
        expected: Final values of runs without a fault, by the settings that they depend on.
    """

    folder: Path
    expected: dict[tuple[Any, ...], list[str]] = field(default_factory=dict)
    _runs: int = 0

    def survive(self, case: Case) -> tuple[Verdict, list[Outcome]]:
        """Perform all runs of a fault, and judge them."""
        checkpoints = str(self.folder / f"checkpoints{self._runs}")
        if case.kind not in SAVING:
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
        if case.kind in ("pause", "slow") and case.repeatable:
            wanted = self._without_fault(case, saves=False)
            finished = [one for one in outcomes[0].reports if one is not None]
            verdict = judge(case, outcomes, None)
            if any(one.values != wanted for one in finished) and not verdict.violations:
                verdict.violations.append(f"{finished[0].values}, and {wanted} without a fault")
            return verdict, outcomes
        resumes = case.repeatable and len(outcomes) > 1
        expected = self._without_fault(case, saves=True) if resumes else None
        return judge(case, outcomes, expected), outcomes

    def _without_fault(self, case: Case, *, saves: bool) -> list[str]:
        """Return the final values of a run without a fault.

        ``saves``: it saves at the same steps as the runs with a fault. A save lands what is in
        flight, so it changes the values of strategies that overlap communication with steps.
        """
        key = (case.strategy, case.wire, case.workers, case.elements, case.seed, saves)
        if key not in self.expected:
            checkpoints = str(self.folder / f"unbroken{self._runs}") if saves else None
            outcome = self._run(case, Run("unbroken", checkpoints, breaks=False))
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
    """Return the results by policy and kind as Markdown."""
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
