"""Partitions: every sample in one part, the labels of each part as the rule says."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset, TensorDataset

from offbeat.data import describe_partition, partition_by_label, partition_dirichlet
from offbeat.data.partition import round_shares

few = settings(deadline=None, max_examples=30)
labels_of = st.lists(st.integers(-3, 5), min_size=1, max_size=80)


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
            partition_by_label(labels, workers, each, seed)
        return
    parts = partition_by_label(labels, workers, each, seed)
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
        for label, sizes in holders_of(labels, partition_by_label(labels, workers, each)).items()
    }
    sizes = Counter(labels)
    for a in number:
        for b in number:
            if number[a] > 1 and number[b] < min(workers, sizes[b]):
                without = Fraction(sizes[a], number[a] - 1)
                assert without >= Fraction(sizes[b], number[b])


def test_workers_do_not_share_labels_in_fixed_pairs() -> None:
    """With two labels each, the holders of one label have different second labels."""
    labels = [index % 10 for index in range(1000)]
    for seed in range(5):
        parts = partition_by_label(labels, 10, 2, seed)
        assert {len(part) for part in parts} == {100}
        assert len({frozenset(counts) for counts in counts_of(labels, parts)}) > 6  # 5 in pairs


@few
@given(
    labels_of,
    st.integers(1, 6),
    st.floats(0.01, 100),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_dirichlet_parts_hold_every_index_once_and_enough(
    labels: list[int], workers: int, alpha: float, least: int, seed: int
) -> None:
    """Every index once and no part below the minimum, or an error that says what to change."""
    try:
        parts = partition_dirichlet(labels, workers, alpha, seed, minimum_samples=least)
    except ValueError as error:
        assert "minimum_samples" in str(error)  # noqa: PT017 - both ends are allowed
        assert workers > 1 or least > len(labels)
        return
    assert len(parts) == workers
    assert sorted(index for part in parts for index in part) == list(range(len(labels)))
    assert min(map(len, parts)) >= least
    for part in parts:
        assert part.dtype == np.int64
        assert all(a < b for a, b in pairwise(part.tolist()))


def test_parts_that_are_too_small_are_drawn_again() -> None:
    """A sufficient first draw is kept; an insufficient one is replaced."""
    labels = [index % 10 for index in range(200)]
    again = 0
    for seed in range(20):
        plain = as_lists(partition_dirichlet(labels, 5, 0.3, seed))
        enough = as_lists(partition_dirichlet(labels, 5, 0.3, seed, minimum_samples=20))
        assert min(map(len, enough)) >= 20
        if min(map(len, plain)) >= 20:
            assert plain == enough
        else:
            again += 1
    assert 0 < again < 20


@pytest.mark.parametrize("alpha", [0.03, 0.5, 20.0])
def test_shares_follow_the_dirichlet_distribution(alpha: float) -> None:
    """Mean 1/N, variance (N − 1)/N²/(Nα + 1), and P(share < ½) of the beta marginal for N = 2."""
    labels = np.repeat(np.arange(4000), 100)
    shares = describe_partition(partition_dirichlet(labels, 4, alpha), labels).counts / 100
    assert shares.mean(axis=1) == pytest.approx([0.25] * 4, abs=0.03)
    assert shares.var(axis=1) == pytest.approx([3 / 16 / (4 * alpha + 1)] * 4, rel=0.1)
    # Two of four workers together have a Beta(2α, 2α) share, symmetric around one half.
    assert ((shares[0] + shares[1]) < 0.5).mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-6])
def test_tiny_alpha_gives_each_label_to_one_worker(alpha: float) -> None:
    """Also if gamma variables underflow; each worker is equally likely."""
    labels = np.repeat(np.arange(2000), 3)
    counts = describe_partition(partition_dirichlet(labels, 4, alpha), labels).counts
    assert set(counts.ravel().tolist()) == {0, 3}
    assert (counts > 0).sum(axis=1) == pytest.approx([500] * 4, abs=100)


@pytest.mark.parametrize("alpha", [1e20, 1e38])
def test_huge_alpha_gives_all_workers_the_same_mix(alpha: float) -> None:
    """Each label in equal parts; the remainder does not always go to the same workers."""
    labels = np.repeat(np.arange(400), 5)
    counts = describe_partition(partition_dirichlet(labels, 4, alpha), labels).counts
    assert set(counts.ravel().tolist()) == {1, 2}
    assert (counts == 2).sum(axis=1) == pytest.approx([100] * 4, abs=40)


@few
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.lists(st.integers(0, 9), min_size=3, max_size=3)),
        min_size=1,
        max_size=5,
    )
)
def test_rounding_is_by_largest_remainder(rows: list[tuple[int, list[int]]]) -> None:
    """Rows keep their sums, and entries rounded up have the largest remainders."""
    totals = np.array([total for total, _ in rows])
    weights = np.array([[w + 0.125 for w in weights] for _, weights in rows])
    shares = weights / weights.sum(axis=1, keepdims=True)
    sizes = round_shares(shares, totals, np.random.default_rng(0))
    for total, share, size in zip(totals.tolist(), shares, sizes.tolist(), strict=True):
        exact = [float(s) * total for s in share]
        assert sum(size) == total
        up = [e - int(e) for e, n in zip(exact, size, strict=True) if n > int(e)]
        down = [e - int(e) for e, n in zip(exact, size, strict=True) if n == int(e)]
        assert len(up) + len(down) == len(size)
        assert not up or not down or min(up) >= max(down)


LABELS = [index % 7 for index in range(200)]
DIVISIONS = [
    lambda labels, seed=0: partition_by_label(labels, 5, 3, seed),
    lambda labels, seed=0: partition_dirichlet(labels, 5, 0.5, seed),
]


@pytest.mark.parametrize("divide", DIVISIONS)
def test_the_seed_decides(divide: Any) -> None:
    """The same seed gives the same parts, independent of other draws; other seeds do not."""
    first = as_lists(divide(LABELS))
    np.random.seed(3)
    torch.manual_seed(3)
    assert as_lists(divide(LABELS)) == first
    results = [as_lists(divide(LABELS, seed)) for seed in (-1, 0, 1, 2**70)]
    assert all(a != b for a, b in pairwise(results))


@pytest.mark.parametrize("divide", DIVISIONS)
@pytest.mark.parametrize(
    "labels",
    [
        np.array(LABELS, np.uint8),
        torch.tensor(LABELS),
        [torch.tensor(label) for label in LABELS],
        tuple("abcdefg"[label] for label in LABELS),
        np.array(["abcdefg"[label] for label in LABELS], dtype=object),
    ],
    ids=["uint8", "tensor", "tensors", "strings", "objects"],
)
def test_labels_of_any_form_give_the_same_parts(divide: Any, labels: Any) -> None:
    """Lists, arrays and tensors of integers, and strings of the same order, divide alike."""
    assert as_lists(divide(labels)) == as_lists(divide(LABELS))


def test_parts_index_a_dataset() -> None:
    """A part is what Subset and a DataLoader take."""
    dataset = TensorDataset(torch.arange(200), torch.tensor(LABELS))
    part = partition_by_label(dataset.tensors[1], 7, 1)[2]
    (batch, labels), *_ = DataLoader(Subset(dataset, part), batch_size=200)  # type: ignore[arg-type]
    assert batch.tolist() == part.tolist()
    assert len(set(labels.tolist())) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LABELS, 3, 2), "3 workers with 2 labels each hold at most 6 of the 7 labels; raise "
         "labels_per_worker to 3 or workers to 4"),
        ((LABELS, 3, 8), "at most the number of different labels, which is 7, got 8"),
        ((LABELS, 0, 2), "workers must be at least 1, got 0"),
        ((LABELS, 3, 0), "labels_per_worker must be at least 1, got 0"),
        (([0, 0, 1, 1], 3, 2), "3 workers with 2 labels each need 6 holders of labels, but labels "
         "with few samples allow only 4; lower"),
        (([], 3, 2), r"labels must be one integer or string .* got shape \[0\]"),
        ((np.zeros((4, 2), int), 3, 2), r"got shape \[4, 2\]"),
    ],
)  # fmt: skip
def test_impossible_label_partitions_say_what_to_change(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition_by_label(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((LABELS, 3, 0.0), "alpha must be positive and finite, got 0.0"),
        ((LABELS, 3, float("inf")), "alpha must be positive and finite, got inf"),
        ((LABELS, 3, float("nan")), "alpha must be positive and finite, got nan"),
        ((LABELS, 3, 1.0, 0, 0), "minimum_samples must be at least 1, got 0"),
        ((LABELS, 3, 1.0, 0, 67), "3 workers with at least 67 samples each need 201 samples, got "
         "200; lower workers or minimum_samples"),
        ((LABELS, 8, 1e-9), "none of 1000 draws gave each of 8 workers at least 1 samples with "
         "alpha=1e-09; raise alpha, or lower workers or minimum_samples"),
    ],
)  # fmt: skip
def test_impossible_dirichlet_partitions_say_what_to_change(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition_dirichlet(*arguments)


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match="labels must be integers or strings, got float64"):
        partition_by_label([0.5, 1.5], 1, 1)  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"workers must be an integer of at least 1, got 2\.0"):
        partition_by_label([0, 1], 2.0, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="alpha must be a number, got '1'"):
        partition_dirichlet([0, 1], 2, "1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="workers must be an integer of at least 1, got True"):
        partition_by_label([0, 1], True, 1)


def test_numbers_counted_from_the_labels_are_numbers() -> None:
    """NumPy's and torch's integers count as integers, NumPy's floats as floats."""
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    known: Any = labels.max() + 1
    for one in (known, np.int64(3)):
        parts = partition_by_label(labels, one, labels_per_worker=2)
        assert sorted(index for part in parts for index in part) == list(range(6))
    assert len(partition_dirichlet(labels, 1, np.float32(0.5))) == 1  # type: ignore[arg-type]


