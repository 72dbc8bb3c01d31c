"""Tuning: the order of trials, their scores, and the comparison that follows."""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.test_report import make
from offbeat import Stats
from offbeat.errors import OffbeatError
from offbeat_lab import report
from offbeat_lab.baselines import STRATEGIES
from offbeat_lab.compare import compare
from offbeat_lab.events import End, Evaluation, Event, Start
from offbeat_lab.job import MOST_SEED, Job
from offbeat_lab.launch.runners import Loopback
from offbeat_lab.methods.registry import parse_imported, parse_method
from offbeat_lab.methods.tunable import TAU, tunable_of
from offbeat_lab.results import Result, Trial, read_results
from offbeat_lab.tuning import (
    LEAST_BUDGET,
    SHARES,
    choices,
    score_of,
    tune,
    tuning_seed,
    untuned,
    without_trials,
)

JOB = Job("digits", "bsp", 2)
WIRES = ("float32", "int4", "int2")
SEED = MOST_SEED  # of trials, for a comparison that begins with seed 0


def trials_of(
    method: str, seconds: Callable[[Job], float], budget: int = 99, job: Job = JOB
) -> tuple[list[str], list[str]]:
    """Return the labels of a method's trials and of its runs in the comparison.

    A trial reaches the level after ``seconds``; it diverges if that is NaN, and never reaches the
    level if it is infinite.
    """
    tried: list[Job] = []

    def run(trial: Job, mark: Trial) -> Result:
        assert (mark.budget, trial.seed) == (budget, tuning_seed(job))
        if mark.method == "ideal":
            return replace(make("ideal", [(1, 0.5), (2, 0.9)]), trial=mark)
        assert mark.method == method
        tried.append(trial)
        time = seconds(trial)
        final = math.nan if math.isnan(time) else 0.9 if math.isfinite(time) else 0.5
        stats = (Stats(steps=4, compute_seconds=4, details={"landing_seconds": 2.5}),)
        result = make("bsp", [(0, 0.1), (time, final)])
        return replace(result, job=trial, trial=mark, stats=stats)

    runs = [one.label for one in tune(job, [method], budget, run) if one.strategy != "ideal"]
    return [one.label.replace("--lr-scale", "x") for one in tried], runs


FIXED = "bsp --wire int8"  # leaves only the learning rate


@pytest.mark.parametrize(
    ("best", "budget", "tried", "chosen"),
    [
        (1.0, 3, ["2", "0.5"], ""),
        (2.0, 9, ["2", "4"], "2"),
        (0.25, 9, ["2", "0.5", "0.25", "0.125"], "0.25"),
        (0.25, 4, ["2", "0.5", "0.25"], "0.25"),  # at the edge: the budget ended
        (16.0, 3, ["2", "4"], "4"),
        (None, 99, ["2", "0.5"], ""),  # of equal trials the first one is chosen
    ],
)
def test_the_learning_rate_moves_while_it_improves(
    best: float | None, budget: int, tried: Sequence[str], chosen: str
) -> None:
    def seconds(job: Job) -> float:
        return 1 + abs(math.log2(job.lr_scale / best)) if best else 3.0

    told, runs = trials_of(FIXED, seconds, budget)
    assert told == [FIXED, *(f"bsp x {rate} --wire int8" for rate in tried)]
    assert runs == [*([f"bsp --lr-scale {chosen} --wire int8"] if chosen else []), FIXED]


def test_a_diverged_trial_leads_to_smaller_rates() -> None:
    """It ranks behind a trial that never reaches the level, which ranks behind all that do."""
    times = {2.0: math.nan, 1.0: math.nan, 0.5: math.nan, 0.25: math.inf, 0.125: 7.0, 0.0625: 8.0}
    told, runs = trials_of(FIXED, lambda job: times[job.lr_scale])
    assert [text.split()[2] for text in told[1:]] == ["2", "0.5", "0.25", "0.125", "0.0625"]
    assert runs == ["bsp --lr-scale 0.125 --wire int8", FIXED]


