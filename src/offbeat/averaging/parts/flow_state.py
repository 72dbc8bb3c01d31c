"""State and totals of a ``ModelFlow``."""

from dataclasses import dataclass, field
from typing import Any

from offbeat.averaging.parts.pipeline import PipelineState
from offbeat.averaging.votes import Round
from offbeat.averaging.worker import Worker
from offbeat.strategies.base import (
    WorkerView,
    transient,
)


@dataclass
class ModelFlowState:
    """State of a ``ModelFlow``.

    Attributes:
        pipeline: The parts of the model and their launches.
        view: The data about this worker that the strategy may read.
        checked_step: Local step of the last call of ``is_finite``.
        staleness: Histogram: for each staleness, the number of local steps that ended with it.
            Empty with ``lands=0``.
        saved_tally: ``delayed`` as a list of numbers, for a checkpoint. Empty if ``delayed`` is
            None.
        delayed: Previous round. Always None, unless the strategy decides a round with the tally of
            the previous one (``tally_delay`` = 1).
    """

    pipeline: PipelineState
    view: WorkerView
    checked_step: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    saved_tally: list[float] = field(default_factory=list)
    delayed: Round | None = transient(default=None)

    def record_staleness(self, worker: Worker) -> None:
        """Record the staleness at the end of a step."""
        staleness = worker.record["staleness"] = worker.step - self.view.fresh_step
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
        if staleness > worker.details.get("staleness_max", 0):
            worker.details["staleness_max"] = staleness

    def report(self, details: dict[str, Any], *, waits: bool) -> None:
        """Update ``Stats.details``. ``waits`` is True if workers wait for each mean."""
        view = self.view
        details.update(parts=view.count, launches=view.launches, landings=view.landings)
        if not waits:
            details.update(
                landing_seconds=self.pipeline.flight_seconds / max(1, view.landings),
                staleness_max=max(self.staleness, default=0),
                staleness_histogram=self.staleness,
            )
