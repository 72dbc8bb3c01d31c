"""Partitions: every sample in one part, the labels of each part as the rule says."""

import re
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat_lab.partition import partition_by_label, partition_dirichlet

few = settings(deadline=None, max_examples=30)
labels_of = st.lists(st.integers(-3, 5), min_size=1, max_size=80)


def by_label(labels: list[int], *settings: Any) -> list[Any]:
    return partition_by_label(torch.tensor(labels), *settings)


def dirichlet(labels: list[int], *settings: Any) -> list[Any]:
    return partition_dirichlet(torch.tensor(labels), *settings)


def shares_of(parts: list[Any], labels: int, each: int) -> Any:
    """The share that each worker has of each label, of which there are ``each`` samples in turn."""
    counts = [np.bincount(part // each, minlength=labels) for part in parts]
    return np.stack(counts) / each


def counts_of(labels: list[Any], parts: list[Any]) -> list[Counter[Any]]:
    return [Counter(labels[index] for index in part) for part in parts]


def as_lists(parts: list[Any]) -> list[list[int]]:
    return [part.tolist() for part in parts]


def holders_of(labels: list[Any], parts: list[Any]) -> dict[Any, list[int]]:
    """The samples that each holder of a label has, by label."""
    counts = counts_of(labels, parts)
    return {label: [c[label] for c in counts if c[label]] for label in set(labels)}


def exist(labels: list[int], workers: int, each: int) -> bool:
    """Whether N workers can hold `each` labels: a label serves at most one worker a sample."""
    sizes = Counter(labels)
    enough = sum(min(workers, size) for size in sizes.values())
    return each <= len(sizes) <= workers * each <= enough


@few
@given(labels_of, st.integers(1, 8), st.integers(1, 5), st.integers(0, 3))
def test_each_worker_holds_exactly_its_number_of_labels(
    labels: list[int], workers: int, each: int, seed: int
) -> None:
    """Every index once, exactly `each` labels a part, even splits; an error where none exists."""
    if not exist(labels, workers, each):
        with pytest.raises(ValueError, match="labels"):
            by_label(labels, workers, each, seed)
        return
    parts = by_label(labels, workers, each, seed)
    assert sorted(index for part in parts for index in part) == list(range(len(labels)))
    assert [len(counts) for counts in counts_of(labels, parts)] == [each] * workers
    for sizes in holders_of(labels, parts).values():
        assert max(sizes) - min(sizes) <= 1
    for part in parts:
        assert part.dtype == np.int64
        assert all(a < b for a, b in pairwise(part.tolist()))


@few
@given(labels_of, st.integers(1, 8), st.integers(1, 4))
def test_more_frequent_labels_have_more_holders(labels: list[int], workers: int, each: int) -> None:
    """Moving a place to another label would not make the parts more equal."""
    if not exist(labels, workers, each):
        return
    number = {
        label: len(sizes)
        for label, sizes in holders_of(labels, by_label(labels, workers, each)).items()
    }
    sizes = Counter(labels)
    for a in number:
        for b in number:
            if number[a] > 1 and number[b] < min(workers, sizes[b]):
                without = Fraction(sizes[a], number[a] - 1)
                assert without >= Fraction(sizes[b], number[b])


@few
@given(labels_of, st.integers(1, 6), st.floats(0.01, 100), st.integers(0, 3))
def test_dirichlet_parts_hold_every_index_once_and_are_not_empty(
    labels: list[int], workers: int, alpha: float, seed: int
) -> None:
    """Or an error says what to change. Empty parts are drawn again."""
    try:
        parts = dirichlet(labels, workers, alpha, seed)
    except ValueError as error:
        assert re.search("lower workers|need .* samples", str(error))  # noqa: PT017 - both allowed
        assert workers > 1
        return
    assert len(parts) == workers
    assert sorted(index for part in parts for index in part) == list(range(len(labels)))
    assert min(map(len, parts)) >= 1
    for part in parts:
        assert part.dtype == np.int64
        assert all(a < b for a, b in pairwise(part.tolist()))


@pytest.mark.parametrize("alpha", [0.03, 0.5, 20.0])
def test_shares_follow_the_dirichlet_distribution(alpha: float) -> None:
    """Mean 1/N, variance (N − 1)/N²/(Nα + 1), and P(share < ½) of the beta marginal for N = 2."""
    labels = torch.arange(4000).repeat_interleave(100)
    shares = shares_of(partition_dirichlet(labels, 4, alpha), 4000, 100)
    assert shares.mean(axis=1) == pytest.approx([0.25] * 4, abs=0.03)
    assert shares.var(axis=1) == pytest.approx([3 / 16 / (4 * alpha + 1)] * 4, rel=0.1)
    # Two of four workers together have a Beta(2α, 2α) share, symmetric around one half.
    assert ((shares[0] + shares[1]) < 0.5).mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-6])
