"""The soak under ``offbeat run`` repeats its plan, and counts how often samples were used."""

import json
from pathlib import Path

import pytest
from benchmarks.launched.soak import FAULTS, KINDS, case, judge_uses
from benchmarks.launched.training import Process
from benchmarks.soak.soak import table

ROOT = Path(__file__).parent.parent


def test_the_plan_follows_from_the_seed() -> None:
    plan = [case(3, i) for i in range(60)]
    assert plan == [case(3, i) for i in range(60)]
    assert plan != [case(4, i) for i in range(60)]
    assert all(len(one.faults) == FAULTS for one in plan)
    kinds = {"stop for too long", "kill at end", "kill launcher", "kill fork server"}
    assert {kind for one in plan for kind in one.faults} == {*KINDS, *kinds}


def worker(*steps: tuple[int, list[int]], repeated: int = 0, ended: bool = True) -> Process:
    """Return a worker with steps of a chunk's issue and samples."""
    process = Process(1, "0:0", [{"event": "attached", "training": "a"}])
    process.events += [{"event": "ended"}] * ended
    for issue, batch in steps:
        process.steps.append({"epoch": 0, "issue": issue, "batch": batch, "repeated": repeated})
    return process


def test_samples_of_the_dead_may_be_used_again_as_often_as_samplers_count() -> None:
    dead = worker((1, [0, 1]), ended=False)
    assert judge_uses([dead, worker((1, [2]), (2, [0, 1]), repeated=2)]) == []


@pytest.mark.parametrize(
    ("processes", "violation"),
    [
        ([worker((1, [0])), worker((1, [0]), repeated=1)], "1 samples were used twice in one"),
        (
            [worker((1, [0]), ended=False), worker((2, [0]))],
            "1 repeated uses, but the samplers count 0",
        ),
        ([worker((1, [0])), worker((2, [0]), repeated=1)], "1 samples of survivors were used"),
    ],
)
def test_other_uses_again_are_violations(processes: list[Process], violation: str) -> None:
    (found,) = judge_uses(processes)
    assert violation in found


def test_the_page_shows_the_results() -> None:
    """The table of benchmarks/results/launched.md is that of the last soak."""
    lines = (ROOT / "benchmarks/results/launched.jsonl").read_text(encoding="utf-8").splitlines()
    shown = (ROOT / "benchmarks/results/launched.md").read_text(encoding="utf-8")
    assert f"\n\n{table([json.loads(line) for line in lines])}\n\n" in shown