@pytest.mark.parametrize(
    ("method", "tried"),
    [
        ("bsp", ["bsp w int4", "bsp w int2", "bsp", "bsp x 2 w int4", "bsp x 0.5 w int4"]),
        (
            "local --lr-scale 1",
            [f"local:period=2{wire}" for wire in (" w int4", " w int2", "")]
            + [f"local:period={period} w int4" for period in (4, 1)],
        ),
        (
            "local:period=6 --wire int8",
            ["local:period=6 w int8", "local:period=6 x 2 w int8", "local:period=6 x 0.5 w int8"],
        ),
        (
            "async --lr-scale 1 --wire int8",  # a mean takes 2.5 steps
            [f"async:{one} w int8" for one in ("schedule=eager", "staleness=6", "staleness=2")]
            + [f"async{one} w int8" for one in (":schedule=eager,outer_lr=0.5", "")]
            + [f"async:staleness={tau},schedule=eager w int8" for tau in (32, 8)]
            + ["async:schedule=eager,outer_lr=2.0 w int8"]
            + ["async:schedule=eager,outer_momentum=0.5 w int8"],
        ),
        (
            "diloco:overlap=20 --lr-scale 1 --wire int8",  # excludes a period of 8
            ["diloco:overlap=20 w int8"]
            + [f"diloco:{one},overlap=20 w int8" for one in ("period=200", "period=50")]
            + [f"diloco:outer_lr={rate},overlap=20 w int8" for rate in (1.4, 0.35)]
            + [f"diloco:outer_momentum={one},overlap=20 w int8" for one in (0.95, 0.8)],
        ),
        (
            "streaming --lr-scale 1",
            [f"streaming{one}" for one in ("", ":staleness=3", " w int4", ":outer_gain=1")]
            + ["streaming:staleness=16"],
        ),
        ("downpour --lr-scale 1", ["downpour", "downpour:push_every=2"]),  # 0 is refused
        ("torch:ddp", ["torch:ddp", "torch:ddp x 2", "torch:ddp x 0.5"]),
    ],
)
def test_best_known_settings_come_first_and_neighbours_next(
    method: str, tried: Sequence[str]
) -> None:
    """Fixed settings stay. With equal scores, the trials are the neighbours of the first one."""
    told, _ = trials_of(method, lambda job: 1.0)
    assert [one.replace("--wire", "w") for one in told] == tried


@pytest.mark.parametrize("method", [*STRATEGIES])
def test_the_best_known_settings_fit_into_every_budget(method: str) -> None:
    """All of them are trials, and the method accepts them.

    Their text is that of the strategy, so that the search does not try one of them again.
    """
    told, _ = trials_of(method, lambda job: 1.0, LEAST_BUDGET)
    for known in tunable_of(STRATEGIES[method]).known:
        settings = {name: 6 if value == TAU else value for name, value in known.items()}
        rate = settings.pop("lr_scale", JOB.lr_scale)
        start = JOB.under(untuned(method, settings))
        tried = [replace(start, wire=known.get("wire"), lr_scale=rate)]
        assert {one.label.replace("--lr-scale", "x") for one in tried} <= set(told)
        for one in tried:
            assert one.strategy in (method, str(parse_imported(one.strategy)))


POSITIONS: dict[str, dict[str, Sequence[Any]]] = {
    "async": {"wire": WIRES, "schedule": ("cyclic", "eager"), "staleness": (2, 32)}
    | {"outer_momentum": (0.0, 0.5)},
    "diloco": {"outer_lr": (0.25, 2), "outer_momentum": (0, 0.875), "period": (4, 64)},
    "selsync": {"wire": WIRES[:2], "target_lssr": (0.2, 0.6, 0.975)},
    "local": {"wire": WIRES[1:], "period": (1, 4, 64)},
    "powersgd": {"rank": (1, 4, 32)},
}
"""Planted optima: all combinations of these values, at the edges and inside, with each rate."""


@pytest.mark.parametrize("kind", ["separable", "interaction", "noise"])
@pytest.mark.parametrize("method", [*POSITIONS])
def test_the_search_finds_planted_optima(method: str, kind: str) -> None:
    """With interaction the best learning rate depends on the last setting. The noise is 5 %."""
    for *values, rate in itertools.product(*POSITIONS[method].values(), (0.25, 8)):
        best = {**dict(zip(POSITIONS[method], values, strict=True)), "lr_scale": rate}

        def distances(job: Job, best: dict[str, Any] = best) -> list[float]:
            return [_distance(name, _value(job, name), value) for name, value in best.items()]

        def seconds(job: Job) -> float:
            *_, last, lr = found = distances(job)
            if kind == "interaction":
                return 1 + math.sqrt(math.fsum(one * one for one in found) + 0.8 * last * lr)
            noise = random.Random(job.label).uniform(-0.05, 0.05)
            return (1 + sum(map(abs, found))) * (1 + noise * (kind == "noise"))

        _, (chosen, *_) = trials_of(method, seconds, 32)
        assert distances(JOB.under(chosen)) == pytest.approx([0] * len(best), abs=0.01), best


