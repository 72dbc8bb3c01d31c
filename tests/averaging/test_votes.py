"""Votes and their sum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat import MismatchError, OffbeatError
from offbeat.averaging.rounds import VoteCheck
from offbeat.averaging.votes import ALSO, CALLS, Vote

VOTE = Vote(weight=1.0, stepping=True, flight_steps=1.0)


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 9)), min_size=1, max_size=40),
    st.integers(0, 10**7),
)
def test_the_sum_of_the_votes(rows: list[tuple[bool, bool, int]], number: int) -> None:
    """Weights, counts, calls and numbers; exact for steps above 2²⁴, too."""
    votes = [
        Vote(
            weight=float(stepping),
            stepping=stepping,
            call=0 if stepping else CALLS["finish()"] + ALSO if finishing else CALLS["consensus()"],
            optimizer=3 if stepping else 0,
            flight_steps=float(wanted),
            round=number,
            step=10 * number + rank,
            numbers=(float(rank), 0.5),
        )
        for rank, (stepping, finishing, wanted) in enumerate(rows)
    ]
    workers = len(rows)
    finishing = any(ends and not steps for steps, ends, _ in rows)
    sums = VoteCheck(0, "raise")([vote.row() for vote in votes])
    assert sums.has(ALSO) == sums.is_in("finish()") == finishing
    assert sums.is_in("consensus()") == any(not (steps or ends) for steps, ends, _ in rows)
    assert sums == Vote(
        weight=sum(stepping for stepping, _, _ in rows),
        stepping=sum(stepping for stepping, _, _ in rows),
        call=sums.call,
        optimizer=3 * any(stepping for stepping, _, _ in rows),
        flight_steps=sum(wanted for _, _, wanted in rows),
        finite=workers,
        round=number * workers,
        step=10 * number * workers + sum(range(workers)),
        numbers=(sum(range(workers)), 0.5 * workers),
    )


def waiting(call: str, step: int = 7) -> Vote:
    return Vote(call=CALLS[call], step=step)


SECOND = VOTE._replace(step=7, optimizer=1)


def test_calls_that_do_not_belong_together_are_named() -> None:
    """Of three workers those that differ. ``training/test_mismatches`` has further calls."""
    message = (
        r"^rank 0 steps optimizer 0 \(SGD\) at step 7, rank 2 steps optimizer 1 \(Adam\) at step 7"
    )
    votes = [VOTE._replace(step=7), waiting("consensus()"), SECOND]
    with pytest.raises(MismatchError, match=message):
        VoteCheck(0, "raise", ["SGD", "Adam"])([vote.row() for vote in votes])


def test_steps_to_a_common_save_and_finish_next_to_consensus_are_legal() -> None:
    """Without a common barrier in each step, a worker may reach the step of a save later."""
    votes = [waiting("offbeat.save()"), VOTE._replace(step=6), VOTE._replace(step=7)]
    assert VoteCheck(0, "raise")([vote.row() for vote in votes]).stepping == 2
    votes = [waiting("finish()"), waiting("consensus()", 3), SECOND]
    assert VoteCheck(0, "raise")([vote.row() for vote in votes]).optimizer == 1


def test_workers_in_different_rounds_are_told_apart() -> None:
    """One that continued after an interruption must not be averaged with the next round."""
    votes = [VOTE, VOTE, VOTE._replace(round=1)]
    with pytest.raises(OffbeatError, match=r"rank 0 is in round 0, rank 2 in round 1\. One"):
        VoteCheck(0, "raise")([vote.row() for vote in votes])


@pytest.mark.parametrize(("wrong", "names"), [([2], "rank 2"), ([0, 2], "ranks 0, 2")])
def test_all_non_finite_workers_are_named(wrong: list[int], names: str) -> None:
    """``training/test_non_finite`` tests the policies."""
    votes = [VOTE._replace(finite=rank not in wrong, step=5) for rank in range(4)]
    with pytest.raises(OffbeatError, match=f"^{names} would contribute NaN or .* at step 5"):
        VoteCheck(0, "raise")([vote.row() for vote in votes])
