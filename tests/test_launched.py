"""The soak under ``offbeat run`` repeats its plan."""

import json
from pathlib import Path

from benchmarks.launched.soak import FAULTS, KINDS, case
from benchmarks.soak.soak import table

ROOT = Path(__file__).parent.parent


def test_the_plan_follows_from_the_seed() -> None:
    plan = [case(3, i) for i in range(60)]
    assert plan == [case(3, i) for i in range(60)]
    assert plan != [case(4, i) for i in range(60)]
    assert all(len(one.faults) == FAULTS for one in plan)
    kinds = {"stop for too long", "kill at end", "kill launcher", "kill fork server"}
    assert {kind for one in plan for kind in one.faults} == {*KINDS, *kinds}


def test_the_page_shows_the_results() -> None:
    """The table of benchmarks/results/launched.md is that of the last soak."""
    lines = (ROOT / "benchmarks/results/launched.jsonl").read_text(encoding="utf-8").splitlines()
    shown = (ROOT / "benchmarks/results/launched.md").read_text(encoding="utf-8")
    assert f"\n\n{table([json.loads(line) for line in lines])}\n\n" in shown
