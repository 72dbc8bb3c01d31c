"""What must hold where training goes on without who is lost: the promises of docs/elastic.md."""

import re
from collections.abc import Iterator

from typing_extensions import override

from benchmarks.soak.model import RATE
from benchmarks.soak.perform import Outcome
from benchmarks.soak.plan import EAGER, JOINING, Case
from benchmarks.soak.policy import SLACK_SECONDS, Policy, finished
from benchmarks.soak.worker import FIRST_STEP, Report

_DEATH_SECONDS = 1.0  # "at once" is well below a second, and so is the change itself
_LEAVING_SECONDS = 2.0  # of one that lives, and has connections to give back
_JOINING_SECONDS = 2.0  # the members look once a second
_STORE_SECONDS = 2.0
_EXACT = 1e-5  # of a step
_COUNTED = (
    *("bsp", "local:period=2", "selsync:delta=0.3", "selsync:delta=0.3,aggregate=gradients"),
    *("diloco:period=3,outer_lr=1,outer_momentum=0", "async:staleness=4"),
    *("async:staleness=4,schedule=eager", "streaming:parts=3,staleness=4,outer_gain=1"),
)


class Continue(Policy):
    """The others go on, with all their steps and one model, and take in who joins."""

    @override
    def survivors(self, case: Case, outcome: Outcome) -> Iterator[str]:
        if case.kind in ("pause", "slow"):
            yield from finished(case, outcome, None)
            yield from _members(case, outcome)
            yield from _steps(case, outcome)
            return
        if promised := _end_of_all(case):
            yield from _all_raise(case, outcome, *promised)
            return
        yield from _all_finish(case, outcome)
        yield from _members(case, outcome)
        yield from _steps(case, outcome)
        yield from _in_time(case, outcome)

    @override
    def noticed(self, case: Case, outcome: Outcome) -> float:
        if _end_of_all(case):
            return max((_since(outcome, r.at, r.since) for _, r in _left(case, outcome)), default=0)
        return max((seconds for _, seconds in _seconds(case, outcome)), default=0.0)

    @override
    def silent_one(self, case: Case) -> str:
        cut = "|cannot be reached" if case.kind == "unplug" else ""
        return f"was left behind at step|the others have ended the training{cut}"


def _end_of_all(case: Case) -> tuple[str, float] | None:
    """What all others raise, and after how long, where nobody can go on."""
    if case.own_store and case.kills and 0 in case.victims:
        return r"the store of the process group at .*, which rank 0 kept, cannot be reached", (
            _DEATH_SECONDS + _STORE_SECONDS
        )
    if case.kind == "below minimum":
        return f"{case.workers - 1} workers are left .*min_workers={case.min_workers}", (
            _DEATH_SECONDS
        )
    return None


def _left(case: Case, outcome: Outcome) -> list[tuple[int, Report]]:
    """Those to whom nothing was done."""
    return [
        (rank, report)
        for rank, report in enumerate(outcome.reports)
        if report is not None and rank not in case.victims
    ]


def _all_raise(case: Case, outcome: Outcome, text: str, seconds: float) -> Iterator[str]:
    for rank, report in _left(case, outcome):
        if rank >= case.workers:
            continue  # who joins what has ended is told so in several ways
        if "CommunicationError" not in report.kinds:
            yield f"rank {rank} ended with {report.outcome}, step {report.step}: {report.text}"
        elif not re.search(text, report.text):
            yield f"rank {rank} does not say {text!r}: {report.text}"
        waited = _since(outcome, report.at, report.since)
        if waited > seconds + SLACK_SECONDS:
            yield f"rank {rank} took {waited:.1f} s, at most {seconds:g} s are promised"


def _came_too_late(case: Case, rank: int, report: Report) -> bool:
    """Whether training had ended before a newcomer was taken in."""
    return rank >= case.workers and "has ended" in report.text


