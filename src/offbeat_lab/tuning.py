"""Tuning: choose the learning rate and the settings of each method of a comparison by trials.

A *method* is a strategy of this package or a reference. The *ideal* is the reference ``ideal``,
which trains as if communication took no time. A *trial* is a training run of the search. All trials
have one seed, which the comparison does not use.

Every method has the same budget of trials. The first ones have its best-known settings
(``methods.tunable``), and run even if there are more of them than the budget allows. Then
``search`` proposes further trials. ``score_of`` ranks a method's trials by the time until its
metric has made a share of the ideal's improvement. Tuning searches once for each of ``SHARES``: for
settings that are fast (0.9), and for settings that end well (0.98).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from offbeat import Strategy
from offbeat_lab.baselines import STRATEGIES
from offbeat_lab.job import MOST_SEED, Job
from offbeat_lab.methods.registry import is_ideal, parse_imported
from offbeat_lab.methods.tunable import TAU, Axis, tunable_of
from offbeat_lab.results import Result, Trial

LEAST_BUDGET = 3
"""Smallest budget: the first settings at two learning rates, and a neighbour."""
SHARES = (0.98, 0.9)
"""Shares of the ideal's improvement in its whole run. Tuning searches for the first share until
three quarters of the budget are spent, then for the second share, and then for the first again."""
_RATE = Axis("lr_scale")
_WIRE = Axis("wire", ("float32", "int4", "int2"))


# -- methods and their settings --------------------------------------------------------------------


def with_ideal(methods: Sequence[str]) -> list[str]:
    """Return the methods in the order of tuning: all ideals first, one added if there is none."""
    ideals = [text for text in methods if is_ideal((text.split() or [""])[0])]
    return [*(ideals or ["ideal"]), *(text for text in methods if text not in ideals)]


def untuned(text: str, known: Mapping[str, Any] | None = None) -> str:
    """Add the best-known settings that a method's text does not give, and return the text.

    Example: ``local --wire int8`` becomes ``local:period=2 --wire int8``. The text is unchanged if
    it has a mistake, or settings that exclude the added ones. ``known`` has the settings to add;
    None: the first best-known ones.
    """
    known = _known(text)[0] if known is None else known
    added = {key: value for key, value in known.items() if key not in _fixed(text)}
    wire = [f"--wire {added.pop('wire')}"] if "wire" in added else []
    strategy, *options = text.split() or [""]
    name, _, given = strategy.partition(":")
    settings = ",".join(
        [*(f"{key}={value}" for key, value in added.items()), *filter(None, [given])]
    )
    complete = " ".join([f"{name}:{settings}" if added else strategy, *options, *wire])
    if complete == text:
        return text
    try:
        Job("").under(complete).check_method()
    except (ValueError, TypeError):
        return text  # the caller reports a mistake in it
    return complete


def _known(text: str) -> Sequence[Mapping[str, Any]]:
    """Return the best-known settings of the method that ``text`` names."""
    return tunable_of(STRATEGIES.get(re.split(r"[:\s]", text.strip())[0])).known


def _starts(text: str, job: Job, rate: float, trials: Sequence[Result]) -> Iterator[Job]:
    """Yield the first trials of a method: the first settings, then all best-known ones.

    Args:
        text: The method as the user gave it.
        job: Settings that all trials share.
        rate: Factor on the learning rate of all trials but the first, unless the method's text has
            one: the ideal's best, or that of ``job`` while the ideal is tuned.
        trials: Trials of the comparison so far. The caller adds each trial as it ends, because
            ``TAU`` depends on the times of the one before.
    """
    yield job.under(untuned(text))
    for settings in _known(text):
        known = {**settings}
        factor = rate * known.pop(_RATE.name, 1.0)
        if TAU in known.values():
            stats = trials[-1].stats[0]
            averaging = stats.details.get("landing_seconds", 0.0)  # from launch to landing
            step = stats.compute_seconds / stats.steps
            tau = 2 * max(1, math.ceil(averaging / step))
            known = {key: tau if value == TAU else value for key, value in known.items()}
        start = job.under(untuned(text, known))
        yield start if _RATE.name in _fixed(text) else replace(start, lr_scale=factor)


def _axes(text: str, strategy: str) -> list[Axis]:
    """Return the axes of a method, without the settings that the user fixed or that are None.

    A reference has the learning rate only.

    Args:
        text: The method as the user gave it.
        strategy: Its strategy in one of the trials.
    """
    axes, method = [_RATE], parse_imported(strategy)
    if isinstance(method, Strategy):
        own = tunable_of(type(method)).axes
        axes = [_WIRE, *(axis for axis in own if getattr(method, axis.name) is not None), _RATE]
    return [axis for axis in axes if axis.name not in _fixed(text)]


def _fixed(text: str) -> set[str]:
    """Return the names of the settings and options in a method's text, and all its other words."""
    return {word.lstrip("-").replace("-", "_") for word in re.split(r"[\s:,=]+", text)}


