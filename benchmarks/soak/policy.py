"""What must hold after a fault."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from benchmarks.soak.perform import Outcome
from benchmarks.soak.plan import BY_ITSELF, EAGER, SAVING, SERVERS, Case
from benchmarks.soak.worker import FINISHED, FIRST_STEP, Report

# Of ``Report.spread``: over an exact wire, and over another, where numbers that differ in the last
# bit may be rounded to different ones.
_EXACT, _ROUNDED = 1e-5, 1e-3
SLACK_SECONDS = 1.0  # of a machine on which four workers share two cores
# A server's message that has arrived in part is waited for for a second when its connection ends;
# gloo does not always give it up, and keeps a thread for it.
_DETACH_SECONDS, _HALF_SECONDS = 2.5, 1.0


@dataclass(frozen=True)
class Verdict:
    """What is held against a fault.

    Attributes:
        violations: What is not as documented; none: it was survived.
        notice_seconds: The longest that a survivor took from the fault, or from its next call that
            waits for others, to its error.
        missed: The fault came too late to happen.
    """

    violations: list[str]
    notice_seconds: float = 0.0
    missed: bool = False


class Policy(ABC):
    """What workers are promised where one of them fails.

    Another one is a subclass and a row in ``POLICIES`` of ``soak``.
    """

    @abstractmethod
    def survivors(self, case: Case, outcome: Outcome) -> Iterator[str]:
        """Violations by those to whom nothing was done, in the run in which the fault happened."""

    @abstractmethod
    def noticed(self, case: Case, outcome: Outcome) -> float:
        """The longest time that one of them took to notice."""

    def silent_one(self, case: Case) -> str:
        """What an error says where one that was silent learns of it; a regular expression."""
        return ""

    def judge(self, case: Case, outcomes: list[Outcome], expected: list[str] | None) -> Verdict:
        """Hold all runs of one fault against the promise.

        Args:
            case: The fault.
            outcomes: Of the run in which it happened; then of those that go on from checkpoints.
            expected: What all workers end with where nothing happens, if that is always the same.
        """
        first, *later = outcomes
        found = list(_whole(case, outcomes))
        if first.fault_at is None and case.kind != "kill before attach":
            ended = all(r is not None and r.outcome == "finished" for r in first.reports)
            if not ended:
                found.append(f"nothing was done, and it failed: {_told(first)}")
            return Verdict(found, missed=True)
        others = [one for rank, one in enumerate(first.reports) if rank not in case.victims]
        done = all(one is not None and one.outcome == "finished" for one in others)
        if done and case.victims and case.victims <= late(case, first):
            return Verdict(found, missed=True)  # they had taken part in all that there is
        found += self.survivors(case, first)
        found += self._victim(case, first)
        for outcome in later:
            found += finished(case, outcome, expected)
        return Verdict(found, self.noticed(case, first))

    def _victim(self, case: Case, outcome: Outcome) -> Iterator[str]:
        """What becomes of those to whom it happened, if they live."""
        for rank in case.victims:
            report = outcome.reports[rank]
            if report is None:
                continue
            wanted: Any = {
                "exception": "Broken",
                "detach": "Broken",
                "interrupt": "KeyboardInterrupt",
            }.get(case.kind)
            text = ""
            if rank == case.silent:
                wanted, text = "CommunicationError", self.silent_one(case)
            if wanted is not None and wanted not in report.kinds:
                yield f"rank {rank}, the victim, ended with {report.outcome}: {report.text}"
            elif not re.search(text, report.text):
                yield f"rank {rank}, the victim, does not say {text!r}: {report.text}"
            waited = report.at - (outcome.fault_at or report.at)
            if case.kind == "interrupt" and waited > 0.2 + SLACK_SECONDS:
                yield f"Ctrl-C took {waited:.1f} s to get through"
            lived = report.at > (outcome.fault_at or 0.0)  # else something else had ended it before
            if case.kills and lived and rank not in {case.silent, *late(case, outcome)}:
                yield f"rank {rank} was killed, and reports {report.outcome}"


def late(case: Case, outcome: Outcome) -> set[int]:
    """Victims that had all behind them when it happened, or may have had it."""
    if case.kind in (*BY_ITSELF, "pause"):
        return set()
    last = FINISHED if case.kind == "kill at end" else FIRST_STEP + case.steps
    return {rank for rank in case.victims if outcome.reached[rank] >= last}


class Stop(Policy):
    """Training ends: one error on every other worker, which names the rank, within its time."""

    @override
    def survivors(self, case: Case, outcome: Outcome) -> Iterator[str]:
        if case.kind in ("pause", "slow"):
            yield from finished(case, outcome, None)
            return
        if case.kind == "not finite":
            yield from _not_finite(case, outcome)
            return
        if case.kind == "kill all in save":
            return
        kind, text, seconds = _promise(case)
        for rank, report in enumerate(outcome.reports):
            if rank == case.victim or report is None:
                continue
            waited = _waited(outcome, report)
            if report.outcome == "finished":
                yield f"rank {rank} has finished"
            elif kind not in report.kinds:
                yield f"rank {rank} raised {report.outcome}: {report.text}"
            elif not re.search(text, report.text):
                yield f"rank {rank} does not say {text!r}: {report.text}"
            if waited > seconds + SLACK_SECONDS:
                yield f"rank {rank} took {waited:.1f} s, at most {seconds:g} s are promised"

    @override
    def noticed(self, case: Case, outcome: Outcome) -> float:
        others = [r for i, r in enumerate(outcome.reports) if r is not None and i != case.victim]
        failed = [r for r in others if r.outcome != "finished"]
        return max((_waited(outcome, r) for r in failed), default=0.0)


def _promise(case: Case) -> tuple[str, str, float]:
    """Class and text of the survivors' error, and the seconds after which it is there."""
    rank = f"rank {case.victim}"
    keeper = case.own_store and case.victim == 0
    if case.kind in ("stop", "unplug"):
        seconds = case.timeout_seconds + 3 + keeper
        return "CommunicationTimeout", f"no answer from .*{rank}", seconds
    if case.kind == "kill before attach":
        return "CommunicationError", f"{rank}|opening connections", case.timeout_seconds
    if keeper:  # nobody can say why it left
        return "CommunicationError", f"lost the connection to .*{rank}", 2.0
    gave_up = case.kind in ("exception", "detach", "interrupt")
    how = "gave up" if gave_up else "died or was cut off"
    return "CommunicationError", f"lost the connection to .*{rank}, which {how}", 2.0


