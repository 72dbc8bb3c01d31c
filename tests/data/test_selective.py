"""SelDPSampler: the structure the paper asks for, as properties."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from offbeat import simulate
from offbeat.data import SelDPSampler

sizes = st.integers(1, 60)
workers = st.integers(1, 8)


def epoch(size: int, n: int, number: int = 0, **options: Any) -> list[list[int]]:
    """What each of n workers reads in one epoch."""
    read = []
    for rank in range(n):
        sampler = SelDPSampler(range(size), n, rank, **options)
        sampler.set_epoch(number)
        read.append(list(sampler))
    return read


@settings(deadline=None, max_examples=30)
@given(sizes, workers, st.booleans(), st.integers(0, 3))
def test_every_epoch_is_a_permutation_of_all_indices(
    size: int, n: int, drop: bool, number: int
) -> None:
    """Every worker reads all indices once: the list DistributedSampler divides, padded or cut."""
    if drop and size < n:
        return
    read = epoch(size, n, number, drop_last=drop)
    divided: list[int] = []
    for rank in range(n):
        plain = DistributedSampler(range(size), n, rank, drop_last=drop)  # type: ignore[arg-type]
        plain.set_epoch(number)
        divided += list(plain)
    for own in read:
        assert sorted(own) == sorted(divided)
    if not drop:
        assert set(read[0]) == set(range(size))


@settings(deadline=None, max_examples=30)
@given(sizes, workers, st.booleans())
def test_workers_read_disjoint_samples_at_each_position(size: int, n: int, drop: bool) -> None:
    """At every position the N workers are at N different samples (of the padded list)."""
    if drop and size < n:
        return
    read = epoch(size, n, drop_last=drop)
    whole = len(read[0])
    padded = whole - len(set(read[0]))  # samples that stand twice because of the padding
    for position in range(whole):
        assert len({own[position] for own in read}) >= n - padded


def test_chunks_rotate() -> None:
    """Worker n reads D_n, D_{n+1}, …, written out for 3 workers and 6 samples."""
    assert epoch(6, 3, shuffle=False) == [
        [0, 1, 2, 3, 4, 5],
        [2, 3, 4, 5, 0, 1],
        [4, 5, 0, 1, 2, 3],
    ]


def test_each_epoch_has_a_new_shuffle_of_the_same_structure() -> None:
    """Epochs differ; in each, the chunks of worker 1 are those of worker 0 rotated by one."""
    first, second = epoch(12, 3, 0), epoch(12, 3, 1)
    assert first[0] != second[0]
    for read in (first, second):
        chunks = [[set(own[at : at + 4]) for at in (0, 4, 8)] for own in read]
        assert chunks[1] == chunks[0][1:] + chunks[0][:1]
    assert epoch(12, 3, 0, seed=1)[0] != first[0]


def test_no_global_batch_is_read_twice() -> None:
    """All workers together read a sample once per pass, in other company than before."""
    read = epoch(240, 4)
    batches = [
        frozenset(index for own in read for index in own[at : at + 10]) for at in range(0, 240, 10)
    ]
    assert len(set(batches)) == len(batches)
    for start in range(0, len(batches), 6):  # a pass
        assert set().union(*batches[start : start + 6]) == set(range(240))


OTHER_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"seed": 1}, "seed=0, this sampler has seed=1"),
    ({"num_replicas": 3}, "num_replicas=2, this sampler has num_replicas=3"),
    ({"shuffle": False}, "shuffle=True, this sampler has shuffle=False"),
    ({"drop_last": True}, "drop_last=False, this sampler has drop_last=True"),
    ({"dataset": range(12)}, "samples=10, this sampler has samples=12"),
]


@pytest.mark.parametrize(("other", "message"), OTHER_SETTINGS)
def test_a_state_of_another_order_is_refused(other: dict[str, Any], message: str) -> None:
    settings = {"dataset": range(10), "num_replicas": 2, "rank": 0}
    state = SelDPSampler(**settings).state_dict()
    with pytest.raises(ValueError, match=f"the state was saved with {message}"):
        SelDPSampler(**(settings | other)).load_state_dict(state)


@settings(deadline=None, max_examples=60)
@given(sizes, workers, st.data())
def test_resumable_at_any_position(size: int, n: int, data: st.DataObject) -> None:
    """A state taken after k samples continues with sample k+1; later epochs are whole."""
    rank = data.draw(st.integers(0, n - 1))

    def fresh() -> SelDPSampler:
        return SelDPSampler(range(size), n, rank)

    sampler = fresh()
    sampler.set_epoch(2)
    whole = list(sampler)
    sampler = fresh()
    sampler.set_epoch(2)
    stop = data.draw(st.integers(0, len(whole) - 1))
    iterator = iter(sampler)
    read = [next(iterator) for _ in range(stop)]
    other = fresh()
    other.load_state_dict(sampler.state_dict())
    assert read + list(other) == whole
    assert list(other) == whole  # the same epoch again, from the start
    assert list(sampler) == whole  # one that was left in the middle starts anew
    exact = fresh()
    exact.load_state_dict(sampler.state_dict(consumed=stop))
    exact.set_epoch(2)  # training loops call it at the start of each epoch
    assert read + list(exact) == whole
    assert exact.state_dict()["position"] == 0
    exact.set_epoch(3)
    assert len(list(exact)) == len(whole)


@pytest.mark.parametrize("consumed", [None, 100, 112])
def test_the_state_at_the_end_of_an_epoch_is_the_start_of_the_next(consumed: int | None) -> None:
    """The seventh batch of 16 has 4 samples, so 7 · 16 is more than all 100."""
    sampler = SelDPSampler(range(100), 1, 0)
    sampler.set_epoch(3)
    assert len(list(sampler)) == 100
    state = sampler.state_dict(consumed)
    assert (state["epoch"], state["position"]) == (4, 0)


def test_an_epoch_that_was_left_does_not_change_the_state_of_the_next() -> None:
    sampler = SelDPSampler(range(100), 1, 0)
    iterator = iter(sampler)
    for _ in range(50):
        next(iterator)
    sampler.set_epoch(1)
    state = sampler.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"Invalid rank 2, rank should be in .* \[0, 1\]"):
        SelDPSampler(range(10), 2, 2)
    with pytest.raises(ValueError, match="3 samples leave nothing for each of 4 workers"):
        SelDPSampler(range(3), 4, 0, drop_last=True)
    with pytest.raises(ValueError, match="process group has not been initialized"):
        SelDPSampler(range(10))


def test_rank_and_size_are_those_of_the_process_group() -> None:
    results = simulate(lambda: list(SelDPSampler(range(6), shuffle=False)), workers=3).results
    assert results == epoch(6, 3, shuffle=False)