def _neighbour(job: Job, axis: Axis, *, up: bool) -> Job | None:
    """Return ``job`` with a setting's next value. None: it has none, or the method refuses it."""
    method: Any = parse_imported(job.strategy)
    of_job = axis in (_RATE, _WIRE)
    value = getattr(job if of_job else method, axis.name)
    value = axis.next(method.default_wire if axis is _WIRE and value is None else value, up=up)
    if value is None:
        return None
    if axis is _RATE:
        return replace(job, lr_scale=value)
    try:
        if of_job:
            job = replace(job, wire=None if value == method.default_wire else value)
        else:
            job = replace(job, strategy=str(replace(method, **{axis.name: value})))
        job.check_method()
    except (ValueError, TypeError):
        return None
    return job


# -- scores ----------------------------------------------------------------------------------------

Score = tuple[int, float, float]
"""Rank of a trial; the smaller, the better: 0 for one that reaches the target, 1 for one that does
not, 2 for one that diverged; the time or the learning rate; and a number that grows as the final
metric worsens."""


def score_of(trial: Result, trials: Sequence[Result], share: float) -> Score:
    """Return the score of a trial.

    A trial is better if it reaches the target earlier, and of two that take equal times the one
    with the better final metric is. The target is the metric at which ``share`` of the improvement
    of the ideal's best trial is made. Trials that never reach it come next, ranked by their final
    metric. So are all trials of the ideal, with any ``share``. Diverged trials come last.

    Args:
        trial: The trial.
        trials: All trials so far, with those of the ideal.
        share: One of ``SHARES``.
    """
    if trial.diverged:
        return 2, trial.job.lr_scale, 0.0  # of diverged trials that with the smaller rate
    seconds = None if trial.is_ideal else trial.seconds_to(reference(trials).gained(share))
    end = -trial.final if trial.higher_is_better else trial.final
    return (1, 0.0, end) if seconds is None else (0, seconds, end)


def reference(trials: Sequence[Result]) -> Result:
    """Return the ideal's best trial."""
    ideals = [trial for trial in trials if trial.is_ideal]
    return min(ideals, key=lambda trial: score_of(trial, ideals, SHARES[0]))


# -- search ----------------------------------------------------------------------------------------


def tuning_seed(job: Job) -> int:
    """Return the seed of all trials: the comparison's first seed − 1, or ``MOST_SEED`` for 0."""
    return job.seed - 1 if job.seed > 0 else MOST_SEED


def tune(
    job: Job, methods: Sequence[str], budget: int, run: Callable[[Job, Trial], Result]
) -> list[Job]:
    """Tune each method, the ideal first, and return the jobs of the comparison.

    The first trial of a method has its first best-known settings, at the learning rate of ``job``.
    Then follow all best-known settings at the ideal's best learning rate, and what ``search``
    proposes for each of ``SHARES``. The result has a job for the best settings of each share. If
    the user's text needed no additions, it also has the job of this text, which is not tuned.
    There are no equal jobs. All have the seed of ``job``.

    Args:
        job: Settings that all runs share.
        methods: Methods, as for ``compare``. The ideal is added if it is missing.
        budget: Largest number of trials of a method. Its best-known settings run in any case.
        run: Function that runs a trial, or returns its existing result.
    """
    trials: list[Result] = []
    jobs: list[Job] = []
    shared, rate = replace(job, seed=tuning_seed(job)), job.lr_scale
    good, fast = SHARES

    def by(share: float) -> Callable[[Result], Score]:
        return lambda trial: score_of(trial, trials, share)

    for text in with_ideal(methods):
        tried: dict[Job, Result] = {}

        def measure(job: Job, text: str = text, tried: dict[Job, Result] = tried) -> None:
            if job not in tried:
                tried[job] = run(job, Trial(text, budget))
                trials.append(tried[job])

        first = shared.under(untuned(text))
        for start in _starts(text, shared, rate, trials):
            measure(start)
        find = partial(search, tried, _axes(text, first.strategy), measure)
        find(by(good), math.ceil(0.75 * budget))
        best = {share: find(by(share), budget) for share in (fast, good)}
        jobs += (best[fast], best[good])
        jobs += [first] if first == shared.under(text) else []
        rate = reference(trials).job.lr_scale  # changes only after an ideal
    return [replace(one, seed=job.seed) for one in dict.fromkeys(jobs)]