def _waited(outcome: Outcome, report: Report) -> float:
    """Seconds from the fault, or from when this worker next waited for others, to its end."""
    return report.at - max(outcome.fault_at or 0.0, report.since)


def _whole(case: Case, outcomes: list[Outcome]) -> Iterator[str]:
    """Nobody hangs or leaves anything behind, and no model is half of a mean."""
    limit = _EXACT if case.wire == "float32" else _ROUNDED
    for outcome in outcomes:
        name = outcome.run.name
        for rank in outcome.hung:
            yield f"{name}: rank {rank} hangs: {outcome.said}"
        for one in outcome.left:
            yield f"{name}: left behind: {one}"
        dead = case.victims
        for rank, report in enumerate(outcome.reports):
            status = outcome.statuses[rank]
            if report is None:
                if rank not in dead or not outcome.run.breaks:
                    yield f"{name}: rank {rank} ended with {status}: {outcome.said}"
                continue
            killed = status == -9 and rank in dead and outcome.run.breaks  # too late to matter
            if status != 0 and rank not in outcome.hung and not killed:
                yield f"{name}: rank {rank} ended with {status} after its report: {outcome.said}"
            if not report.finite and case.kind != "not finite":
                yield f"{name}: the model of rank {rank} is not finite"
            # A Ctrl-C may come between two parameters of the optimizer's own step.
            steps = case.kind == "interrupt" and rank == case.victim and outcome.run.breaks
            if report.spread > limit and not steps:
                yield (
                    f"{name}: the model of rank {rank} is no whole: numbers that must be equal are "
                    f"{report.spread:.2g} apart"
                )
            detached = report.left - report.at
            if detached > _DETACH_SECONDS + SLACK_SECONDS:
                yield f"{name}: rank {rank} took {detached:.1f} s to detach"
            if (report.descriptors > 0 or report.threads > 0) and not _excused(case, outcome, rank):
                yield (
                    f"{name}: rank {rank} keeps {report.descriptors} descriptors and "
                    f"{report.threads} threads"
                )


