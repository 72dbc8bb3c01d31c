"""What must hold after a fault: the promises of docs/failures.md."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.soak.plan import BY_ITSELF, EAGER, Case
from benchmarks.soak.records import FIRST_STEP, Report
from benchmarks.soak.runner import Outcome

# Limits of ``Report.spread``. Over a quantized wire, numbers that differ in the last bit may be
# rounded to different ones.
_EXACT_SPREAD, _QUANTIZED_SPREAD = 1e-5, 1e-3
SLACK_SECONDS = 1.0
"""Added to every time limit, because four workers share two cores."""
_DETACH_SECONDS = 2.5
_VICTIM_RAISES = {"exception": "UserError", "detach": "UserError", "interrupt": "KeyboardInterrupt"}


@dataclass(frozen=True)
class Verdict:
    """Result of a fault.

    Attributes:
        violations: Differences from the documentation; none if the fault was survived.
        notice_seconds: Longest time of a survivor from the fault, or from its next blocking call,
            to its exception or its next step.
        missed: True if the fault came too late to happen.
    """

    violations: list[str]
    notice_seconds: float = 0.0
    missed: bool = False


def judge(case: Case, outcomes: list[Outcome], expected: list[str] | None) -> Verdict:
    """Compare all runs of a fault with the promises.

    Args:
        case: The fault.
        outcomes: Outcome of the run with the fault, then of runs that resume from checkpoints.
        expected: ``Report.values`` of a run without a fault; None if they vary.
    """
    first, *later = outcomes
    found = list(_check_integrity(case, outcomes))
    if first.fault_at is None and case.kind != "kill before attach":
        if not all(r is not None and r.outcome == "finished" for r in first.reports):
            reports = "; ".join(f"rank {i}: {text_of(r)}" for i, r in enumerate(first.reports))
            found.append(f"no fault was injected, and the run failed: {reports}")
        return Verdict(found, missed=True)
    others = [one for rank, one in enumerate(first.reports) if rank not in case.victims]
    done = all(one is not None and one.outcome == "finished" for one in others)
    if done and case.victims and case.victims <= _too_late(case, first):
        return Verdict(found, missed=True)  # the victims had taken part in everything
    found += _check_survivors(case, first)
    found += _check_victims(case, first)
    for outcome in later:
        found += _check_finished(case, outcome, expected)
    return Verdict(found, _notice_seconds(case, first))


def _check_survivors(case: Case, outcome: Outcome) -> Iterator[str]:
    """Yield violations by workers that are no victims, in the run with the fault."""
    if case.kind in ("pause", "slow"):
        yield from _check_finished(case, outcome, None)
    elif case.kind == "not finite":
        yield from _check_non_finite(case, outcome)
    elif case.kind != "kill all in save":
        yield from _check_errors(case, outcome)


def _check_errors(case: Case, outcome: Outcome) -> Iterator[str]:
    kind, text, seconds = _promised_error(case)
    for rank, report in enumerate(outcome.reports):
        if rank == case.victim or report is None:
            continue
        if report.outcome == "finished":
            yield f"rank {rank} has finished"
        elif kind not in report.kinds:
            yield f"rank {rank} raised {report.outcome}: {report.text}"
        elif not re.search(text, report.text):
            yield f"rank {rank} does not say {text!r}: {report.text}"
        yield from _check_wait(rank, report, outcome, seconds)


def _notice_seconds(case: Case, outcome: Outcome) -> float:
    """Return the longest time that a survivor took to notice the fault."""
    others = [r for i, r in enumerate(outcome.reports) if r is not None and i != case.victim]
    failed = [r for r in others if r.outcome != "finished"]
    return max((_waited(outcome, r.at, r.since) for r in failed), default=0.0)


def _check_victims(case: Case, outcome: Outcome) -> Iterator[str]:
    """Yield violations by victims that live."""
    for rank in case.victims:
        report = outcome.reports[rank]
        if report is None:
            continue
        wanted = "CommunicationError" if rank == case.silent else _VICTIM_RAISES.get(case.kind)
        if wanted is not None and wanted not in report.kinds:
            yield f"rank {rank}, the victim, ended with {report.outcome}: {report.text}"
        waited = report.at - (outcome.fault_at or report.at)
        if case.kind == "interrupt" and waited > 0.2 + SLACK_SECONDS:
            yield f"Ctrl-C took {waited:.1f} s to take effect"
        lived = report.at > (outcome.fault_at or 0.0)  # otherwise it had ended before the fault
        if case.kills and lived and rank not in {case.silent, *_too_late(case, outcome)}:
            yield f"rank {rank} was killed, and reports {report.outcome}"


def _too_late(case: Case, outcome: Outcome) -> set[int]:
    """Return the victims that had, or may have had, finished before the fault."""
    if case.kind in (*BY_ITSELF, "pause"):
        return set()
    return {rank for rank in case.victims if outcome.reached[rank] >= FIRST_STEP + case.steps}


def _promised_error(case: Case) -> tuple[str, str, float]:
    """Return class and text of the survivors' error, and its time limit in seconds."""
    rank = f"rank {case.victim}"
    lost_store = case.own_store and case.victim == 0
    if case.kind in ("stop", "unplug"):
        seconds = case.timeout_seconds + 3 + lost_store
        return "CommunicationTimeout", f"no answer from .*{rank}", seconds
    if case.kind == "kill before attach":
        return "CommunicationError", f"{rank}|opening connections", case.timeout_seconds
    if lost_store:  # the exit reason was in the store
        return "CommunicationError", f"lost the connection to .*{rank}", 2.0
    gave_up = case.kind in ("exception", "detach", "interrupt")
    how = "gave up" if gave_up else "died or was cut off"
    return "CommunicationError", f"lost the connection to .*{rank}, which {how}", 2.0


