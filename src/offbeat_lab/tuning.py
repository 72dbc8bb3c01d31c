"""Tuning: choose the learning rate and the settings of each method of a comparison by trials.

A *method* is a strategy of this package or a reference. A *trial* is a training run of the search.
The *ideal* is the reference ``ideal``, the speed-up limit.

Every method has the same budget of trials, all with one seed that the comparison does not use.
``search`` proposes trials, and ``score_of`` ranks them.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offbeat import Strategy
from offbeat_lab.job import MOST_SEED, Job
from offbeat_lab.methods.registry import is_ideal, parse_method
from offbeat_lab.results import Result, Trial

LEAST_BUDGET = 3
"""Smallest number of trials per method: a learning rate, a larger one and a smaller one."""
_TOLERANCE = 0.02


@dataclass(frozen=True)
class Axis:
    """A setting that the search changes.

    Attributes:
        name: Field of ``Job`` or of the strategy.
        values: Possible values in order. Empty: the first value, doubled or halved repeatedly.
    """

    name: str
    values: tuple[Any, ...] = ()

    def next(self, value: Any, *, up: bool) -> Any:
        """Return the neighbour of ``value``, or None if there is none."""
        if self.values:
            index = self.values.index(value) + (1 if up else -1)
            return self.values[index] if 0 <= index < len(self.values) else None
        if up:
            return 2 * value
        smaller = value // 2 if isinstance(value, int) else value / 2
        return smaller if smaller < value else None


_RATE = Axis("lr_scale")
_WIRE = Axis("wire", ("float32", "int4", "int2"))
_DILOCO = (
    Axis("period"),
    Axis("outer_lr", (0.35, 0.5, 0.7, 1.0, 1.4)),
    Axis("outer_momentum", (0.0, 0.6, 0.8, 0.9, 0.95)),
)
_SETTINGS = {
    "local": (Axis("period"),),
    "diloco": _DILOCO,
    "selsync": (Axis("target_lssr", (0.6, 0.8, 0.9, 0.95, 0.975)),),
    "async": (Axis("staleness"),),
    "streaming": (Axis("outer_gain", ("auto", 1)),),
    "fedavg": (Axis("period"),),
    "ssp": (Axis("staleness"),),
    "downpour": (Axis("push_every"),),
    "easgd": (Axis("period"),),
    "sparseloco": (Axis("period"),),
    "powersgd": (Axis("rank"),),
}
"""Settings to tune, by the name of the strategy, besides learning rate and wire."""
_FIRST = {
    "local": ("period=8",),
    "fedavg": ("period=8",),
    "ssp": ("staleness=4",),
    "diloco": ("period=16", "outer_momentum=0.6"),
    "sparseloco": ("period=16",),
}
"""First values of settings that have no default, or a default for much longer runs."""


# -- methods and their settings --------------------------------------------------------------------


def with_ideal(methods: Sequence[str]) -> list[str]:
    """Return the methods in the order of tuning: the ideal first, added if missing."""
    ideals = [text for text in methods if is_ideal((text.split() or [""])[0])]
    return [*(ideals or ["ideal"]), *(text for text in methods if text not in ideals)]


def untuned(text: str) -> str:
    """Return ``text`` with the values of ``_FIRST`` for settings that it omits.

    Example: ``local --wire int8`` becomes ``local:period=8 --wire int8``.
    """
    strategy, *options = text.split() or [""]
    name, _, settings = strategy.partition(":")
    given = [one for one in settings.split(",") if one]
    fixed = {one.partition("=")[0] for one in given}
    added = [one for one in _FIRST.get(name, ()) if one.partition("=")[0] not in fixed]
    complete = f"{name}:{','.join([*added, *given])}" if added else strategy
    try:
        parse_method(complete)
    except ValueError:
        return text  # has a mistake, which the caller finds, or settings that exclude these values
    return " ".join([complete, *options])


def _axes(text: str, job: Job) -> list[Axis]:
    """Return the axes of a method, without the settings that the user fixed.

    Args:
        text: The method as the user gave it.
        job: Job of the method's first trial.
    """
    axes = [_RATE]
    method = parse_method(job.strategy)
    if isinstance(method, Strategy):
        own = _SETTINGS.get(job.strategy.partition(":")[0], ())
        axes += [axis for axis in own if _is_tunable(axis, getattr(method, axis.name))]
        if job.wire is None and _is_tunable(_WIRE, method.default_wire):
            axes.append(_WIRE)
    return [axis for axis in axes if axis.name not in _fixed(text)]


def _fixed(text: str) -> set[str]:
    """Return all words in a method's text, among them the names of its settings and options."""
    return {word.lstrip("-").replace("-", "_") for word in re.split(r"[\s:,=]+", text)}


def _is_tunable(axis: Axis, value: Any) -> bool:
    return value in axis.values if axis.values else value is not None


def _neighbour(job: Job, axis: Axis, *, up: bool) -> Job | None:
    """Return ``job`` with a setting's next value. None: there is none or the method refuses it."""
    method: Any = parse_method(job.strategy)
    of_job = axis in (_RATE, _WIRE)
    value = getattr(job if of_job else method, axis.name)
    value = axis.next(method.default_wire if axis is _WIRE and value is None else value, up=up)
    if value is None:
        return None
    try:
        if of_job:
            default = axis is _WIRE and value == method.default_wire
            change: dict[str, Any] = {axis.name: None if default else value}
            job = replace(job, **change)
        else:
            job = replace(job, strategy=str(replace(method, **{axis.name: value})))
        job.check_method()
    except (ValueError, TypeError):
        return None
    return job