def _excused(case: Case, outcome: Outcome, rank: int) -> bool:
    """Whether what a worker keeps is known to stay with it for some time, or until it ends."""
    report = outcome.reports[rank]
    assert report is not None
    # Who asks a store that does not answer waits for it, in threads of their own.
    unanswered = case.own_store and 0 in case.victims and (case.kind == "stop" or case.continues)
    if unanswered or (case.kind == "unplug" and rank == case.victim and report.descriptors <= 0):
        return True
    # A thread of a parameter server that has received half of a message.
    if case.strategy in SERVERS and report.left - report.at > _HALF_SECONDS:
        return True
    # While gloo connects it may wait for ever for one that dies then, connected to the others.
    failed = max((r.view - r.changes for r in outcome.reports if r is not None), default=0)
    most = (4 + 2 * (case.workers + case.newcomers)) * failed
    return report.descriptors <= most and report.threads <= 2 * failed


def finished(case: Case, outcome: Outcome, expected: list[str] | None) -> Iterator[str]:
    """All have finished, with the same model."""
    if outcome.run.until is not None:
        return
    reports = [report for report in outcome.reports if report is not None]
    for rank, report in enumerate(outcome.reports):
        if report is None or report.outcome != "finished" or report.step != case.steps:
            yield f"{outcome.run.name}: rank {rank} has not finished: {_of(report)}"
    if any(report.values != reports[0].values for report in reports):
        yield f"{outcome.run.name}: the models differ: {[r.values for r in reports]}"
    if len({report.loaded for report in reports}) > 1:
        yield f"{outcome.run.name}: loaded {[r.loaded for r in reports]}"
    if expected is not None and reports and reports[0].values != expected:
        yield (
            f"{outcome.run.name}: {reports[0].values} after step {reports[0].loaded}, and "
            f"{expected} without a fault"
        )


def _not_finite(case: Case, outcome: Outcome) -> Iterator[str]:
    """As ``non_finite`` says."""
    asked = case.non_finite
    serves = case.strategy in SERVERS
    told = f"rank {case.victim} would {'push' if serves else 'contribute'} NaN or infinity"
    reports = [report for report in outcome.reports if report is not None]
    unseen = all(r.finite and r.outcome == "finished" and not r.warnings for r in reports)
    if "unselected=restart" in case.strategy and unseen:
        return  # it was not drawn in that round, and went on from the mean of the others
    for rank, report in enumerate(outcome.reports):
        if report is None:
            continue
        if asked == "raise":
            late = rank != case.victim and "which gave up" in report.text  # as the others raised
            if told not in report.text and not late:
                yield f"rank {rank} should have raised: {_of(report)}"
            if rank != case.victim and not report.finite:
                yield f"rank {rank} has taken NaN in before it raised"
            continue
        if report.outcome != "finished":
            yield f"rank {rank} has not finished: {_of(report)}"
        if asked == "exclude" and not report.finite:
            yield f"rank {rank} is not finite"
        # Eager ones may have sent it on before they are told.
        wanted = "NaN or infinity" if case.strategy in EAGER else told
        heard = any(wanted in line for line in report.warnings)
        if not heard and (rank == case.victim or not serves) and "selsync" not in case.strategy:
            yield f"rank {rank} was not told: {report.warnings}"


def _of(report: Report | None) -> str:
    return "no report" if report is None else f"{report.outcome}, step {report.step}: {report.text}"


def _told(outcome: Outcome) -> str:
    return "; ".join(f"rank {rank}: {_of(one)}" for rank, one in enumerate(outcome.reports))


def needs_checkpoints(case: Case) -> bool:
    """Whether the fault is one while checkpoints are written or read."""
    return case.kind in SAVING
