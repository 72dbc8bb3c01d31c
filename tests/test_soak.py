"""The soak plans the same faults for a seed, and real faults are survived."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from benchmarks.soak import policy
from benchmarks.soak.plan import KINDS, Case, case
from benchmarks.soak.records import Report, Run
from benchmarks.soak.runner import Outcome
from benchmarks.soak.soak import Soak, table

ROOT = Path(__file__).parent.parent


def violations(one: Case, *reports: Report | None, run: Run | None = None) -> list[str]:
    statuses = [-9 if report is None else 0 for report in reports]
    outcome = Outcome(run or Run("training"), list(reports), fault_at=10.0, statuses=[*statuses])
    outcome.reached = [12] * len(reports)
    return policy.judge(one, [outcome], None).violations


def test_the_plan_follows_from_the_seed() -> None:
    """Any fault can be repeated by its number, and all kinds occur."""
    plan = [case(3, i, shaped=True) for i in range(300)]
    assert plan == [case(3, i, shaped=True) for i in range(300)]
    assert plan != [case(4, i, shaped=True) for i in range(300)]
    assert {one.kind for one in plan} == {*KINDS}


def test_a_seed_keeps_its_faults() -> None:
    """Faults that were found and written down can be repeated."""
    first = [case(61, i, shaped=True) for i in range(3)]
    assert [(one.kind, one.strategy, one.victim, one.seed) for one in first] == [
        ("detach", "diloco:period=3", 3, 922498305),
        ("interrupt", "async:staleness=4,outer_momentum=0.5,outer_lr=0.7", 1, 1219903794),
        ("kill", "async:staleness=4,outer_momentum=0.5,outer_lr=0.7", 2, 732724289),
    ]


def test_the_page_shows_the_results() -> None:
    """The table of benchmarks/results/soak.md is that of the last soak."""
    lines = (ROOT / "benchmarks/results/soak.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert f"\n\n{table(rows)}\n\n" in (ROOT / "benchmarks/results/soak.md").read_text(
        encoding="utf-8"
    )


HANDFUL = [(5, 2), (5, 5), (5, 9)]


def survive(seed: int, index: int, folder: Path) -> None:
    """Perform one fault over loopback, and write the verdict to a file."""
    folder.mkdir()
    one = replace(case(seed, index, shaped=False), delay_seconds=0.0)
    verdict, outcomes = Soak(folder).survive(one)
    told = {"name": one.name, **asdict(verdict), "outcomes": [asdict(each) for each in outcomes]}
    (folder / "told.json").write_text(json.dumps(told))


def test_a_handful_of_faults_is_survived(tmp_path: Path) -> None:
    """Real faults of different kinds, in parallel, because most of the time is waiting."""
    places = {one: tmp_path / "-".join(map(str, one)) for one in HANDFUL}

    def go(one: tuple[int, int]) -> None:
        os.environ["OFFBEAT_KERNELS"] = "0"  # the import of numba is slow
        policy.SLACK_SECONDS = 10.0  # other tests run at the same time
        survive(*one, places[one])

    context = multiprocessing.get_context("fork")
    lanes = [context.Process(target=go, args=(one,)) for one in HANDFUL]
    for lane in lanes:
        lane.start()
    deadline = time.monotonic() + 100
    for lane in lanes:
        lane.join(max(0.0, deadline - time.monotonic()))
        lane.kill()
    found = {one: place / "told.json" for one, place in places.items()}
    told = {one: json.loads(path.read_text()) for one, path in found.items() if path.exists()}
    assert told.keys() == found.keys(), "the soak itself has failed, or taken too long"
    assert [one for one in told.values() if one["violations"]] == []
    # On a busy machine one may come after the end.
    assert sum(not one["missed"] for one in told.values()) > len(HANDFUL) / 2


@pytest.mark.nightly
@pytest.mark.slow
def test_more_faults_are_survived(tmp_path: Path) -> None:
    """Faults for a minute; ``make soak`` runs longer."""
    path = tmp_path / "soak.jsonl"
    argv = [sys.executable, "-m", "benchmarks.soak", "--seed", "5", "--most", "30"]
    done = subprocess.run(
        [*argv, "--minutes", "1", "--output", str(path)],
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 110, "check": False},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) >= 6
    assert not any(row["violations"] or row["hangs"] for row in rows)
    assert "| all |" in done.stdout