def _value(job: Job, name: str) -> Any:
    method: Any = parse_method(job.strategy)
    if name == "wire":
        return job.wire or method.default_wire
    return getattr(job if name == "lr_scale" else method, name)


def _distance(name: str, value: Any, best: Any) -> float:
    """Return the number of steps from ``best`` to ``value`` on an axis."""
    if isinstance(best, str):
        values = WIRES if name == "wire" else ("cyclic", "eager")
        return values.index(value) - values.index(best)
    if name in ("outer_momentum", "target_lssr"):
        return math.log2((1 - best) / (1 - value))
    return math.log2(value / best)


# Scores


def test_the_level_is_a_share_of_what_the_best_ideal_gains() -> None:
    """It gains from 0.1 to 0.55: 98 % are 0.541, and 90 % are 0.505. Lines are straight."""
    worse = make("ideal --lr-scale 4", [(1, 0.1), (2, 0.6), (3, 0.5)])
    best = make("ideal", [(1, 0.1), (2, 0.6), (3, 0.55)])
    ideals = [worse, best, make("ideal --lr-scale 2", [(1, 0.1), (2, math.nan)])]
    scores = [(1, 0, -0.5), (1, 0, -0.55), (2, 2.0, 0)]
    for share in SHARES:
        assert [score_of(one, ideals, share) for one in ideals] == scores
    in_time = make("bsp", [(5, 0.501), (6, 0.551), (7, 0.2)])
    never = make("bsp", [(5, 0.4), (6, 0.504), (7, 0.2)])
    lost = make("bsp", [(5, 0.6), (6, 0.6)], more={"test loss": math.nan})
    for share, seconds in ((0.98, 5.8), (0.9, 5.08)):
        assert [score_of(one, ideals, share) for one in (in_time, never, lost)] == [
            (0, pytest.approx(seconds), -0.2),
            (1, 0, -0.2),
            (2, 1.0, 0),
        ]


def test_the_level_of_a_loss() -> None:
    """It falls from 5 to 2: 98 % are 2.06."""
    ideals = [make("ideal", [(1, 5.0), (2, 2.0)], recipe="stdlib-lm")]
    assert score_of(ideals[0], ideals, 0.98) == (1, 0, 2.0)
    bsp = make("bsp", [(1, 2.07), (2, 2.05)], recipe="stdlib-lm")
    assert score_of(bsp, ideals, 0.98) == (0, pytest.approx(1.5), 2.05)
    assert score_of(make("bsp", [(1, 2.07)], recipe="stdlib-lm"), ideals, 0.98) == (1, 0, 2.07)


def test_a_method_is_compared_with_fast_settings_and_with_those_that_end_well() -> None:
    """Of the rates, the largest reaches 90 % first, and a rate of 2 reaches 98 % first."""

    def run(trial: Job, mark: Trial) -> Result:
        rate = trial.lr_scale
        points = [(0, 0.0), (4.0, 0.5), (8.0, 1.0)]
        if mark.method != "ideal":
            points = [(0, 0.0), (10 / rate, 0.95), (20.0, 1.0 if rate <= 2 else 0.96)]
        return replace(make("bsp", points), job=trial, trial=mark)

    ideal, fast, good, first = tune(JOB, ["ideal --lr-scale 1", FIXED], 5, run)
    assert [ideal.label, good.label, first.label] == [
        "ideal",
        "bsp --lr-scale 2 --wire int8",
        FIXED,
    ]
    assert fast.lr_scale > 2
    trials = [run(one, Trial(FIXED, 5)) for one in (fast, good)]
    trials += [run(ideal, Trial("ideal", 5))]
    assert [choices(trials, share)[0].job for share in (0.9, 0.98)] == [fast, good]


# Comparisons


class Best(Loopback):
    """A runner whose runs are best at the learning rate 2, and which fails at its run ``fails``."""

    def __init__(self, fails: int = 99) -> None:
        self.jobs: list[Job] = []
        self.fails = fails

    def run(self, job: Job, on_event: Callable[[Event], None]) -> None:
        if len(self.jobs) == self.fails:
            raise OffbeatError("interrupted")
        self.jobs.append(job)
        on_event(Start(2, 4))
        on_event(Evaluation(1, 1.0, 0.1, {}))
        late = abs(math.log2(job.lr_scale / 2))
        on_event(Evaluation(2, 2.0 + late, 0.9 - 0.1 * late, {}))
        on_event(End((Stats(),)))


def tuned(runner: Best, output: Path, tune: int | None = 3, seeds: int = 2) -> list[Result]:
    return compare(
        JOB,
        ("local", "bsp --lr-scale 1 --wire int8"),
        seeds=seeds,
        runner=runner,
        output=output,
        on_start=lambda job: None,
        on_event=lambda event: None,
        tune=tune,
    )