def test_tiny_alpha_gives_each_label_to_one_worker(alpha: float) -> None:
    """Also if gamma variables underflow; each worker is equally likely."""
    labels = torch.arange(2000).repeat_interleave(3)
    shares = shares_of(partition_dirichlet(labels, 4, alpha), 2000, 3)
    assert set(shares.ravel().tolist()) == {0, 1}
    assert (shares > 0).sum(axis=1) == pytest.approx([500] * 4, abs=100)


LABELS = [index % 7 for index in range(200)]


@pytest.mark.parametrize(
    ("divide", "settings", "parts"),
    [
        (
            by_label,
            (3, 3, 0),
            [[2, 3, 6, 9, 10, 13, 16, 20], [0, 1, 4, 7, 11, 14, 15, 18], [5, 8, 12, 17, 19]],
        ),
        (
            dirichlet,
            (3, 0.5, 0),
            [[4, 6, 9, 11, 13, 14, 18, 20], [0, 1, 3, 5, 7, 12, 15, 16], [2, 8, 10, 17, 19]],
        ),
        (
            dirichlet,
            (5, 0.05, 0),
            [[6, 20], [0, 4, 18], [5, 7, 11, 12, 19], [13, 16], [1, 2, 3, 8, 9, 10, 14, 15, 17]],
        ),
        (
            dirichlet,
            (5, 0.05, 1),
            [[11, 18], [6, 9], [3, 10, 17], [4, 5, 12, 19, 20], [0, 1, 2, 7, 8, 13, 14, 15, 16]],
        ),
    ],
)
def test_parts_of_published_results(divide: Any, settings: Any, parts: list[list[int]]) -> None:
    """The draws of the results in docs/reproduction.md; the last one was drawn more than once."""
    assert as_lists(divide([index % 7 for index in range(21)], *settings)) == parts


@pytest.mark.parametrize(
    ("divide", "arguments", "message"),
    [
        (by_label, (LABELS, 3, 2), "3 workers with 2 labels each hold at most 6 of the 7 labels; "
         "raise labels_per_worker to 3 or workers to 4"),
        (by_label, (LABELS, 3, 8), "at most the number of different labels, which is 7, got 8"),
        (by_label, (LABELS, 3, 0), "labels_per_worker must be at least 1, got 0"),
        (by_label, ([0, 0, 1, 1], 3, 2), "3 workers with 2 labels each need 6 holders of labels, "
         "but labels with few samples allow only 4; lower"),
        (dirichlet, (LABELS, 3, 0.0), "alpha must be positive and finite, got 0.0"),
        (dirichlet, (LABELS, 3, float("inf")), "alpha must be positive and finite, got inf"),
        (dirichlet, (LABELS, 3, float("nan")), "alpha must be positive and finite, got nan"),
        (dirichlet, ([0, 1], 3, 1.0), "3 workers need 3 samples, got 2"),
        (dirichlet, (LABELS, 8, 1e-9), "none of 1000 draws gave each of 8 workers a sample with "
         "alpha=1e-09; raise alpha or lower workers"),
    ],
)  # fmt: skip
def test_impossible_partitions_say_what_to_change(
    divide: Any, arguments: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        divide(*arguments)


def test_labels_are_integers() -> None:
    with pytest.raises(ValueError, match=r"labels must be integers, got torch\.float32"):
        partition_by_label(torch.tensor([0.5, 1.5]), 1, 1)