# -- scores ----------------------------------------------------------------------------------------

Score = tuple[int, float]
"""Rank of a trial; the smaller, the better."""


def score_of(trial: Result, trials: Sequence[Result]) -> Score:
    """Return the score of a trial.

    The target is the final metric of the ideal's best trial, relaxed by 2 % of the range between
    that trial's first and best evaluation. A trial is better if it reaches the target earlier.
    Trials that never reach it come next, ranked by their best metric. Diverged trials come last.
    The ideal's trials are ranked by their final metric.

    Args:
        trial: The trial.
        trials: All trials so far, with those of the ideal.
    """
    if trial.diverged:
        return 2, trial.job.lr_scale  # so that the search continues towards smaller rates
    sign = _sign(trial)
    if trial.is_ideal:
        return 1, -sign * trial.final
    seconds = trial.seconds_to(_level(trials))
    return (1, -_best(trial)) if seconds is None else (0, seconds)


def _level(trials: Sequence[Result]) -> float:
    """Return the value of the metric that trials shall reach."""
    best = reference(trials)
    sign = _sign(best)
    tolerance = _TOLERANCE * (_best(best) - sign * best.points[0].metric)
    return best.final - sign * tolerance


def reference(trials: Sequence[Result]) -> Result:
    """Return the ideal's best trial."""
    ideals = [trial for trial in trials if trial.is_ideal]
    return min(ideals, key=lambda trial: score_of(trial, ideals))


def _sign(result: Result) -> int:
    return 1 if result.higher_is_better else -1


def _best(result: Result) -> float:
    """Return the best metric of all evaluations, negated if lower is better."""
    values = [_sign(result) * point.metric for point in result.points]
    return max(filter(math.isfinite, values), default=-math.inf)


# -- search ----------------------------------------------------------------------------------------


def tuning_seed(job: Job) -> int:
    """Return the seed of all trials: the comparison's first seed − 1, or ``MOST_SEED`` for 0."""
    return job.seed - 1 if job.seed > 0 else MOST_SEED


def tune(
    job: Job, methods: Sequence[str], budget: int, run: Callable[[Job, Trial], Result]
) -> list[Job]:
    """Tune each method, the ideal first, and return the jobs of the comparison.

    Each method gets a job with its chosen settings and, if they differ, one with its first
    settings. All these jobs have the seed of ``job``.

    Args:
        job: Settings that all runs share.
        methods: Methods, as for ``compare``. The ideal is added if it is missing.
        budget: Largest number of trials of a method.
        run: Function that runs a trial, or returns its existing result.
    """
    trials: list[Result] = []
    jobs: list[Job] = []
    for text in with_ideal(methods):

        def score(job: Job, text: str = text) -> Score:
            trials.append(run(job, Trial(text, budget)))
            return score_of(trials[-1], trials)

        first = replace(job.under(untuned(text)), seed=tuning_seed(job))
        best = search(first, _axes(text, first), score, budget)
        jobs += [best, first]
    return [replace(one, seed=job.seed) for one in dict.fromkeys(jobs)]


def search(first: Job, axes: Sequence[Axis], score: Callable[[Job], Score], budget: int) -> Job:
    """Return the job with the smallest score found by a coordinate search.

    The search changes one setting after the other. It goes up the axis while the score improves, or
    else down. It repeats this with all settings until none improves the score, or the
    budget is spent. Of jobs with equal scores, the earlier one is better. A value that the method
    refuses ends the search in this direction and costs no trial.
    """
    scores = {first: score(first)}
    best, before = first, None
    while best is not before:
        before = best
        for axis in axes:
            for up in (True, False):
                start = best
                while (job := _neighbour(best, axis, up=up)) is not None:
                    if job not in scores:
                        if len(scores) == budget:
                            return best
                        scores[job] = score(job)
                    if scores[job] >= scores[best]:
                        break
                    best = job
                if best is not start:
                    break
    return best


# -- what was chosen -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The outcome of tuning a method.

    Attributes:
        method: The method as the user gave it.
        job: Job of the method's best trial.
        trials: Number of the method's trials.
        rates: Learning-rate factors of these trials, in ascending order. The other settings of the
            trials may differ.
    """

    method: str
    job: Job
    trials: int
    rates: tuple[float, ...]

    @property
    def rate(self) -> str:
        """Position of the best learning rate among those tried: inside, at an edge, or fixed."""
        if _RATE.name in _fixed(self.method):
            return "fixed"
        if self.rates[0] < self.job.lr_scale < self.rates[-1]:
            return "inside the grid"
        return "edge: the budget ended"


def choices(results: Sequence[Result]) -> list[Choice]:
    """Return the choice for each method with trials in ``results``, in order of first trials."""
    by_method: dict[str, list[Result]] = {}
    trials = [result for result in results if result.trial is not None]
    for result in trials:
        assert result.trial is not None
        by_method.setdefault(result.trial.method, []).append(result)
    return [
        Choice(
            method,
            min(tried, key=lambda trial: score_of(trial, trials)).job,
            len(tried),
            tuple(sorted({trial.job.lr_scale for trial in tried})),
        )
        for method, tried in by_method.items()
    ]


def without_trials(results: Sequence[Result]) -> list[Result]:
    """Return the results that are not trials, the ideal with its chosen learning rate first.

    Tables and figures compare with the first ideal.
    """
    trials = [result for result in results if result.trial is not None]
    best = reference(trials).label if any(trial.is_ideal for trial in trials) else None
    runs = [result for result in results if result.trial is None]
    return sorted(runs, key=lambda run: not run.is_ideal or run.label != best)
