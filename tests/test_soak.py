"""The soak holds faults against the promise, is the same for a seed, and can fail."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.soak.perform import Outcome
from benchmarks.soak.plan import KINDS, STEPS, Case, case
from benchmarks.soak.policy import Stop
from benchmarks.soak.worker import Report, Run

ROOT = Path(__file__).parent.parent


def planned(kind: str, **settings: object) -> Case:
    one = next(one for i in range(999) if (one := case(0, i, shaped=False)).kind == kind)
    common = {"workers": 3, "victim": 1, "own_store": False, "wire": "float32"}
    return replace(one, **{"strategy": "bsp", **common, **settings})  # type: ignore[arg-type]


DIED = "rank 0: a mean failed after 0.0 s: lost the connection to rank 1, which died or was cut off"


def survivor(**seen: object) -> Report:
    report = Report("CommunicationError", ["CommunicationError"], DIED, at=10.1, left=10.2)
    return replace(report, since=9.9, step=3, values=["0x1p+0"], **seen)  # type: ignore[arg-type]


def violations(one: Case, *reports: Report | None, run: Run | None = None) -> list[str]:
    statuses = [-9 if report is None else 0 for report in reports]
    outcome = Outcome(run or Run("training"), list(reports), fault_at=10.0, statuses=[*statuses])
    return Stop().judge(one, [outcome], None).violations


def test_the_plan_follows_from_the_seed() -> None:
    """Any fault can be made again by its number; all kinds come."""
    plan = [case(3, i, shaped=True) for i in range(300)]
    assert plan == [case(3, i, shaped=True) for i in range(300)]
    assert plan != [case(4, i, shaped=True) for i in range(300)]
    assert {one.kind for one in plan} == {*KINDS}


def test_what_is_as_documented_is_survived() -> None:
    assert violations(planned("kill"), survivor(), None, survivor()) == []


@pytest.mark.parametrize(
    ("seen", "violation"),
    [
        ({"text": DIED.replace("rank 1", "rank 2")}, "does not say"),
        ({"text": DIED.replace("died or was cut off", "gave up")}, "does not say"),
        ({"kinds": ["RuntimeError"], "outcome": "RuntimeError"}, "raised RuntimeError"),
        ({"at": 13.2, "left": 13.3}, "took 3.2 s, at most 2 s are promised"),
        ({"left": 17.0}, "took 6.9 s to detach"),
        ({"outcome": "finished"}, "has finished"),
        ({"spread": 0.01}, "the model of rank 2 is no whole"),
        ({"finite": False}, "is not finite"),
        ({"descriptors": 3}, "keeps 3 descriptors"),
    ],
)
def test_anything_else_is_a_violation(seen: dict[str, object], violation: str) -> None:
    found = violations(planned("kill"), survivor(), None, replace(survivor(), **seen))  # type: ignore[arg-type]
    assert len(found) == 1
    assert violation in found[0]


def test_more_violations() -> None:
    """A rank that dies with another; one that hangs; what is left behind; models that differ."""
    died = violations(planned("kill"), survivor(), None, None)
    assert "rank 2 ended with -9" in died[0]
    done = Report("finished", at=11.0, left=11.0, step=STEPS, values=["0x1p+0"])
    other = replace(done, values=["0x1p+1"])
    assert violations(planned("pause"), done, done, done) == []
    assert "the models differ" in violations(planned("pause"), done, done, other)[0]
    outcome = Outcome(Run("training"), [done, done, done], 10.0, [2], [0, 0, -9], ["temporary x"])
    found = Stop().judge(planned("slow"), [outcome], None).violations
    assert ["hangs" in found[0], "left behind: temporary x" in found[1]] == [True, True]
    again = Outcome(Run("again", "x", loads=True, breaks=False), [done] * 3, 10.0, [], [0, 0, 0])
    first = Outcome(Run("saving", "x"), [survivor(), None, survivor()], 10.0, [], [0, -9, 0])
    judged = Stop().judge(planned("kill in save"), [first, again], ["0x1.8p+0"])
    assert "without a fault" in judged.violations[0]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_handful_of_faults_is_survived(tmp_path: Path) -> None:
    """Real ones, for some seconds; ``make soak`` goes on for longer."""
    path = tmp_path / "soak.jsonl"
    argv = [sys.executable, "-m", "benchmarks.soak", "--seed", "5", "--most", "8"]
    done = subprocess.run(
        [*argv, "--minutes", "0.4", "--output", str(path)],
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 100, "check": False},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) >= 3
    assert not any(row["violations"] or row["hangs"] for row in rows)
    assert "| all |" in done.stdout
