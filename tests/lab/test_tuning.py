"""Tuning: the order of trials, their scores, and the comparison that follows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lab.test_report import make
from offbeat import Stats
from offbeat.errors import OffbeatError
from offbeat_lab import report
from offbeat_lab.compare import compare
from offbeat_lab.events import End, Evaluation, Event, Start
from offbeat_lab.job import MOST_SEED, Job
from offbeat_lab.launch.runners import Loopback
from offbeat_lab.results import Result, Trial, read_results
from offbeat_lab.tuning import choices, score_of, tune, tuning_seed, without_trials

JOB = Job("digits", "bsp", 2)
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
        return replace(make("bsp", [(0, 0.1), (time, final)]), job=trial, trial=mark)

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


RATES = ["x 2", "x 0.5"]
WIRE = ["--wire int4"]


@pytest.mark.parametrize(
    ("method", "settings", "options"),
    [
        ("bsp", [""], RATES + WIRE),
        ("local", ["period=8", "period=16", "period=4"], RATES + WIRE),
        ("local:period=8", ["period=8"], RATES + WIRE),
        ("local --lr-scale 1", ["period=8", "period=16", "period=4"], WIRE),
        (
            "diloco:overlap=20",  # excludes a period of 16
            ["overlap=20", "period=200,overlap=20", "period=50,overlap=20"]
            + [f"outer_lr={rate},overlap=20" for rate in (1.0, 0.5)]
            + [f"outer_momentum={momentum},overlap=20" for momentum in (0.95, 0.8)],
            RATES + WIRE,
        ),
        ("streaming", ["", "outer_gain=1"], [*RATES, "--wire int4"]),
        ("fedavg", ["period=8", "period=16", "period=4"], RATES),
        ("downpour", ["", "push_every=2"], RATES),  # push_every=0 is refused
        ("torch:ddp", [""], RATES),
    ],
)
def test_a_method_tunes_its_own_settings_that_are_not_fixed(
    method: str, settings: list[str], options: list[str]
) -> None:
    """With equal scores, the trials are the neighbours of the first one. Refused values cost none.

    ``float32``, the first wire, has one neighbour, as has ``int2``, that of ``streaming``.
    """
    told, _ = trials_of(method, lambda job: 1.0)
    name = "torch:ddp" if "torch" in method else method.split()[0].partition(":")[0]
    first, *others = [f"{name}:{text}" if text else name for text in settings]
    rates = [f"{first} {one}" for one in options if one in RATES]
    wires = [f"{first} {one}" for one in options if one in WIRE]
    assert told == [first, *rates, *others, *wires]


def test_settings_are_tuned_one_after_the_other() -> None:
    """After the settings the learning rate comes again. The first form is run, too."""

    def seconds(job: Job) -> float:
        """Return a time that is best at period 32 and at the rate 4 / √(period/8) = 2."""
        period = int(job.strategy.partition("=")[2])
        rate = abs(math.log2(job.lr_scale * math.sqrt(period / 8) / 4))
        return 1 + abs(math.log2(period / 32)) + 0.4 * rate

    told, runs = trials_of("local", seconds)
    rates = ["local:period=8", *(f"local:period=8 x {one}" for one in (2, 4, 8))]
    periods = [f"local:period={one} x 4" for one in (16, 32, 64)]
    wires = ["local:period=32 x 4 --wire int4"]
    again = ["local:period=32 x 8", "local:period=32 x 2", "local:period=32"]
    last = [f"local:period={one} x 2" for one in (64, 16)]
    assert told == [*rates, *periods, *wires, *again, *last, "local:period=32 x 2 --wire int4"]
    assert runs == ["local:period=32 --lr-scale 2", "local:period=8"]


def test_a_wire_for_all_methods_is_not_tuned() -> None:
    told, _ = trials_of("bsp", lambda job: 1.0, job=replace(JOB, wire="int8"))
    assert len(told) == 3


# Scores


def test_the_level_is_the_final_metric_of_the_best_ideal_less_two_percent_of_its_range() -> None:
    """Its range is from 0.1 to 0.6, so the level is 0.55 - 0.02 · 0.5 = 0.54."""
    worse = make("ideal --lr-scale 4", [(1, 0.1), (2, 0.6), (3, 0.5)])
    best = make("ideal", [(1, 0.1), (2, 0.6), (3, 0.55)])
    ideals = [worse, best, make("ideal --lr-scale 2", [(1, 0.1), (2, math.nan)])]
    assert [score_of(one, ideals) for one in ideals] == [(1, -0.5), (1, -0.55), (2, 2.0)]
    in_time = make("bsp", [(5, 0.539), (6, 0.541), (7, 0.2)])
    never = make("bsp", [(5, 0.4), (6, 0.539), (7, 0.2)])
    lost = make("bsp", [(5, 0.6), (6, 0.6)], more={"test loss": math.nan})
    assert [score_of(one, ideals) for one in (in_time, never, lost)] == [
        (0, 6),
        (1, -0.539),
        (2, 1.0),
    ]


def test_the_level_of_a_loss() -> None:
    """The range is from 5 to 2, so the level is 2 + 0.02 · 3 = 2.06."""
    ideals = [make("ideal", [(1, 5.0), (2, 2.0)], recipe="stdlib-lm")]
    assert score_of(ideals[0], ideals) == (1, 2.0)
    bsp = make("bsp", [(1, 2.07), (2, 2.05)], recipe="stdlib-lm")
    assert score_of(bsp, ideals) == (0, 2)
    assert score_of(make("bsp", [(1, 2.07)], recipe="stdlib-lm"), ideals) == (1, 2.07)


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
        (Trial("local", 3), "local:period=8"),
        (Trial("local", 3), "local:period=8 --lr-scale 2"),
        (Trial("local", 3), "local:period=8 --lr-scale 4"),
        (Trial("bsp --lr-scale 1 --wire int8", 3), "bsp --wire int8"),
    ]
    assert {one.job.seed for one in trials} == {SEED}
    methods = ["ideal --lr-scale 2", "ideal", "local:period=8 --lr-scale 2", "local:period=8"]
    labels = [*methods, "bsp --wire int8"]
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
    assert table.rows == (
        ("ideal", "ideal --lr-scale 2", "3", "inside the grid"),
        ("local", "local:period=8 --lr-scale 2", "3", "inside the grid"),
        (fixed, "bsp --wire int8", "1", "fixed"),
    )
    runs = without_trials(results)
    assert [one.label for one in runs[:2]] == ["ideal --lr-scale 2", "ideal"]
    assert report.tuning(runs) is None
    text = report.markdown(results)
    assert table.markdown() in text
    assert report.table(runs).markdown() in text
    assert "lr-scale 4" not in text
    page = report.page(results)
    assert "inside the grid" in page
    assert "lr-scale 4" not in page
    assert str(SEED) not in page.replace(table.caption, "")


def test_a_rate_at_the_edge_is_marked() -> None:
    """A rate is inside if a smaller and a larger one were tried."""
    runs = [make(f"ideal --lr-scale {rate}", [(1, 0.1), (2, rate)]) for rate in (1, 2, 4)]
    (choice,) = choices([replace(one, trial=Trial("ideal", 3)) for one in runs])
    assert (choice.job.lr_scale, choice.trials) == (4, 3)
    assert choice.rate == "edge: the budget ended"