def test_trials_come_first_and_are_marked(tmp_path: Path) -> None:
    """Then each method runs on all seeds with its chosen settings, and with its first ones."""
    results = tuned(Best(), tmp_path)
    trials = [one for one in results if one.trial is not None]
    assert results[: len(trials)] == trials
    assert [(one.trial, one.label) for one in trials] == [
        (Trial("ideal", 3), "ideal"),
        (Trial("ideal", 3), "ideal --lr-scale 2"),
        (Trial("ideal", 3), "ideal --lr-scale 4"),
        (Trial("local", 3), "local:period=2 --wire int4"),
        (Trial("local", 3), "local:period=2 --lr-scale 2 --wire int4"),
        (Trial("local", 3), "local:period=2 --lr-scale 2 --wire int2"),
        (Trial("bsp --lr-scale 1 --wire int8", 3), "bsp --wire int8"),
    ]
    assert {one.job.seed for one in trials} == {SEED}
    chosen = ["ideal --lr-scale 2", "local:period=2 --lr-scale 2 --wire int4"]
    labels = [chosen[0], "ideal", chosen[1], "bsp --wire int8"]
    runs = [(one.job.seed, one.label) for one in results[len(trials) :]]
    assert runs == [(seed, label) for seed in (0, 1) for label in labels]
    assert read_results(tmp_path / "results.jsonl", trials=True) == results
    assert read_results(tmp_path / "results.jsonl") == results[len(trials) :]


def test_interrupted_tuning_continues(tmp_path: Path) -> None:
    """Existing trials are not run again, and the file is that of an uninterrupted comparison."""
    whole = tuned(Best(), tmp_path / "whole")
    with pytest.raises(OffbeatError):
        tuned(Best(fails=4), tmp_path)
    rest = Best()
    assert tuned(rest, tmp_path) == whole
    assert [one.job for one in whole[4:]] == rest.jobs
    with pytest.raises(ValueError, match=r"line 1, is of another .* tune=3 and not 4: name "):
        tuned(Best(), tmp_path, tune=4)


def test_the_report_has_the_choices_and_no_trials(tmp_path: Path) -> None:
    """The tuned ideal is the reference, even if the file began with another run of it."""
    untuned_ideal = Best()
    compare(
        *(JOB, ("ideal",)),
        runner=untuned_ideal,
        output=tmp_path,
        on_start=lambda job: None,
        on_event=lambda event: None,
    )
    results = tuned(Best(), tmp_path, seeds=1)
    table = report.tuning(results)
    assert table is not None
    assert table.caption.startswith("Settings chosen with at most 3 trials per method and the seed")
    fixed = "bsp --lr-scale 1 --wire int8"
    ended = "budget ended before: wire, period, lr_scale"
    assert table.rows == (
        ("ideal", "ideal --lr-scale 2", "3", "90% (1.9 s), 98% (2.0 s)", "0.9", "complete"),
        (
            *("local", "local:period=2 --lr-scale 2 --wire int4", "3"),
            *("90% (1.9 s), 98% (2.0 s)", "0.9", ended),
        ),
        (fixed, "bsp --wire int8", "1", "90% (never), 98% (never)", "0.8", "complete"),
    )
    runs = without_trials(results)
    assert [one.label for one in runs[:2]] == ["ideal --lr-scale 2", "ideal"]
    assert report.tuning(runs) is None
    text = report.markdown(results)
    assert table.markdown() in text
    assert report.table(runs).markdown() in text
    assert "lr-scale 4" not in text
    page = report.page(results)
    assert ended in page
    assert "lr-scale 4" not in page
    assert str(SEED) not in page.replace(table.caption, "")


def test_a_choice_is_complete_if_all_its_neighbours_were_tried() -> None:
    """Compared settings were chosen, even if another trial has the better score by now."""
    trials = [
        replace(make(f"bsp {one} --wire int8", [(1, end)]), trial=Trial("bsp --wire int8", 3))
        for one, end in (("", 0.4), ("--lr-scale 2", 0.5), ("--lr-scale 4", 0.3))
    ]
    ideal = replace(make("ideal", [(1, 0.9)]), trial=Trial("ideal --lr-scale 1", 3))
    for compared, untried in (("--lr-scale 2", ()), ("--lr-scale 4", ("lr_scale",))):
        run = make(f"bsp {compared} --wire int8", [(1, 0.4)])
        _, choice = choices([ideal, *trials, run], 0.9)
        assert (choice.job.label, choice.untried) == (run.label, untried)
