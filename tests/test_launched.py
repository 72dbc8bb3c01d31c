"""The soak under ``offbeat run``: its plan, its page, and what its judge finds."""

import itertools
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.launched.judge import RATE, judge_loads, judge_models, judge_uses, target
from benchmarks.launched.soak import FAULTS, KINDS, STORE_KINDS, case, survive, table
from benchmarks.launched.training import Process

RESULTS = Path(__file__).parent.parent / "benchmarks/results"


def test_the_plan_follows_from_the_seed() -> None:
    plan = [case(3, i) for i in range(60)]
    assert plan == [case(3, i) for i in range(60)]
    assert plan != [case(4, i) for i in range(60)]
    assert all(len(one.faults) == FAULTS for one in plan)
    kinds = {"stop for too long", "kill at end", "kill launcher", "kill fork server"}
    kinds.add("kill in save")
    assert {kind for one in plan for kind in one.faults} == {*KINDS, *STORE_KINDS, *kinds}


@pytest.mark.parametrize("name", ["launched", "soak"])
def test_the_page_shows_the_results(name: str) -> None:
    """The table of each page in benchmarks/results is that of its soak."""
    rows = [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    assert f"\n\n{table(rows)}\n\n" in (RESULTS / f"{name}.md").read_text(encoding="utf-8")


def logs(*, period: int, steps: int = 9) -> list[Process]:
    """Return the logs of three workers that average their models after each ``period`` steps."""
    workers = [Process(n, f"0:{n}") for n in range(3)]
    models = [[0.0, 0.0, 0.0] for _ in workers]
    for step in range(steps):
        for n, worker in enumerate(workers):
            batch = [6 * step + 2 * n, 6 * step + 2 * n + 1]
            first, last, uses = models[n]
            aim = target(batch)
            loss = RATE * (first - aim) ** 2
            line = {"at": step + n / 10, "step": step, "generation": 0, "members": 3, "epoch": 0}
            line |= {"queue": 0, "repeated": 0, "batch": batch, "loss": loss, "model": models[n]}
            worker.steps.append(line)
            models[n] = [first - RATE * (first - aim), last - RATE * (last - aim), uses + 2]
        if (step + 1) % period == 0:
            models = [[sum(column) / 3 for column in zip(*models, strict=True)]] * 3
    samples = [*range(6 * steps)]
    workers[0].events += [{"event": "data", "left": [(0, samples)], "at": 0.0}]
    for worker in workers:
        worker.events.append({"event": "ended", "at": steps, "model": models[0]})
    return workers


STRATEGIES = {"bsp": 1, "local:period=4": 4, "selsync:delta=0.3": 5}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_right_training_is_accepted_and_a_wrong_number_is_found(strategy: str) -> None:
    """One number of one model is off by 0.002 after a step, as if a mean lacked a part of it."""
    right = logs(period=STRATEGIES[strategy])
    assert [*judge_models(strategy, right), *judge_uses(right)] == []
    for step, number in itertools.product(range(1, 8), range(3)):
        wrong = deepcopy(right)
        model = wrong[1].steps[step]["model"] = [*wrong[1].steps[step]["model"]]
        model[number] += 0.002
        assert any(
            f"generation 0, step {step - 1}:" in one for one in judge_models(strategy, wrong)
        )


@pytest.mark.parametrize(
    ("strategy", "period"), [("bsp", 10), ("local:period=4", 5), ("bsp", 2), ("local:period=4", 10)]
)
def test_a_missing_mean_is_found(strategy: str, period: int) -> None:
    assert [*judge_models(strategy, logs(period=period))]


def test_a_worker_without_part_in_a_mean_is_found() -> None:
    """The mean of the others is right without it, as if it had been lost."""
    *pair, alone = logs(period=10)
    for now, after in itertools.pairwise(range(9)):
        mean = [0.0] * 3
        for one in pair:
            *numbers, uses = one.steps[now]["model"]
            aim = target(one.steps[now]["batch"])
            moved = [*(x + RATE * (aim - x) for x in numbers), uses + 2]
            mean = [x + y / 2 for x, y in zip(mean, moved, strict=True)]
        for one in pair:
            aim = target(one.steps[after]["batch"])
            loss = sum(RATE / 2 * (x - aim) ** 2 for x in mean[:2])
            one.steps[after] |= {"model": mean, "loss": loss}
    assert any("without" in one for one in judge_models("bsp", [*pair, alone]))
    assert [*judge_models("bsp", pair)] == []


def test_a_wrong_loss_is_found() -> None:
    workers = logs(period=1)
    workers[2].steps[3]["loss"] += 0.01
    (found,) = judge_models("bsp", workers)
    assert "the loss is not" in found


def test_lost_and_repeated_samples_are_found() -> None:
    workers = logs(period=1)
    workers[0].steps[0]["batch"] = [1, 1]
    assert [*judge_uses(workers)] == [
        "1 samples were not used",
        "1 samples were used twice from one queue",
        "1 repeated uses, but the samplers count 0",
    ]
    later = deepcopy(workers[0].steps[1]) | {"queue": 1, "repeated": 2}
    workers[0].steps.append(later)
    assert "2 samples of survivors were used again" in [*judge_uses(workers)]


def test_a_model_that_nobody_saved_is_found() -> None:
    (worker, *_) = logs(period=1)
    worker.events.append({"event": "saves", "at": 1.0, "model": [1.0, 2.0, 3.0]})
    worker.events.append({"event": "loaded", "at": 2.0, "model": [1.0, 2.0, 3.0]})
    assert judge_loads([worker]) == []
    worker.events.append({"event": "loaded", "at": 3.0, "model": [1.0, 2.0, 4.0]})
    assert judge_loads([worker]) == ["loaded [1.0, 2.0, 4.0], which was not saved"]


@pytest.mark.nightly
@pytest.mark.slow
def test_real_faults_are_survived(tmp_path: Path) -> None:
    """``make soak`` runs longer."""
    one = replace(case(1, 4), faults=("kill", "exception", "kill in save"))
    assert (one.strategy, one.saves) == ("bsp", True)
    rows = survive(one, tmp_path / "training")
    assert [row["violations"] + row["hangs"] for row in rows] == [[]] * 4
    assert not all(row["missed"] for row in rows[:3])
