"""LeasedStream: shards that are read in sequence, in training, with deaths and checkpoints."""

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import offbeat
from loops import sgd
from offbeat import Compute, Network, simulate
from offbeat.data import LeasedStream
from offbeat.elastic import membership
from offbeat.simulate import Kill, Simulation
from workers import run as on_processes

Batch = tuple[int, int]
"""Shard and number of a batch."""

LENGTHS = [5, 1, 8, 3, 0, 6, 2, 9, 4, 7] * 3  # batches of each shard
SHARDS = range(len(LENGTHS))
BATCHES = [(shard, number) for shard in SHARDS for number in range(LENGTHS[shard])]


class Uses(nn.Module):
    """One number for each batch. A step adds 1 to the number of its batch.

    A mean over N workers divides that by N, so a number is above 0 if the model has the batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(len(BATCHES)))


class Training:
    """A model, its synchronizer, a stream, and the batches that were used."""

    def __init__(self, strategy: str = "streaming", interleave: int = 1, **options: Any) -> None:
        self.model = Uses()
        self.optimizer = sgd(self.model, lr=1.0)
        self.sync = offbeat.attach(
            self.model,
            self.optimizer,
            offbeat.parse_strategy(strategy),
            wire="float32",
            **{"timeout_seconds": 20.0, **options},
        )
        self.used: list[Batch] = []
        self.stream = LeasedStream(SHARDS, self.read, sync=self.sync, interleave=interleave)

    def read(self, shard: int) -> Iterator[Batch]:
        return ((shard, number) for number in range(LENGTHS[shard]))

    def step(self, batch: Batch) -> None:
        (-self.model.uses[BATCHES.index(batch)]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.used.append(batch)

    def finish(self) -> dict[str, Any]:
        self.sync.finish()
        return {
            "used": self.used,
            "steps": self.sync.step,
            "repeated": self.stream.sampler.repeated,
            "missing": [b for b, use in zip(BATCHES, self.model.uses, strict=True) if use < 0.01],
        }


def simulated(function: Any, *, workers: int = 4, faults: Any = (), **compute: Any) -> Simulation:
    return simulate(
        function,
        workers=workers,
        network=Network("1Gbit/s", latency="1ms"),
        compute=Compute("10ms", **compute),
        faults=faults,
    )


def count(results: Any) -> Counter[Batch]:
    return Counter(batch for each in results for batch in each["used"])


# -- shares ------------------------------------------------------------------------------------


def train(epochs: int, **options: Any) -> dict[str, Any]:
    training = Training(**options)
    for epoch in range(epochs):
        training.stream.sampler.set_epoch(epoch)
        for batch in training.stream:
            training.step(batch)
    return training.finish()


@pytest.mark.parametrize(("strategy", "interleave"), [("streaming", 1), ("bsp", 3)])
def test_each_shard_is_used_once_by_one_worker(strategy: str, interleave: int) -> None:
    """Two equal runs divide the shards equally."""
    runs = [
        simulated(
            lambda: train(2, strategy=strategy, interleave=interleave),
            slowdown={1: 3.0},
            jitter=0.1,
        ).results
        for _ in range(2)
    ]
    assert count(runs[0]) == Counter(BATCHES * 2)
    assert [each["used"] for each in runs[0]] == [each["used"] for each in runs[1]]
    for each in runs[0]:
        counts = Counter(each["used"])
        for shard in SHARDS:
            assert len({counts[shard, number] for number in range(LENGTHS[shard])}) <= 1
        assert each["repeated"] == 0
        assert not each["missing"]


def test_a_faster_worker_takes_more() -> None:
    """One of three has a third of the speed: it takes 1/7 of the batches, within two shards."""
    results = simulated(lambda: train(6), workers=3, slowdown={2: 3.0}).results
    steps = [each["steps"] for each in results]
    assert sum(steps) == 6 * len(BATCHES)
    assert steps[2] == pytest.approx(6 * len(BATCHES) / 7, abs=2 * max(LENGTHS))


# -- one worker: order, errors, loops that are left early --------------------------------------


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.lists(st.integers(1, 40), max_size=8))
def test_loops_that_are_left_continue(interleave: int, stops: list[int]) -> None:
    """Wherever the loops are left: each batch is used once, and in the order of its shard."""
    training = Training(interleave=interleave)
    for stop in stops:
        if training.stream.sampler.epoch == 0:
            for batch in islice(training.stream, stop):
                training.step(batch)
    if training.stream.sampler.epoch == 0:
        for batch in training.stream:
            training.step(batch)
    elif len(training.used) < len(BATCHES):  # the last shards were open
        for batch in islice(training.stream, len(BATCHES) - len(training.used)):
            training.step(batch)
    training.sync.detach()
    assert Counter(training.used) == Counter(BATCHES)
    for shard in SHARDS:
        assert [n for s, n in training.used if s == shard] == list(range(LENGTHS[shard]))


def test_shards_are_read_in_turns() -> None:
    """Written out, without a shuffle. The next shard is opened when one has ended."""
    training = Training()
    lengths = [2, 4, 1, 0, 2]
    stream = LeasedStream(
        lengths,
        lambda length: (f"{length}.{number}" for number in range(length)),
        sync=training.sync,
        interleave=2,
        shuffle=False,
    )
    assert list(stream) == ["2.0", "4.0", "2.1", "4.1", "1.0", "4.2", "4.3", "2.0", "2.1"]
    assert not hasattr(stream, "__len__")
    training.sync.detach()


def test_a_shard_that_failed_is_read_again() -> None:
    """From its start, in the next iteration."""
    training, failures = Training(), iter([True])

    def read(shard: int) -> Iterator[Batch]:
        for batch in training.read(shard):
            if batch == (2, 4) and next(failures, False):
                raise OSError("no such file")
            yield batch

    stream = LeasedStream(SHARDS, read, sync=training.sync, interleave=2)

    def train() -> None:
        for batch in stream:
            training.step(batch)

    with pytest.raises(OSError, match="no such file"):
        train()
    train()
    training.sync.detach()
    # Batch 3 was read ahead and not used when reading batch 4 failed.
    assert Counter(training.used) == Counter(BATCHES) + Counter([(2, 0), (2, 1), (2, 2)])


def test_the_number_of_open_shards_is_checked() -> None:
    training = Training()
    with pytest.raises(ValueError, match="interleave"):
        LeasedStream(SHARDS, training.read, sync=training.sync, interleave=0)
    training.sync.detach()


# -- deaths ------------------------------------------------------------------------------------


def train_elastically(strategy: str, interleave: int, record: dict[int, Any]) -> dict[str, Any]:
    training = Training(strategy, interleave, min_workers=1, timeout_seconds=5.0)
    record[dist.get_rank()] = {"used": training.used}
    for batch in training.stream:
        training.step(batch)
    for batch in training.stream.leftovers():
        training.step(batch)
    return training.finish()


@pytest.mark.parametrize(("strategy", "interleave"), [("streaming", 1), ("local:period=4", 3)])
@pytest.mark.parametrize("at", [0.015, 0.11, 0.2, 0.29, 0.36, 0.41, 0.45, 0.5])
def test_the_model_has_all_shards_of_a_killed_worker(
    strategy: str, interleave: int, at: float
) -> None:
    """In the middle of its shards, too. The others read these from their start."""
    record: dict[int, Any] = {}
    run = simulated(
        lambda: train_elastically(strategy, interleave, record),
        faults=(Kill(worker=2, at=at),),
        jitter=0.1,
    )
    alive = [each for each in run.results if each is not None]
    assert len(alive) == 3
    for each in alive:
        assert not each["missing"]
    survivors, everything = count(alive), count(record.values())
    assert set(everything) == set(BATCHES)
    extra = Counter(shard for shard, _ in (everything - Counter(BATCHES)))
    assert len(extra) <= sum(each["repeated"] for each in alive)
    for shard in extra:  # a survivor reads all of it
        assert all(survivors[shard, number] for number in range(LENGTHS[shard]))


# -- real processes ----------------------------------------------------------------------------


class Numbers(IterableDataset[Batch]):
    """A shard in a process that reads ahead."""

    def __init__(self, shard: int) -> None:
        self.shard = shard

    def __iter__(self) -> Iterator[Batch]:
        return ((self.shard, number) for number in range(LENGTHS[self.shard]))


class Reading(Training):
    def read(self, shard: int) -> Any:
        return DataLoader(Numbers(shard), batch_size=None, num_workers=1)


def train_and_die(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 is killed in the middle of a shard, while processes read its shards."""
    membership._STORE_SECONDS = 0.1
    os.environ["OFFBEAT_KERNELS"] = "0"
    multiprocessing.current_process()._config["daemon"] = False  # it may start processes
    training = Reading(interleave=2, min_workers=1)
    for batch in training.stream:
        time.sleep(0.01)
        training.step(batch)
        if rank == 1 and len(training.used) == 12:
            os.kill(os.getpid(), signal.SIGKILL)
    for batch in training.stream.leftovers():
        training.step(batch)
    return training.finish()


