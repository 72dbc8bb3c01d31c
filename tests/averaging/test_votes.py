"""Votes and their sum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat import OffbeatError
from offbeat.averaging.rounds import VoteCheck
from offbeat.averaging.votes import Vote

VOTE = Vote(weight=1.0, stepping=True, wanted=1.0)


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 9)), min_size=1, max_size=40),
    st.integers(0, 10**7),
)
def test_the_sum_of_the_votes(rows: list[tuple[bool, bool, int]], number: int) -> None:
    """Weights, counts and numbers; exact for steps above 2²⁴, too."""
    votes = [
        Vote(
            weight=float(stepping),
            stepping=stepping,
            finishing=finishing,
            also=finishing and not stepping,
            wanted=float(wanted),
            round=number,
            step=10 * number + rank,
            numbers=(float(rank), 0.5),
        )
        for rank, (stepping, finishing, wanted) in enumerate(rows)
    ]
    workers = len(rows)
    assert VoteCheck(0, "raise")([vote.row() for vote in votes]) == Vote(
        weight=sum(stepping for stepping, _, _ in rows),
        stepping=sum(stepping for stepping, _, _ in rows),
        finishing=sum(finishing for _, finishing, _ in rows),
        also=sum(finishing and not stepping for stepping, finishing, _ in rows),
        wanted=sum(wanted for _, _, wanted in rows),
        finite=workers,
        round=number * workers,
        step=10 * number * workers + sum(range(workers)),
        numbers=(sum(range(workers)), 0.5 * workers),
    )


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