def search(
    tried: Mapping[Job, Result],
    axes: Sequence[Axis],
    measure: Callable[[Job], None],
    score: Callable[[Result], Score],
    budget: int,
) -> Job:
    """Return the job with the smallest score that a search finds, starting from the best trial.

    The search changes one setting after the other. It goes up the axis while the score improves,
    and down if the first step up did not improve it. It repeats this with all settings until none
    improves the score, or the budget is spent. Of jobs with equal scores, the earlier one is
    better. A value that the method refuses ends the search in this direction and costs no trial.

    Args:
        tried: The trials so far, at least one.
        axes: Settings to change.
        measure: Function that runs a trial and adds it to ``tried``, unless it is there already.
        score: Function that scores a trial.
        budget: Largest number of trials, with those so far.
    """
    best, before = min(tried, key=lambda job: score(tried[job])), None
    while best is not before:
        before = best
        for axis in axes:
            for up in (True, False):
                before_axis = best
                while (job := _neighbour(best, axis, up=up)) is not None:
                    if job not in tried and len(tried) >= budget:
                        return best
                    measure(job)
                    if score(tried[job]) >= score(tried[best]):
                        break
                    best = job
                if best is not before_axis:
                    break
    return best


# -- what was chosen -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The outcome of tuning a method.

    Attributes:
        method: The method as the user gave it.
        share: The share of what the ideal gains, one of ``SHARES``.
        job: Job of the method's best trial by ``score_of``.
        trials: Number of the method's trials.
        seconds: Training seconds until that trial reaches the target. None: never.
        final: Its final metric.
        untried: Settings of which a value next to the chosen one was not tried.
    """

    method: str
    share: float
    job: Job
    trials: int
    seconds: float | None
    final: float
    untried: tuple[str, ...]


def choices(results: Sequence[Result], share: float) -> list[Choice]:
    """Return the choice for each method with trials in ``results``, in order of first trials.

    If some of a method's trials have settings that also ran in the comparison, only these trials
    are candidates.
    """
    by_method: dict[str, list[Result]] = {}
    trials = [result for result in results if result.trial is not None]
    for result in trials:
        assert result.trial is not None
        by_method.setdefault(result.trial.method, []).append(result)
    compared = {result.label for result in results if result.trial is None}
    found = []
    for method, tried in by_method.items():
        candidates = [trial for trial in tried if trial.label in compared] or tried
        best = min(candidates, key=lambda trial: score_of(trial, trials, share))
        seconds = best.seconds_to(reference(trials).gained(share))
        untried = untried_neighbours(method, best, tried)
        found.append(Choice(method, share, best.job, len(tried), seconds, best.final, untried))
    return found


def untried_neighbours(method: str, one: Result, trials: Sequence[Result]) -> tuple[str, ...]:
    """Return the settings of which a value next to that of ``one`` was not tried.

    Args:
        method: The method as the user gave it.
        one: A trial or a run of the method.
        trials: The trials of the method.
    """
    labels = {trial.label for trial in trials}
    untried = (
        axis.name
        for axis in _axes(method, one.strategy)
        for up in (True, False)
        if (job := _neighbour(one.job, axis, up=up)) and job.label not in labels
    )
    return tuple(dict.fromkeys(untried))


def without_trials(results: Sequence[Result]) -> list[Result]:
    """Return the results that are not trials. The ideal at its best learning rate comes first.

    Tables and figures compare with the first ideal.
    """
    trials = [result for result in results if result.trial is not None]
    best = reference(trials).label if any(trial.is_ideal for trial in trials) else None
    runs = [result for result in results if result.trial is None]
    return sorted(runs, key=lambda run: not run.is_ideal or run.label != best)
