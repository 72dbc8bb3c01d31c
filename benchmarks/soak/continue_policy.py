"""``Continue``: the promises of docs/failures.md, where training continues without lost workers."""

import re
from collections.abc import Iterator

from typing_extensions import override

from benchmarks.soak import policy
from benchmarks.soak.model import RATE
from benchmarks.soak.plan import EAGER, WITH_NEWCOMER, Case
from benchmarks.soak.policy import Policy, check_finished, check_wait, waited
from benchmarks.soak.records import FIRST_STEP, Report
from benchmarks.soak.runner import Outcome

_DEATH_SECONDS = 1.0  # detection is well below a second, and so is the view change
_LEAVING_SECONDS = 2.0  # for a worker that lives, and closes its connections
_JOINING_SECONDS = 2.0  # the members check for newcomers once a second
_STORE_SECONDS = 2.0
_EXACT_STEPS = 1e-5
_COUNTED = (
    *("bsp", "local:period=2", "selsync:delta=0.3", "selsync:delta=0.3,aggregate=gradients"),
    *("diloco:period=3,outer_lr=1,outer_momentum=0", "async:staleness=4"),
    *("async:staleness=4,schedule=eager", "streaming:parts=3,staleness=4,outer_gain=1"),
)
"""Strategies without an outer step that would change the counted steps."""


class Continue(Policy):
    """The other workers finish all their steps with one model, and admit newcomers."""

    @override
    def check_survivors(self, case: Case, outcome: Outcome) -> Iterator[str]:
        if promised := _promised_end(case):
            yield from _check_all_raise(case, outcome, *promised)
            return
        if case.kind in ("pause", "slow"):
            yield from check_finished(case, outcome, None)
        else:
            yield from _check_all_finish(case, outcome)
            yield from _check_times(case, outcome)
        yield from _check_views(case, outcome)
        yield from _check_steps(case, outcome)

    @override
    def notice_seconds(self, case: Case, outcome: Outcome) -> float:
        if _promised_end(case):
            left = [report for _, report in _survivors(case, outcome)]
            return max((waited(outcome, r.at, r.since) for r in left), default=0)
        return max((seconds for _, seconds in _times(case, outcome)), default=0.0)

    @override
    def unresponsive_error(self, case: Case) -> str:
        cut = "|cannot be reached" if case.kind == "unplug" else ""
        return f"was left behind at step|the others have ended the training{cut}"


def _promised_end(case: Case) -> tuple[str, float] | None:
    """Return error text and time limit where no worker can continue; otherwise None."""
    if case.own_store and case.kills and 0 in case.victims:
        text = r"the store of the process group at .*, which rank 0 kept, cannot be reached"
        return text, _DEATH_SECONDS + _STORE_SECONDS
    if case.kind == "below minimum":
        text = f"{case.workers - 1} workers are left .*min_workers={case.min_workers}"
        return text, _DEATH_SECONDS
    return None


def _survivors(case: Case, outcome: Outcome) -> list[tuple[int, Report]]:
    """Return rank and report of the workers that are no victims."""
    return [
        (rank, report)
        for rank, report in enumerate(outcome.reports)
        if report is not None and rank not in case.victims
    ]


def _check_all_raise(case: Case, outcome: Outcome, text: str, seconds: float) -> Iterator[str]:
    for rank, report in _survivors(case, outcome):
        if rank >= case.workers:
            continue  # a newcomer may see the end of the training in several ways
        if "CommunicationError" not in report.kinds:
            yield f"rank {rank} ended with {report.outcome}, step {report.step}: {report.text}"
        elif not re.search(text, report.text):
            yield f"rank {rank} does not say {text!r}: {report.text}"
        yield from check_wait(rank, report, outcome, seconds)


def _came_too_late(case: Case, rank: int, report: Report) -> bool:
    """Return True for a newcomer that was not admitted before the end of the training."""
    return rank >= case.workers and "has ended" in report.text


