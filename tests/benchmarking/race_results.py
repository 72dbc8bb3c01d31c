"""Made-up results for the tests of the comparisons."""

from collections.abc import Sequence

from offbeat.telemetry import Stats
from offbeat_lab.events import Evaluation
from offbeat_lab.job import Job
from offbeat_lab.results import Result, Trial


def result(
    method: str,
    points: Sequence[tuple[float, float]],
    *,
    seed: int = 0,
    higher: bool = True,
    trial: str | None = None,
) -> Result:
    """Return the result of a run with a model of 1 MB.

    Args:
        method: Strategy and options.
        points: Seconds and metric of each evaluation.
        seed: Seed of the run.
        higher: True if larger values of the metric are better.
        trial: The method that the run tuned; None for a run of the comparison.
    """
    job = Job("digits", seed=seed).under(method)
    return Result(
        job=job,
        metric="accuracy",
        higher_is_better=higher,
        target=0.9,
        link="50Mbit/s",
        machine="a machine",
        versions={},
        simulated=True,
        points=tuple(
            Evaluation(step=i + 1, seconds=seconds, metric=metric, metrics={"accuracy": metric})
            for i, (seconds, metric) in enumerate(points)
        ),
        stats=(Stats(steps=len(points)),),
        model_bytes=1_000_000,
        trial=None if trial is None else Trial(trial, 3),
    )