def _waited(outcome: Outcome, at: float, since: float) -> float:
    """Return the seconds to ``at`` from the fault, or from a later blocking call at ``since``."""
    return at - max(outcome.fault_at or 0.0, since)


def _check_wait(rank: int, report: Report, outcome: Outcome, seconds: float) -> Iterator[str]:
    """Yield a violation if a worker's error took longer than promised."""
    took = _waited(outcome, report.at, report.since)
    if took > seconds + SLACK_SECONDS:
        yield f"rank {rank} took {took:.1f} s, at most {seconds:g} s are promised"


def _check_integrity(case: Case, outcomes: list[Outcome]) -> Iterator[str]:
    """Yield hangs, leftovers, unexpected exits, and models with a mean that was applied in part."""
    limit = _EXACT_SPREAD if case.wire == "float32" else _QUANTIZED_SPREAD
    for outcome in outcomes:
        name = outcome.run.name
        for rank in outcome.hung:
            yield f"{name}: rank {rank} hangs: {outcome.said}"
        for one in outcome.left:
            yield f"{name}: left behind: {one}"
        for rank, report in enumerate(outcome.reports):
            status = outcome.statuses[rank]
            broken = outcome.run.breaks and rank in case.victims
            if report is None:
                if not broken:
                    yield f"{name}: rank {rank} ended with {status}: {outcome.said}"
                continue
            killed = status == -9 and broken  # after its report
            if status != 0 and rank not in outcome.hung and not killed:
                yield f"{name}: rank {rank} ended with {status} after its report: {outcome.said}"
            if not report.finite and case.kind != "not finite":
                yield f"{name}: the model of rank {rank} is not finite"
            # A Ctrl-C may interrupt the optimizer between two parameters.
            interrupted = case.kind == "interrupt" and rank == case.victim and outcome.run.breaks
            if report.spread > limit and not interrupted:
                yield (
                    f"{name}: rank {rank} applied a mean in part: numbers that must be equal are "
                    f"{report.spread:.2g} apart"
                )
            detached = report.left - report.at
            if detached > _DETACH_SECONDS + SLACK_SECONDS:
                yield f"{name}: rank {rank} took {detached:.1f} s to detach"
            leaks = report.descriptors > 0 or report.threads > 0
            if leaks and not _may_leak(case, rank, report):
                yield (
                    f"{name}: rank {rank} keeps {report.descriptors} descriptors and "
                    f"{report.threads} threads"
                )


def _may_leak(case: Case, rank: int, report: Report) -> bool:
    """Return True if it is known that a worker keeps these descriptors and threads for a while."""
    # A request to a store that does not answer blocks in threads of its own.
    unanswered = case.own_store and case.victim == 0 and case.kind == "stop"
    cut_off = case.kind == "unplug" and rank == case.victim and report.descriptors <= 0
    return unanswered or cut_off


def _check_finished(case: Case, outcome: Outcome, expected: list[str] | None) -> Iterator[str]:
    """Yield violations unless all workers finished with the same, expected model."""
    if outcome.run.until is not None:
        return
    reports = [report for report in outcome.reports if report is not None]
    for rank, report in enumerate(outcome.reports):
        if report is None or report.outcome != "finished" or report.step != case.steps:
            yield f"{outcome.run.name}: rank {rank} has not finished: {text_of(report)}"
    if any(report.values != reports[0].values for report in reports):
        yield f"{outcome.run.name}: the models differ: {[r.values for r in reports]}"
    if len({report.loaded for report in reports}) > 1:
        yield f"{outcome.run.name}: loaded {[r.loaded for r in reports]}"
    if expected is not None and reports and reports[0].values != expected:
        yield (
            f"{outcome.run.name}: {reports[0].values} after step {reports[0].loaded}, and "
            f"{expected} without a fault"
        )


def _check_non_finite(case: Case, outcome: Outcome) -> Iterator[str]:
    """Yield violations of the promises of ``non_finite``."""
    message = f"rank {case.victim} would contribute NaN or infinity"
    for rank, report in enumerate(outcome.reports):
        if report is None:
            continue
        if case.non_finite == "raise":
            # A worker may see that the others gave up before it sees the reason.
            late = rank != case.victim and "which gave up" in report.text
            if message not in report.text and not late:
                yield f"rank {rank} should have raised: {text_of(report)}"
            if rank != case.victim and not report.finite:
                yield f"rank {rank} took NaN into its model before it raised"
            continue
        if report.outcome != "finished":
            yield f"rank {rank} has not finished: {text_of(report)}"
        # With an eager schedule a NaN may spread before the vote that reports it.
        wanted = "NaN or infinity" if case.strategy in EAGER else message
        warned = any(wanted in line for line in report.warnings)
        if not warned and "selsync" not in case.strategy:
            yield f"rank {rank} logged no warning: {report.warnings}"


def text_of(report: Report | None) -> str:
    """Return outcome, step and error of a report as text."""
    return "no report" if report is None else f"{report.outcome}, step {report.step}: {report.text}"