@few
@given(labels_of, st.integers(1, 5), st.floats(0.1, 10))
def test_the_table_counts_labels(labels: list[int], workers: int, alpha: float) -> None:
    """Counts and skew, by counting one sample after the other."""
    if len(labels) < workers * 10:
        workers = 1
    try:
        parts = partition_dirichlet(labels, workers, alpha)
    except ValueError:
        return
    table = describe_partition(parts, labels)
    known = sorted(set(labels))
    counted = counts_of(labels, parts)
    assert table.labels.tolist() == known
    assert table.counts.tolist() == [[c[label] for label in known] for c in counted]
    whole, distance = Counter(labels), 0.0
    for own in counted:
        for label in known:
            distance += abs(own[label] / own.total() - whole[label] / len(labels)) / 2
    assert table.skew == pytest.approx(distance / workers)


def test_the_table_is_aligned() -> None:
    """The printed table; parts may omit samples or be empty."""
    table = describe_partition([[0, 1, 2], torch.tensor([5]), []], ["cat", "cat", "ox"] * 2)
    assert str(table) == "\n".join(
        [
            "worker  samples  labels  cat  ox",
            "     0        3       2    2   1",
            "     1        1       1    0   1",
            "     2        0       0    0   0",
            "   all        4       2    2   2",
            "skew 0.33 (0: every worker has the mix of all)",
        ]
    )


