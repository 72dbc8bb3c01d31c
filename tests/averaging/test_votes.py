"""Votes and tallies: what a round sums."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat import OffbeatError
from offbeat.averaging.rounds import NonFiniteCheck
from offbeat.averaging.votes import Sums, Vote

VOTE = Vote(1.0, True, False, 1.0, 0, 0, True, 0)


def summed(votes: Sequence[Vote], dtype: torch.dtype) -> list[float]:
    """The sums as a message of that dtype gives them."""
    total = torch.zeros(len(votes[0].encode()), dtype=dtype)
    for vote in votes:
        total += torch.tensor(vote.encode(), dtype=dtype)
    sums: list[float] = total.double().tolist()
    return sums


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 9)), min_size=1, max_size=40),
    st.integers(0, 5000),
    st.integers(0, 10**7),
    st.sampled_from([torch.float32, torch.float64]),
    st.data(),
)
def test_a_tally_is_the_sum_of_the_votes(
    rows: list[tuple[bool, bool, int]], view: int, number: int, dtype: torch.dtype, data: Any
) -> None:
    """Weights, counts and numbers; in float32, too, which carries votes behind gradients."""
    sick = data.draw(st.sets(st.integers(0, len(rows) - 1), max_size=3))
    votes = [
        Vote(
            weight=float(stepping),
            stepping=stepping,
            finishing=finishing,
            wanted=float(wanted),
            view=view,
            round=number,
            finite=rank not in sick,
            rank=rank,
            also=finishing and not stepping,
            numbers=(float(rank), 0.5),
            step=number + rank,
        )
        for rank, (stepping, finishing, wanted) in enumerate(rows)
    ]
    tally = votes[0].tally(summed(votes, dtype), len(votes))
    assert tally == Sums(
        weight=sum(stepping for stepping, _, _ in rows),
        stepping=sum(stepping for stepping, _, _ in rows),
        finishing=sum(finishing for _, finishing, _ in rows),
        wanted=sum(wanted for _, _, wanted in rows),
        also=sum(finishing and not stepping for stepping, finishing, _ in rows),
        non_finite=len(sick),
        non_finite_rank=next(iter(sick)) if len(sick) == 1 else None,
        numbers=(sum(range(len(rows))), 0.5 * len(rows)),
        steps=tally.steps,
    )
    steps = sum(number + rank for rank in range(len(rows)))
    assert tally.steps == pytest.approx(steps, rel=0 if steps < 2**24 else 1e-5)


@pytest.mark.parametrize("rank", [0, 1, 4094, 4095, 100_000])
def test_the_rank_of_the_only_non_finite_worker_is_known(rank: int) -> None:
    """In float32 for ranks below 4095; in float64 for all."""
    votes = [VOTE, dataclasses.replace(VOTE, finite=False, rank=rank)]
    for dtype in (torch.float32, torch.float64):
        tally = VOTE.tally(summed(votes, dtype), 2)
        if dtype == torch.float64 or rank < 4095:
            assert (tally.non_finite, tally.non_finite_rank) == (1, rank)


@pytest.mark.parametrize("other", [{"round": 1}, {"view": 1}, {"round": 1023}])
def test_workers_in_different_rounds_are_told_apart(other: dict[str, int]) -> None:
    """One that continued after an interruption must not be averaged with the next round."""
    votes = [VOTE, dataclasses.replace(VOTE, **other)]  # type: ignore[arg-type]
    with pytest.raises(OffbeatError, match="not in the same round: this one is in round 0 of view"):
        VOTE.tally(summed(votes, torch.float64), 2)


def test_several_non_finite_workers_are_counted() -> None:
    """``training/test_non_finite`` tests the policies with one of them."""
    with pytest.raises(OffbeatError, match=r"^2 workers would contribute NaN or .* at step 5"):
        NonFiniteCheck(0, "raise")(Sums(1.0, 3, 0, 0.0, non_finite=2), 5)
