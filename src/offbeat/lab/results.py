"""What a run gave, as a value and as a line of ``results.jsonl``."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from offbeat.lab.baselines import is_ideal, is_peer
from offbeat.lab.events import Calibration, Evaluation, LinkSpeed, stats_of
from offbeat.lab.job import Job
from offbeat.telemetry import Stats


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run: configuration, machine, curve and totals.

    Attributes:
        job: What ran.
        metric: Name of the recipe's metric.
        higher_is_better: Whether a larger one is better.
        target: The value whose time of arrival is compared.
        link: What joined the workers.
        machine: What computed.
        versions: Of Offbeat, torch and Python.
        simulated: Whether all seconds are virtual.
        points: The evaluations in their order, at least one; the last is that of the end.
        stats: The totals of every worker, in rank order.
        model_bytes: Size of the model's parameters; None of a version that did not tell.
        links: What was measured of the links before the training and after it, if it was.
        turns: How fast workers alone were before the training and at each evaluation, if that was
            measured.
        lr_scales: The factors on the learning rate that the method was tried with, this run being
            that of one of them; empty if it was not tuned.
        command: What was typed.
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
    links: tuple[LinkSpeed, ...] = ()
    turns: tuple[Calibration, ...] = ()
    lr_scales: tuple[float, ...] = ()
    command: str = ""

    @property
    def strategy(self) -> str:
        """Text form of the strategy."""
        return self.job.strategy

    @property
    def label(self) -> str:
        """The strategy and the options that it was given alone; what tables call the run."""
        return self.job.label

    @property
    def final(self) -> float:
        """The metric at the end."""
        return self.points[-1].metric

    @property
    def final_metrics(self) -> dict[str, float]:
        """All metrics at the end, by name."""
        return self.points[-1].metrics

    @property
    def seconds(self) -> float:
        """Training seconds."""
        return self.points[-1].seconds

    @property
    def time_to_target_seconds(self) -> float | None:
        """Training seconds at the first evaluation at the target or better; None without one."""
        sign = 1 if self.higher_is_better else -1
        arrived = (p.seconds for p in self.points if sign * p.metric >= sign * self.target)
        return next(arrived, None)

    @property
    def is_ideal(self) -> bool:
        """Whether this is the run on an infinitely fast network."""
        return is_ideal(self.strategy)

    @property
    def measured(self) -> bool:
        """Whether waiting, bytes and synchronizations are known: Offbeat does not see a peer's."""
        return not is_peer(self.strategy)

    @property
    def lssr(self) -> float | None:
        """Share of local steps, mean over the workers; None if unknown."""
        return self._mean("lssr") if self.measured else None

    @property
    def payload_bytes(self) -> float | None:
        """Bytes handed to collectives and pushes, mean over the workers; None if unknown."""
        return self._mean("payload_bytes") if self.measured else None

    @property
    def idle(self) -> float | None:
        """Share of training time spent waiting, mean over the workers; None if unknown."""
        return self._mean("idle") if self.measured else None

    @property
    def flag_rate(self) -> float | None:
        """Share of steps at which a worker's trigger fired, of all workers; None if unknown."""
        return self._mean("flags") / max(1.0, self._mean("steps")) if self.measured else None

    @property
    def details(self) -> dict[str, Any]:
        """Totals that only this strategy has, of rank 0."""
        return self.stats[0].details

    def _mean(self, name: str) -> float:
        return float(sum(getattr(one, name) for one in self.stats) / len(self.stats))

    def _known(self, one: Stats) -> dict[str, Any]:
        if self.measured:
            return one.to_dict()
        return {"steps": one.steps, "details": one.details}

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values, the derived ones too: a line of ``results.jsonl``."""
        return {
            "job": public_job(self.job),
            "strategy": self.strategy,
            "label": self.label,
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "target": self.target,
            "link": self.link,
            "machine": self.machine,
            "versions": dict(self.versions),
            "simulated": self.simulated,
            "points": [asdict(point) for point in self.points],
            "final": self.final,
            "final_metrics": self.final_metrics,
            "seconds": self.seconds,
            "time_to_target_seconds": self.time_to_target_seconds,
            "lssr": self.lssr,
            "payload_bytes": self.payload_bytes,
            "idle": self.idle,
            "flag_rate": self.flag_rate,
            "stats": [self._known(one) for one in self.stats],
            "details": self.details,
            "model_bytes": self.model_bytes,
            "links": [asdict(one) for one in self.links],
            "turns": [asdict(one) for one in self.turns],
            "lr_scales": list(self.lr_scales),
            "command": self.command,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Result":
        """The result of ``to_dict``, also of another version whose jobs had other fields.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        later = {"model_bytes", "links", "turns", "lr_scales", "command"}  # 0.1.0 wrote none
        kept = {
            one.name: values[one.name]
            for one in fields(cls)
            if one.name in values or one.name not in later
        }
        kept["job"] = _job_of(values["job"])
        kept["points"] = tuple(Evaluation(**point) for point in values["points"])
        kept["stats"] = tuple(stats_of(one) for one in values["stats"])
        kept["links"] = tuple(LinkSpeed(**one) for one in kept.get("links", ()))
        kept["turns"] = tuple(Calibration(**one) for one in kept.get("turns", ()))
        kept["lr_scales"] = tuple(kept.get("lr_scales", ()))
        if not (kept["points"] and kept["stats"]):
            raise ValueError("a result needs an evaluation and the totals of a worker")
        return cls(**kept)


def _job_of(values: Mapping[str, Any]) -> Job:
    """The job of a saved result, also of a version whose jobs had other fields."""
    known, strategy = {one.name for one in fields(Job)}, values["strategy"]
    if values.get("optimizer_state") == "average":  # an option of earlier versions, now a setting
        strategy += ("," if ":" in strategy else ":") + "optimizer_state=average"
    return Job(**{k: v for k, v in values.items() if k in known} | {"strategy": strategy})


def public_job(job: Job) -> dict[str, Any]:
    """A job as JSON values, of paths the last part alone: results are shown to others."""
    values = asdict(job)
    for name in ("data", "log", "checkpoints"):
        if values[name] is not None:
            values[name] = Path(values[name]).name
    if Path(values["recipe"]).is_absolute():
        values["recipe"] = Path(values["recipe"]).name
    return values


def read_results(path: Path) -> list[Result]:
    """The results of a ``results.jsonl``, in the order of the runs.

    Raises:
        ValueError: a line is no result, of this version or one before; naming it.
    """
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            found.append(Result.from_dict(json.loads(line)))
        except Exception as error:  # of what is there instead, anything may be raised
            text = " ".join(str(error).split())
            raise ValueError(
                f"{path}, line {number}, is no result: {type(error).__name__}: {text}"
            ) from None
    return found
