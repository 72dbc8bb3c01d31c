"""Results of training runs, and their form as lines of the file ``results.jsonl``."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from offbeat import Stats
from offbeat_lab.events import Evaluation, stats_of
from offbeat_lab.job import Job
from offbeat_lab.methods.registry import is_ideal, is_peer


@dataclass(frozen=True)
class Trial:
    """Mark of a run that tuned ``method``, as the user gave it, in at most ``budget`` trials."""

    method: str
    budget: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """Configuration, machine, evaluations and totals of one run.

    Attributes:
        job: Configuration of the run.
        metric: Name of the recipe's metric that is compared with ``target``.
        higher_is_better: True if larger values of the metric are better.
        target: The recipe's target value of the metric. Methods are compared by their training time
            until they reach it.
        link: Description of the network between the workers.
        machine: Description of the hardware.
        versions: Versions of Offbeat, torch and Python by name.
        simulated: True if all seconds are virtual time, the simulator's clock.
        points: Evaluations in order, at least one. The last one is at the end of the run.
        stats: Totals of each worker, in rank order.
        model_bytes: Size of the model's parameters.
        command: Command line of the comparison.
        trial: Mark of a run that tuned a method. None: the run belongs to the comparison.
    """

    job: Job
    metric: str
    higher_is_better: bool
    target: float
    link: str
    machine: str
    versions: Mapping[str, str]
    simulated: bool
    points: tuple[Evaluation, ...]
    stats: tuple[Stats, ...]
    model_bytes: int | None = None
    command: str = ""
    trial: Trial | None = None

    @property
    def strategy(self) -> str:
        """Strategy or reference as text, such as "local:period=8"."""
        return self.job.strategy

    @property
    def label(self) -> str:
        """Strategy and its options that differ from the defaults, such as "bsp --wire int8"."""
        return self.job.label

    @property
    def final(self) -> float:
        """Value of the metric at the end of the run."""
        return self.points[-1].metric

    @property
    def diverged(self) -> bool:
        """True if the model or a metric contains NaN or infinity at the end of the run."""
        return self.points[-1].diverged

    @property
    def final_metrics(self) -> dict[str, float]:
        """All metrics at the end of the run, by name."""
        return self.points[-1].metrics

    @property
    def seconds(self) -> float:
        """Training seconds of the whole run."""
        return self.points[-1].seconds

    @property
    def mean_step_seconds(self) -> float:
        """Mean duration of a step over the whole run."""
        return self.seconds / self.points[-1].step

    @property
    def time_to_target_seconds(self) -> float | None:
        """Training seconds to the recipe's target; None if the run did not reach it."""
        return self.seconds_to(self.target)

    def best_so_far(self) -> list[tuple[float, float]]:
        """Return seconds and the best metric so far of each evaluation, negated if lower is better.

        NaN counts as the worst metric.
        """
        best, corners = -math.inf, []
        for point in self.points:
            best = max(best, point.metric if self.higher_is_better else -point.metric)
            corners.append((point.seconds, best))
        return corners

    def seconds_to(self, target: float) -> float | None:
        """Return the training seconds until ``target`` was reached, or None.

        The best metric so far has straight lines between evaluations. If the first evaluation has
        reached ``target``, the result is its time.
        """
        corners = self.best_so_far()
        wanted = target if self.higher_is_better else -target
        before = corners[:1]
        for seconds, best in corners:
            if best >= wanted:
                start, low = before[0]
                share = (wanted - low) / (best - low) if math.isfinite(low) and low < best else 1.0
                return start + share * (seconds - start)
            before = [(seconds, best)]
        return None

    def gained(self, share: float) -> float:
        """Return the metric after a share of what the run gains until its last evaluation."""
        first = self.points[0].metric
        return first + share * (self.final - first)

    @property
    def is_ideal(self) -> bool:
        """True if the method is the reference ``ideal``: BSP timed without communication."""
        return is_ideal(self.strategy)

    @property
    def late_share(self) -> float:
        """Share of steps that took longer to compute than the job's ``step_seconds``; see there."""
        late: int = sum(stats.details.get("late_steps", 0) for stats in self.stats)
        return late / max(1, sum(stats.steps for stats in self.stats))

    @property
    def measured(self) -> bool:
        """True if waiting time, bytes and synchronizations are known: for all but peers."""
        return not is_peer(self.strategy)

    @property
    def lssr(self) -> float | None:
        """LSSR, the share of steps without synchronization: mean over workers; None if unknown."""
        return self._mean("lssr") if self.measured else None

    @property
    def payload_bytes(self) -> float | None:
        """Bytes that a worker passed to the network, mean over workers; None if unknown."""
        return self._mean("payload_bytes") if self.measured else None

    @property
    def idle(self) -> float | None:
        """Share of the training time spent waiting, mean over workers; None if unknown."""
        return self._mean("idle") if self.measured else None

    @property
    def details(self) -> dict[str, Any]:
        """Strategy-specific totals of rank 0."""
        return self.stats[0].details

    def _mean(self, name: str) -> float:
        return float(sum(getattr(stats, name) for stats in self.stats) / len(self.stats))

    def _known_stats(self, stats: Stats) -> dict[str, Any]:
        if self.measured:
            return stats.to_dict()
        return {"steps": stats.steps, "details": stats.details}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and most properties as JSON values, for ``results.jsonl``."""
        derived = (
            *("strategy", "label", "final", "final_metrics", "seconds", "time_to_target_seconds"),
            *("lssr", "payload_bytes", "idle", "details"),
        )
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            **{name: getattr(self, name) for name in derived},
            "job": public_job(self.job),
            "versions": dict(self.versions),
            "points": [asdict(point) for point in self.points],
            "stats": [self._known_stats(stats) for stats in self.stats],
            "trial": None if self.trial is None else asdict(self.trial),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Result":
        """Return the ``Result`` whose ``to_dict`` returned ``values``.

        Unknown fields are ignored.
        """
        given = {field.name: values[field.name] for field in fields(cls)}
        known = {field.name for field in fields(Job)}
        given["job"] = Job(**{k: v for k, v in values["job"].items() if k in known})
        given["points"] = tuple(Evaluation(**point) for point in values["points"])
        given["stats"] = tuple(map(stats_of, values["stats"]))
        given["trial"] = Trial(**given["trial"]) if given["trial"] else None
        if not (given["points"] and given["stats"]):
            raise ValueError("a result needs an evaluation and the totals of a worker")
        return cls(**given)


def public_job(job: Job) -> dict[str, Any]:
    """Return a job as JSON values for publication.

    Of directories and of an absolute path of a recipe, only the last name is kept.
    """
    values = asdict(job)
    for name in ("data", "log"):
        if values[name] is not None:
            values[name] = Path(values[name]).name
    if Path(values["recipe"]).is_absolute():
        values["recipe"] = Path(values["recipe"]).name
    return values


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError raised inside. The error of a full disk does not name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def read_results(path: Path, *, trials: bool = False) -> list[Result]:
    """Return the results in a ``results.jsonl``, in the order of its lines.

    ``trials`` is True to include the trials that tuned the methods.
    """
    results = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            results.append(Result.from_dict(json.loads(line)))
        except Exception as error:  # a line with other contents can raise anything
            text = " ".join(str(error).split())
            raise ValueError(
                f"{path}, line {number}, is not a result: {type(error).__name__}: {text}"
            ) from None
    return [result for result in results if trials or result.trial is None]


def by_seed(results: Iterable[Result], label: str) -> dict[int, Result]:
    """Return the runs with a label by their seeds, without trials."""
    return {r.job.seed: r for r in results if r.trial is None and r.label == label}
