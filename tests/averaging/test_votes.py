"""Votes and tallies: what a round sums, and what the policy for non-finite values makes of it."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat import MismatchError, OffbeatError
from offbeat.averaging.finite import NonFiniteCheck
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
            numbers=(float(rank), 0.5),
            step=number + rank,
            anchor=15,
        )
        for rank, (stepping, finishing, wanted) in enumerate(rows)
    ]
    tally = votes[0].tally(summed(votes, dtype), len(votes))
    assert tally == Sums(
        weight=sum(stepping for stepping, _, _ in rows),
        stepping=sum(stepping for stepping, _, _ in rows),
        finishing=sum(finishing for _, finishing, _ in rows),
        wanted=sum(wanted for _, _, wanted in rows),
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


def test_workers_with_different_loaded_models_are_told_apart() -> None:
    """The error says which of them this worker is. Their round does not matter."""
    votes = [
        dataclasses.replace(VOTE, round=9, rank=i, anchor=a) for i, a in ((0, 0), (1, 0), (2, 7))
    ]
    for vote, has in zip(votes, ("has not", "has not", "has"), strict=True):
        with pytest.raises(MismatchError, match=f"rank {vote.rank} {has} loaded values"):
            vote.tally(summed(votes, torch.float32), 3)


# -- the policy for non-finite values -------------------------------------------------------------

SICK = Sums(2.0, 3, 0, 0.0, non_finite=1, non_finite_rank=2)
SEVERAL = Sums(1.0, 3, 0, 0.0, non_finite=2)
ALL = Sums(0.0, 3, 0, 0.0, non_finite=3)


@pytest.mark.parametrize("policy", ["raise", "warn", "exclude"])
def test_a_finite_round_passes(policy: Any) -> None:
    sums = Sums(3.0, 3, 0, 0.0)
    assert NonFiniteCheck(0, policy)(sums, 5) is sums


def test_raise_names_the_worker_or_their_number() -> None:
    for sums, name in ((SICK, "rank 2"), (SEVERAL, "2 workers")):
        with pytest.raises(
            OffbeatError, match=f"^{name} would contribute NaN or infinity .*step 5"
        ):
            NonFiniteCheck(0, "raise")(sums, 5)


def test_only_policies_that_are_possible_are_suggested(caplog: pytest.LogCaptureFixture) -> None:
    for possible in (True, False):
        with pytest.raises(OffbeatError) as caught:
            NonFiniteCheck(0, "raise", can_exclude=possible)(SICK, 5)
        with caplog.at_level(logging.WARNING, logger="offbeat"):
            NonFiniteCheck(0, "warn", can_exclude=possible)(SICK, 5)
        for text in (str(caught.value), caplog.messages[-1]):
            assert ("exclude" in text) == possible


def test_warn_passes_it_on_and_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    check = NonFiniteCheck(1, "warn")
    with caplog.at_level(logging.WARNING, logger="offbeat"):
        assert check(SICK, 5) is SICK
        assert check(SEVERAL, 6) is SEVERAL
    (message,) = caplog.messages
    assert message.startswith("rank 1: rank 2 would contribute NaN")
    assert check.excluded == 0


def test_exclude_counts_and_needs_a_worker_that_contributes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those found after a vote count, too, on their own worker."""
    check = NonFiniteCheck(1, "exclude")
    with caplog.at_level(logging.WARNING, logger="offbeat"):
        assert check(SICK, 5) is SICK
        check(SEVERAL, 6)
        check.exclude_late(7)
    assert check.excluded == 1 + 2 + 1
    assert len(caplog.messages) == 1
    check.report_excluded()
    assert caplog.messages[1].startswith("rank 1: 4 contributions with NaN or infinity were excl")
    with pytest.raises(OffbeatError, match="no other worker contributes"):
        check(ALL, 8)