def _all_finish(case: Case, outcome: Outcome) -> Iterator[str]:
    done = [
        (rank, report)
        for rank, report in enumerate(outcome.reports)
        if report is not None and report.outcome == "finished"
    ]
    for rank, report in _left(case, outcome):
        if _came_too_late(case, rank, report):
            continue
        if report.outcome != "finished" or report.step != case.steps:
            yield f"rank {rank} has not finished: {report.outcome}, {report.step}: {report.text}"
    for rank, report in done[1:]:
        if report.values != done[0][1].values:
            yield f"rank {rank} ends with {report.values}, rank {done[0][0]} {done[0][1].values}"


def _members(case: Case, outcome: Outcome) -> Iterator[str]:
    """The last view has those who are there, and there were no more views than reasons for one."""
    unchanged = case.kind in ("pause", "slow")
    came = {
        rank
        for rank, report in _left(case, outcome)
        if rank >= case.workers and not _came_too_late(case, rank, report)
    }
    lost = set() if unchanged else {*case.victims}
    expected = {*range(case.workers), *came} - lost
    # Who had all steps behind it may have taken part in the last view.
    perhaps = {r for r in case.victims if outcome.reached[r] >= FIRST_STEP + case.steps}
    # A newcomer that was killed may have been taken in before, and is lost then.
    most = 0 if unchanged else len(lost) + len(came) + (case.kind == "kill newcomer")
    for rank, report in _left(case, outcome):
        if report.outcome != "finished":
            continue
        if {*report.members} - perhaps != expected - perhaps:
            yield f"rank {rank} has members {report.members}, expected {sorted(expected)}"
        if report.changes > most:
            yield f"rank {rank} has changed views {report.changes} times, {most} at most expected"
        if report.begun and rank < case.workers:
            yield f"rank {rank} began at step {report.begun}"


def _steps(case: Case, outcome: Outcome) -> Iterator[str]:
    """No step of those who are there is lost, or counts twice: each moves ``steps`` by the rate.

    Only over an exact wire; and not where there is an outer step.
    """
    if not case.counts or case.strategy not in _COUNTED:
        return
    done = [(rank, r) for rank, r in _left(case, outcome) if r.outcome == "finished"]
    least, most = _moved(case, [report for _, report in done])
    for rank, report in done:
        moved = -float.fromhex(report.values[-1]) / RATE
        if not least - _EXACT < moved < most + _EXACT:
            yield f"rank {rank} has the model of {moved:.4f} steps, not {least:g} to {most:g}"


def _moved(case: Case, done: list[Report]) -> tuple[float, float]:
    """How many steps the model may have gone."""
    # Those who have gone apart are averaged when a view changes, and each goes on from its own
    # step. Who has come to its last one then takes part in further means with weight 0; and of one
    # that is lost later the mean has had fewer steps, or more.
    alike = max(r.shares for r in done) - min(r.shares for r in done) < _EXACT if done else True
    exact = alike and case.second < 0 and case.kind not in JOINING and case.strategy not in EAGER
    apart = 0.0 if exact else 4.0
    return case.steps - apart, case.steps + apart


def _since(outcome: Outcome, at: float, since: float) -> float:
    return at - max(outcome.fault_at or 0.0, since)


def _seconds(case: Case, outcome: Outcome) -> Iterator[tuple[int, float]]:
    """How long each took, until it had stepped in a view without the lost, or with the new one."""
    fault = outcome.fault_at or 0.0
    for rank, report in _left(case, outcome):
        for _, members, at, since in report.entered:
            there = case.victims & {*members}
            new = case.kind == "join" and case.workers not in members
            if at < fault or there or new:
                continue
            # One that is silent keeps nobody from working who does not need it.
            yield rank, at - (fault if case.silent < 0 else max(fault, since))
            break


def _in_time(case: Case, outcome: Outcome) -> Iterator[str]:
    for rank, seconds in _seconds(case, outcome):
        limit = _DEATH_SECONDS
        if case.silent >= 0:  # until it is noticed, and until nobody waits any more
            limit = (3 if case.kind == "stop in change" else 2) * case.timeout_seconds
        elif case.kind in ("exception", "detach", "interrupt"):
            limit = _LEAVING_SECONDS
        elif case.kind in ("join", "kill newcomer") or rank >= case.workers:
            limit = _JOINING_SECONDS
        if seconds > limit + SLACK_SECONDS:
            yield f"rank {rank} went on after {seconds:.1f} s, {limit:g} s are promised"