def _check_all_finish(case: Case, outcome: Outcome) -> Iterator[str]:
    done = [
        (rank, report)
        for rank, report in enumerate(outcome.reports)
        if report is not None and report.outcome == "finished"
    ]
    for rank, report in _survivors(case, outcome):
        if _came_too_late(case, rank, report):
            continue
        if report.outcome != "finished" or report.step != case.steps:
            yield f"rank {rank} has not finished: {report.outcome}, {report.step}: {report.text}"
    for rank, report in done[1:]:
        if report.values != done[0][1].values:
            yield f"rank {rank} ends with {report.values}, rank {done[0][0]} {done[0][1].values}"


def _check_views(case: Case, outcome: Outcome) -> Iterator[str]:
    """Check the members of the last view, and that there were no needless view changes."""
    unchanged = case.kind in ("pause", "slow")
    joined = {
        rank
        for rank, report in _survivors(case, outcome)
        if rank >= case.workers and not _came_too_late(case, rank, report)
    }
    lost = set() if unchanged else {*case.victims}
    expected = {*range(case.workers), *joined} - lost
    # A victim that had taken all steps may have been a member of the last view.
    perhaps = {r for r in case.victims if outcome.reached[r] >= FIRST_STEP + case.steps}
    # A newcomer that was killed may have been admitted before, and is lost then.
    most = 0 if unchanged else len(lost) + len(joined) + (case.kind == "kill newcomer")
    for rank, report in _survivors(case, outcome):
        if report.outcome != "finished":
            continue
        if {*report.members} - perhaps != expected - perhaps:
            yield f"rank {rank} has members {report.members}, expected {sorted(expected)}"
        if report.changes > most:
            yield f"rank {rank} has changed views {report.changes} times, {most} at most expected"
        if report.begun and rank < case.workers:
            yield f"rank {rank} began at step {report.begun}"


def _check_steps(case: Case, outcome: Outcome) -> Iterator[str]:
    """Check that no survivor's step is lost or counts twice: each moves ``steps`` by the rate."""
    if not case.counts or case.strategy not in _COUNTED:
        return
    done = [(rank, r) for rank, r in _survivors(case, outcome) if r.outcome == "finished"]
    shares = [report.shares for _, report in done]
    # At a view change models that differ are averaged, and each worker continues from its own
    # step. A worker that has taken its last step takes part in further means with weight 0. A
    # worker that is lost later has had fewer steps in the mean, or more.
    in_step = not done or max(shares) - min(shares) < _EXACT_STEPS
    exact = in_step and case.second < 0
    exact = exact and case.kind not in WITH_NEWCOMER and case.strategy not in EAGER
    margin = 0.0 if exact else 4.0
    least, most = case.steps - margin, case.steps + margin
    for rank, report in done:
        moved = -float.fromhex(report.values[-1]) / RATE
        if not least - _EXACT_STEPS < moved < most + _EXACT_STEPS:
            yield f"rank {rank} has the model of {moved:.4f} steps, not {least:g} to {most:g}"


def _times(case: Case, outcome: Outcome) -> Iterator[tuple[int, float]]:
    """Yield each survivor's time to its first step without the lost, or with the new, worker."""
    fault = outcome.fault_at or 0.0
    for rank, report in _survivors(case, outcome):
        for _, members, at, since in report.entered:
            still_there = case.victims & {*members}
            not_yet = case.kind == "join" and case.workers not in members
            if at < fault or still_there or not_yet:
                continue
            # An unresponsive worker blocks only workers that need it.
            yield rank, at - (fault if case.silent < 0 else max(fault, since))
            break


def _check_times(case: Case, outcome: Outcome) -> Iterator[str]:
    for rank, seconds in _times(case, outcome):
        limit = _DEATH_SECONDS
        if case.silent >= 0:  # until the time-out, and until no worker waits any more
            limit = (3 if case.kind == "stop in change" else 2) * case.timeout_seconds
        elif case.kind in ("exception", "detach", "interrupt"):
            limit = _LEAVING_SECONDS
        elif case.kind in ("join", "kill newcomer") or rank >= case.workers:
            limit = _JOINING_SECONDS
        if seconds > limit + policy.SLACK_SECONDS:
            yield f"rank {rank} continued after {seconds:.1f} s, {limit:g} s are promised"
