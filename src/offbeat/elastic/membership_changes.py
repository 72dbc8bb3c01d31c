"""Membership changes: one generation ends, and its workers start the next one from a common state.

A *generation* is one composition of the workers. When a worker is lost or joins, each worker does
this:

1. It abandons all operations and agrees with the others on the next generation
   (``transport/membership.py``).
2. It sends a report on its state to the others. All workers derive the same plan from the reports:
   one worker sends its model and optimizer state to the workers that lack them. Then the models of
   some workers are averaged, unless the strategy keeps all models equal.
3. It starts a new *flow* (the code that drives the strategy in each step).

After step 2 all workers have the same model, the *common model* of the generation. A worker
overwrites its model only after it has received the new model completely. So if another worker is
lost in step 2, each worker has its old model, the model sent to it, or the common model. The
reports of the next attempt tell which workers have the common model.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from offbeat.averaging import flow_of
from offbeat.averaging.model_mean import ModelMean
from offbeat.averaging.rounds import VoteCheck
from offbeat.checkpoint.plain_values import restore, values_of
from offbeat.checkpoint.worker_state import WorkerState
from offbeat.errors import CommunicationError, CommunicationTimeout, MismatchError
from offbeat.quantization.wire import Precision, Wire
from offbeat.training.checks.same_setup import difference, versioned
from offbeat.training.iteration import Iteration
from offbeat.transport.membership import ModelLostError

logger = logging.getLogger("offbeat")
_ATTEMPTS = 3  # failures after which a worker does not try to begin another generation


@dataclass(frozen=True)
class _Report:
    """What one worker tells the others about its state when a generation begins.

    Attributes:
        fresh: True if the worker has just joined and does not have the model yet.
        progress: Number of the last generation whose common model the worker has received; number
            of rounds since then that synchronized it, 0 if workers do not wait for means; 1 if its
            parameters, which are replicated, contain further steps. Workers with the largest
            progress have the newest model.
        contributes: True if the worker's model may differ from the last mean.
        finite: False if the worker contributes, and its model contains NaN or infinity.
        settings: Settings that must be equal on all workers, one per line of text.
        step: Number of local steps since ``attach`` or a loaded consensus.
        carried: Fields of the flow's state that are marked ``common()``. Empty if ``fresh``.
    """

    fresh: bool
    progress: list[int]
    contributes: bool
    finite: bool
    settings: str
    step: int
    carried: dict[str, Any]


class MembershipChanges:
    """Ends a generation and begins the next one: ``changes(error)``.

    Args:
        iteration: The step loop of this worker, which contains the current flow.
        state: State of this worker, which workers receive when they join.
        report_seconds: Function to call with the duration of each membership change.
        precision: ``wire`` argument of ``attach``.
        lines: Settings that must be equal on all workers, one per line of text.
        min_workers: Least number of workers with which training continues (≥ 1).
    """

    def __init__(
        self,
        iteration: Iteration,
        state: WorkerState,
        report_seconds: Callable[[float], None],
        precision: Precision,
        lines: Sequence[str],
        *,
        min_workers: int,
    ) -> None:
        self._iteration, self._worker = iteration, iteration.flow.worker
        self._precision, self._min_workers = precision, min_workers
        self._state, self._report_seconds = state, report_seconds
        self._settings = "\n".join(versioned(lines))
        self._fresh = False  # True if this worker has joined and does not have the model yet
        # See _Report; values of the flow that has ended.
        self._progress, self._contributes = [self._worker.team.generation, 0, 0], False
        self._behind: list[int] = []  # ranks that lack the model of the generation
        self._failures = 0  # attempts to begin a generation that count; see _attempt
        self._overtaken = False  # True if this worker received the model of a later step
        self._last: CommunicationError | None = None  # why there is no further generation

    def require_current_generation(self) -> None:
        """Raise CommunicationError if a membership change is requested or impossible."""
        if self._last is not None:
            raise self._last
        membership = self._worker.team.membership
        if membership is not None and membership.change_requested():
            raise CommunicationError("a worker asks to join, or another one has left")

    def __call__(self, error: CommunicationError) -> bool:
        """End this generation because of ``error``, and begin the next one. A collective. Blocks.

        Returns:
            True if another worker has made more progress and has sent its model. The caller must
            then skip the current step.

        Raises:
            CommunicationError: There is no next generation for this worker, or too few workers are
                left.
        """
        if self._last is not None:
            raise self._last
        worker, team, before = self._worker, self._worker.team, self._worker.team.host.now()
        flow = self._iteration.flow
        waits, replicates, unsynced = flow.waits, flow.replicates, flow.unsynced
        self._progress[1] = flow.syncs if waits or replicates else 0
        self._progress[2] = int(replicates and unsynced)
        self._contributes, self._overtaken = unsynced or not waits, False
        try:
            with team.account.paused():
                self._change(error)
        except CommunicationError as last:
            self._last = last
            raise
        seconds = team.host.now() - before
        self.record()
        self._report_seconds(seconds)
        details = worker.details
        details["membership_changes"] = details.get("membership_changes", 0) + 1
        details["membership_seconds"] = details.get("membership_seconds", 0.0) + seconds
        return self._overtaken

    def record(self) -> None:
        """Write the generation's number and members to the totals and the next telemetry record."""
        worker, team = self._worker, self._worker.team
        worker.details.update(generation=team.generation, members=list(team.members))
        worker.record.update(generation=team.generation, workers=team.size)

    def join(self) -> None:
        """Begin the generation that has admitted this worker, which has just joined. A collective.

        Raises:
            CommunicationError: There is no generation for this worker, or there are too few
                workers.
            MismatchError: The settings of this worker differ from those of the others.
            ModelLostError: All workers that had the model are lost.
        """
        self._fresh = True
        if (error := self._attempt()) is not None:
            self._change(error)
        self.record()

    def _change(self, error: CommunicationError) -> None:
        """Leave the generation because of ``error``, and begin the next one that succeeds."""
        team = self._worker.team
        while True:
            membership = team.membership
            assert membership is not None
            logger.info("rank %d leaves generation %d: %s", team.rank, team.generation, error)
            team.close()
            team.enter(membership.next_generation(step=self._state.stats.steps))
            if team.size < self._min_workers:
                self._give_up(
                    CommunicationError,
                    f"{team.size} workers are left in generation {team.generation} (they began "
                    f"as ranks {', '.join(map(str, team.members))}), and "
                    f"min_workers={self._min_workers}. The model is the local one: continue from "
                    "it, or from a checkpoint, with more workers",
                )
            if (another := self._attempt()) is None:
                self._failures = 0
                return
            error = another

    def _attempt(self) -> CommunicationError | None:
        """Begin the generation entered by the team. Return the error if another one is needed.

        A worker that cannot receive the model in time leaves: each attempt stops the others for as
        long. If no worker lacks the model, all raise after ``_ATTEMPTS`` time-outs.
        """
        team, began = self._worker.team, self._worker.team.host.now()
        seconds = team.communicator.timeout_seconds
        self._behind = []
        try:
            self.begin()
            return None
        except CommunicationError as error:
            failed = error
        receives = team.rank in self._behind
        slow = team.host.now() - began >= 0.9 * seconds
        self._failures += receives or (slow and not self._behind)
        if self._failures >= _ATTEMPTS or (slow and receives):
            missed = "average the models in generation"
            if receives:
                missed = "receive the model in generation"
            self._give_up(
                CommunicationTimeout,
                f"could not {missed} {team.generation} within timeout_seconds={seconds:g}: check "
                "the network, or raise it in attach(..., timeout_seconds=...) "
                f"on all workers if that takes longer ({failed})",
            )
        return failed

    def begin(self) -> None:
        """Begin the generation entered by the team: steps 2 and 3 of the module. A collective.

        After a CommunicationError another membership change is needed. Raises OffbeatError if a
        worker would contribute NaN or infinity to the mean, and the policy is "raise".
        """
        worker, team, iteration = self._worker, self._worker.team, self._iteration
        reports = self._exchange_reports()
        old_flow = iteration.flow
        newest = max(report.progress for report in reports if not report.fresh)
        ahead = [r for r, each in enumerate(reports) if not each.fresh and each.progress == newest]
        # The workers ``ahead`` have the newest models. Their mean becomes the model of all workers.
        if old_flow.replicates:  # between two steps, the newest models are equal
            behind, averaged = [r for r in range(team.size) if r not in ahead], []
        else:
            behind = [rank for rank, each in enumerate(reports) if each.fresh]
            # Models that are equal to the last mean would only shorten the steps of the others.
            averaged = [rank for rank in ahead if reports[rank].contributes] or ahead[:1]
        source = reports[ahead[0]]
        wrong = [rank for rank in averaged if not reports[rank].finite]
        if wrong and team.size > 1:
            VoteCheck(team.rank, worker.non_finite).report(wrong, reports[wrong[0]].step)
        self._behind = behind
        self._copy(ahead[0], behind, source)
        if averaged:
            weight, total = float(team.rank in averaged), float(len(averaged))
            what = f"mean of the models at the beginning of generation {team.generation}"
            ModelMean(team, worker.replica).average(weight, total, what=what)
        self._progress, self._contributes = [team.generation, 0, 0], False
        worker.open_generation(Wire(team, self._precision))
        worker.start_step = source.step
        flow = flow_of(old_flow.strategy, worker)
        flow.start()
        restore(flow.state, source.carried, "common")
        if not self._fresh:
            restore(flow.state, values_of(old_flow.state, "local"), "local")
        self._fresh = False  # only now: after an earlier failure this worker lacks the model
        # Before the barrier: if that fails, this worker has the model.
        iteration.begin_generation(flow)
        worker.barrier(f"the beginning of generation {team.generation}")
        logger.info("rank %d of %d begins generation %d", team.rank, team.size, team.generation)

    def _give_up(self, kind: type[CommunicationError], reason: str) -> NoReturn:
        """Leave the training permanently, and raise the error."""
        team = self._worker.team
        assert team.membership is not None
        team.membership.leave(ended=False)
        team.close()
        raise kind(f"rank {team.rank}: {reason}")

    def _exchange_reports(self) -> list[_Report]:
        """Return the reports of all workers.

        Raises:
            CommunicationError: A worker that has joined has other settings than the others.
            MismatchError: This worker has joined and has other settings than the others.
        """
        worker = self._worker
        report = _Report(
            self._fresh,
            self._progress,
            self._contributes,
            self._fresh or not self._contributes or worker.finite_model(),
            self._settings,
            worker.step,
            {} if self._fresh else values_of(self._iteration.flow.state, "common"),
        )
        communicator, what = worker.team.communicator, "reports at the beginning of a generation"
        payload = json.dumps(vars(report)).encode()
        reports = [
            _Report(**json.loads(text)) for text in communicator.gather_bytes(payload, what=what)
        ]
        if all(report.fresh for report in reports):
            raise ModelLostError(
                "no worker is left that has the model: all workers of this generation joined just "
                "now. Restart training from a checkpoint"
            )
        first = next(rank for rank, other in enumerate(reports) if not other.fresh)
        lines = [other.settings.split("\n") for other in reports]
        differing = [rank for rank in range(len(lines)) if lines[rank] != lines[first]]
        if differing:
            message = "; ".join(difference(lines, rank, first) for rank in differing)
            kind = MismatchError if communicator.rank in differing else CommunicationError
            raise kind(message)
        return reports

    def _copy(self, source: int, behind: Sequence[int], report: _Report) -> None:
        """Copy the state of rank ``source``, whose report this is, to the ranks ``behind``."""
        worker, communicator = self._worker, self._worker.team.communicator
        if communicator.rank == source and behind:
            self._state.send(communicator, behind)
        if communicator.rank not in behind:
            return
        self._state.receive(communicator, source, fresh=self._fresh)
        self._behind.remove(communicator.rank)
        if self._fresh:
            worker.step = report.step
        else:
            self._overtaken = True
            self._progress, self._contributes = report.progress, report.contributes