def test_real_processes_read_the_shards_of_a_killed_worker() -> None:
    """Over a TCPStore. Processes of DataLoaders read ahead, of the killed worker, too."""
    results = on_processes(train_and_die, workers=3, newcomers=0, may_die=(1,))
    alive = [each for each in results if each is not None]
    assert len(alive) == 2
    for each in alive:
        assert not each["missing"]
    assert sum(each["repeated"] for each in alive) > 0
    assert all(set(each["used"]) < set(BATCHES) for each in alive)


# -- checkpoints -------------------------------------------------------------------------------


def first_part(stop: int) -> dict[str, Any]:
    training = Training(interleave=2)
    for batch in islice(training.stream, stop):
        training.step(batch)
    with training.sync.consensus():
        state = training.stream.sampler.state_dict()
    return {**training.finish(), "state": state}


def second_part(state: Any) -> dict[str, Any]:
    training = Training()
    training.stream.sampler.load_state_dict(state)
    for _ in range(training.stream.sampler.epoch, 1):
        for batch in training.stream:
            training.step(batch)
    return training.finish()


@pytest.mark.parametrize("stop", [1, 11, 30])
def test_another_number_of_workers_continues(stop: int) -> None:
    """With the shards that no worker has used completely, and with no others."""
    first = simulated(lambda: first_part(stop), workers=3).results
    states = [each["state"] for each in first]
    assert states == states[:1] * 3
    second = simulated(lambda: second_part(states[0]), workers=2).results
    before, after = count(first), count(second)
    assert set(before) | set(after) == set(BATCHES)
    assert max(after.values()) == 1
    for shard in SHARDS:
        batches = [(shard, number) for number in range(LENGTHS[shard])]
        assert all(after[b] for b in batches) or not any(after[b] for b in batches)
    again = {shard for shard in SHARDS if before[shard, 0] and after[shard, 0]}
    # Two open shards of each worker, and those that ended before an older one of the two.
    assert len(again) <= 3 * 3