def test_a_wide_table_is_cut() -> None:
    """Twenty labels have a column; the totals count all of them."""
    lines = str(describe_partition([range(25)], list(range(25)))).splitlines()
    assert lines[1].split()[:3] == ["0", "25", "25"]
    assert len(lines[0].split()) == 3 + 20
    assert lines[-1] == "5 more labels are not shown"


def test_one_label_each_is_the_largest_skew() -> None:
    """0.9 if each of ten workers has one of ten labels; 0 for one worker with all samples."""
    labels = [index % 10 for index in range(100)]
    assert describe_partition(partition_by_label(labels, 10, 1), labels).skew == pytest.approx(0.9)
    assert describe_partition([range(100)], labels).skew == 0.0
    assert describe_partition([[]], labels).skew == 0.0


def test_parts_that_do_not_fit_the_labels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"part 1 must hold indices in \[0, 2\), got 2"):
        describe_partition([[0], [2]], [0, 1])
    with pytest.raises(ValueError, match="index 1 occurs 2 times"):
        describe_partition([[0, 1], [1]], [0, 1])
    with pytest.raises(ValueError, match=r"one integer or string .* lists of different lengths"):
        describe_partition([0, 1, 0], [[0, 2], [1]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="parts must hold one list of indices for each worker"):
        describe_partition([], [0, 1])
    with pytest.raises(TypeError, match=r"part 0 must be a list of integer indices, got bool"):
        describe_partition([np.array([True, False])], [0, 1])
