"""View changes: one view ends, and its workers start the next one from a common state.

The loss of a worker and the admission of one are handled alike:

1. Each worker abandons everything in flight and agrees with the others on the next view
   (``transport/membership.py``).
2. Each worker reports which state it has. All workers derive the same plan from the reports: one
   worker sends its whole state to the workers that lack it, and the models of some are averaged.
3. Each worker starts a new flow.

A worker writes the state it receives only once it has all of it. If another worker is lost
meanwhile, each worker has either its old model or the common one, and the next attempt finds out
which workers are ahead.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offbeat.averaging import Worker, flow_of
from offbeat.averaging.exact_mean import ExactMean
from offbeat.elastic.state_transfer import (
    load_optimizer_values,
    optimizer_values,
    receive_values,
    send_values,
)
from offbeat.errors import CommunicationError, MismatchError, OffbeatError
from offbeat.quantization.automatic_wire import AdaptiveWire
from offbeat.quantization.wire import Precision, Wire
from offbeat.strategies.base import Strategy
from offbeat.telemetry import Stats
from offbeat.training.compatibility import chooses_precision
from offbeat.training.consistency import difference, versioned
from offbeat.training.iteration import Iteration
from offbeat.transport.team import Team

logger = logging.getLogger("offbeat")


def open_wire(team: Team, strategy: Strategy, precision: Precision) -> Wire:
    """Open the wire of one view. A collective.

    Args:
        team: Workers of the view.
        strategy: Strategy, which may choose the precision itself.
        precision: ``wire`` argument of ``attach``.
    """
    if precision == "auto" and not chooses_precision(strategy):
        return AdaptiveWire(team)
    return Wire(team, precision)


@dataclass(frozen=True)
class _Report:
    """State of one worker when a view begins.

    Attributes:
        fresh: True if the worker has joined and has nothing to contribute.
        common: Number of the last view whose common model it has received.
        decided: Number of rounds it has decided since then.
        unsynced: True if its model contains steps that no other worker has received.
        steps: Number of local steps.
        syncs: Number of local steps that synchronized.
        digest: Hash of the settings that must be equal on all workers.
        carried: Carried state of its flow that is common to all workers.
    """

    fresh: bool
    common: int
    decided: int
    unsynced: bool
    steps: int
    syncs: int
    digest: str
    carried: dict[str, Any]


@dataclass(frozen=True)
class _Plan:
    """Steps to a common state. Derived from the reports, so all workers have the same plan.

    Attributes:
        source: Rank of a worker that is ahead.
        behind: Ranks that receive the whole state of the source.
        contributing: Ranks whose models are averaged. Empty if the models are then equal.
    """

    source: int
    behind: list[int]
    contributing: list[int]


def plan_of(reports: Sequence[_Report], *, waits: bool, replicates: bool) -> _Plan:
    """Return the plan that follows from the reports.

    Args:
        reports: Reports of all workers, in rank order.
        waits: True if all workers wait for each mean. A worker that has decided one round more then
            has everything that the others contributed to it. Otherwise all workers that received
            the common model of the same view count as equally far.
        replicates: True if all workers that step hold the same parameters.
    """
    old = [rank for rank, report in enumerate(reports) if not report.fresh]

    def progress(rank: int) -> tuple[int, ...]:
        report = reports[rank]
        if not (waits or replicates):
            return (report.common,)
        return report.common, report.decided, report.unsynced if replicates else False

    most = max(progress(rank) for rank in old)
    ahead = [rank for rank in old if progress(rank) == most]
    fresh = [rank for rank, report in enumerate(reports) if report.fresh]
    if replicates:
        return _Plan(ahead[0], sorted({*range(len(reports))} - {*ahead}), [])
    contributing = ahead
    if waits and len(ahead) == len(old):  # no worker missed a mean: average the steps after it
        contributing = [rank for rank in old if reports[rank].unsynced] or ahead[:1]
    return _Plan(ahead[0], fresh, contributing)


class Views:
    """The view changes of one worker. Calling the object carries one out.

    Args:
        strategy: Strategy, which a new flow drives in each view.
        worker: This worker.
        precision: ``wire`` argument of ``attach``.
        stats: Returns the totals of this worker.
        lines: Descriptions of the settings that must be equal on all workers.
        min_workers: Number of workers below which training ends (≥ 1).

    Attributes:
        iteration: Iterations of this worker; set before the first view begins.
        report_seconds: Function called with the duration of each view change in seconds.
    """

    def __init__(
        self,
        strategy: Strategy,
        worker: Worker,
        precision: Precision,
        stats: Callable[[], Stats],
        lines: Sequence[str],
        *,
        min_workers: int,
    ) -> None:
        self._strategy, self._worker, self._precision = strategy, worker, precision
        self._stats, self._min_workers = stats, min_workers
        self._text = "\n".join(versioned(lines))
        self.iteration: Iteration | None = None
        self.report_seconds: Callable[[float], None] = lambda seconds: None
        self._fresh = False  # True until a worker that joined has received the state
        self._common = worker.team.view
        self._decided, self._unsynced = 0, False  # see _Report; of the flow that ends
        self._overtaken = False  # True if this worker received the state after its current step
        self._last: CommunicationError | None = None  # why there is no further view

    def require_current_view(self) -> None:
        """Raise CommunicationError if a view change is requested."""
        membership = self._worker.team.membership
        if membership is not None and membership.change_requested():
            raise CommunicationError("a worker asks to join, or another one has left the view")

    def __call__(self, error: CommunicationError) -> bool:
        """End this view because of ``error``, and begin the next one. A collective.

        Returns:
            True if this worker has received the model after the step it was about to take, so that
            it must skip the step.

        Raises:
            CommunicationError: There is no next view for this worker, or too few workers are left.
        """
        assert self.iteration is not None
        if self._last is not None:
            raise self._last
        worker, team, before = self._worker, self._worker.team, self._worker.team.host.now()
        flow = self.iteration.flow
        self._decided, self._unsynced, self._overtaken = flow.decided, flow.unsynced, False
        try:
            with team.account.paused():
                self._change(error)
        except CommunicationError as last:
            self._last = last
            raise
        seconds = team.host.now() - before
        self.record()
        self.report_seconds(seconds)
        details = worker.details
        details["view_changes"] = details.get("view_changes", 0) + 1
        details["view_seconds"] = details.get("view_seconds", 0.0) + seconds
        return self._overtaken

    def record(self) -> None:
        """Add the view to the totals and to the next record."""
        worker, team = self._worker, self._worker.team
        worker.details.update(view=team.view, members=list(team.members))
        worker.record.update(view=team.view, workers=team.size)

    def join(self) -> None:
        """Begin the view that has admitted this worker.

        Raises:
            CommunicationError: The view ended before it began, or there are too few workers.
            MismatchError: The settings of this worker differ from those of the others.
        """
        self._fresh = True
        try:
            self.begin()
        except CommunicationError as error:
            self._change(error)
        self.record()

    def _change(self, error: CommunicationError) -> None:
        """Leave the view because of ``error``, and repeat this until a next view has begun."""
        team = self._worker.team
        while True:
            membership = team.membership
            assert membership is not None
            logger.info("rank %d leaves view %d: %s", team.rank, team.view, error)
            team.close()
            self._worker.replica.forget_buckets()
            team.enter(membership.next_view(view=team.view, step=self._stats().steps))
            if team.size < self._min_workers:
                self._give_up()
            try:
                self.begin()
                return
            except CommunicationError as another:
                error = another

    def begin(self) -> None:
        """Begin the view that the team has entered. A collective.

        Raises:
            CommunicationError: Another view is needed.
            MismatchError: The settings of this worker, which has joined, differ.
        """
        worker, team, iteration = self._worker, self._worker.team, self.iteration
        assert iteration is not None
        reports = self._exchange_reports()
        before = iteration.flow
        plan = plan_of(reports, waits=before.waits, replicates=before.replicates)
        self._copy(plan, reports)
        if plan.contributing:
            weight, total = float(team.rank in plan.contributing), float(len(plan.contributing))
            what = f"mean of the models at the beginning of view {team.view}"
            ExactMean(team, worker.replica).average(weight, total, what=what)
        self._common, self._decided, self._unsynced = team.view, 0, False
        worker.open_view(open_wire(team, self._strategy, self._precision))
        worker.norm_squared = None
        iteration.choose_overlap()
        flow = flow_of(self._strategy, worker)
        flow.start(reports[plan.source].carried)
        if not self._fresh:
            flow.keep_local(before)
        self._fresh = False  # only now: until here this worker had no state of use to others
        worker.barrier(f"the beginning of view {team.view}")
        iteration.begin_view(flow)
        logger.info("rank %d of %d begins view %d", team.rank, team.size, team.view)

    def _give_up(self) -> None:
        team = self._worker.team
        assert team.membership is not None
        team.membership.leave(ended=False)
        team.close()
        raise CommunicationError(
            f"rank {team.rank}: {team.size} workers are left in view {team.view} (they began as "
            f"ranks {', '.join(map(str, team.members))}), and min_workers={self._min_workers}. The "
            "model is this worker's own: continue from it, or from a checkpoint, with more workers"
        )

    def _exchange_reports(self) -> list[_Report]:
        """Return the reports of all workers.

        Raises:
            CommunicationError: The settings of another worker, which has joined, differ. It leaves.
            MismatchError: The settings of this worker differ.
        """
        worker, stats, iteration = self._worker, self._stats(), self.iteration
        assert iteration is not None
        report = _Report(
            self._fresh,
            self._common,
            self._decided,
            self._unsynced,
            stats.steps,
            stats.syncs,
            hashlib.sha256(self._text.encode()).hexdigest(),
            {} if self._fresh else iteration.flow.common_values(),
        )
        communicator, what = worker.team.communicator, "reports at the beginning of a view"
        payload = json.dumps(vars(report)).encode()
        reports = [
            _Report(**json.loads(one)) for one in communicator.gather_bytes(payload, what=what)
        ]
        if all(one.fresh for one in reports):
            raise OffbeatError(
                "no worker is left that has the model: all workers of this view joined just now. "
                "Restart training from a checkpoint"
            )
        first = next(rank for rank, one in enumerate(reports) if not one.fresh)
        others = [rank for rank, one in enumerate(reports) if one.digest != reports[first].digest]
        if others:
            texts = communicator.gather_bytes(self._text.encode(), what=what)
            lines = [text.decode().split("\n") for text in texts]
            text = "; ".join(difference(lines, rank, first) for rank in others)
            kind = MismatchError if communicator.rank in others else CommunicationError
            raise kind(text)
        return reports

    def _copy(self, plan: _Plan, reports: Sequence[_Report]) -> None:
        """Copy model, optimizer state and counters from the source to the workers behind it."""
        worker, communicator = self._worker, self._worker.team.communicator
        tensors = worker.replica.everything()
        if communicator.rank == plan.source and plan.behind:
            values = {
                "model": tensors,
                "optimizers": [
                    optimizer_values(one.optimizer, one.parameters) for one in worker.optimizers
                ],
            }
            send_values(communicator, values, plan.behind)
        if communicator.rank not in plan.behind:
            return
        values = receive_values(communicator, plan.source)
        with torch.no_grad():
            for tensor, value in zip(tensors, values["model"], strict=True):
                tensor.detach().copy_(value)
        for one, saved in zip(worker.optimizers, values["optimizers"], strict=True):
            load_optimizer_values(one.optimizer, one.parameters, saved)
        source, stats = reports[plan.source], self._stats()
        if self._fresh:
            worker.step = stats.steps = source.steps
            stats.syncs = source.syncs
        else:
            self._overtaken = True
            self._common, self._decided = source.common, source.decided
            self._unsynced = source.unsynced
