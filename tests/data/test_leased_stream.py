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
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import offbeat
from loops import sgd
from offbeat import Compute, Network, simulate
from offbeat.data import LeasedStream
from offbeat.elastic import membership
from offbeat.simulate import Kill, Simulation
from workers import run as on_processes

Batch = tuple[int, int]  # shard and number of a batch
LENGTHS = [5, 1, 8, 3, 0, 6, 2, 9, 4, 7] * 3  # batches of each shard
SHARDS = range(len(LENGTHS))
BATCHES = [(shard, number) for shard in SHARDS for number in range(LENGTHS[shard])]


class Shard(IterableDataset[Batch]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Batch]:
        return ((self.number, batch) for batch in range(LENGTHS[self.number]))


class Training:
    """A model, its synchronizer, a stream, and the batches that were used.

    The model has one number for each batch. A step adds 1 to that of its batch. A mean over N
    workers divides it by N, so it is above 0 if the model has the batch.
    """

    def __init__(self, strategy: str = "streaming", read: Any = Shard, **options: Any) -> None:
        self.model = nn.Module()
        self.model.uses = nn.Parameter(torch.zeros(len(BATCHES)))
        self.optimizer = sgd(self.model, lr=1.0)
        options |= {"wire": "float32", "timeout_seconds": 5.0}
        plan = offbeat.parse_strategy(strategy)
        self.sync = offbeat.attach(self.model, self.optimizer, plan, **options)
        self.used: list[Batch] = []
        self.stream = LeasedStream(SHARDS, read, sync=self.sync)

    def train(self, batches: Any) -> None:
        for batch in map(tuple, batches):  # a DataLoader returns lists
            (-self.model.uses[BATCHES.index(batch)]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.used.append(batch)

    def finish(self) -> dict[str, Any]:
        self.sync.finish()
        uses = zip(BATCHES, self.model.uses.tolist(), strict=True)
        missing, repeated = [b for b, use in uses if use < 0.01], self.stream.sampler.repeated
        return {"used": self.used, "repeated": repeated, "missing": missing}


def simulated(function: Any, *, workers: int = 3, faults: Any = (), **compute: Any) -> Simulation:
    network, step = Network("1Gbit/s", latency="1ms"), Compute("10ms", **compute)
    return simulate(function, workers=workers, network=network, compute=step, faults=faults)


def count(results: Any) -> Counter[Batch]:
    return Counter(batch for each in results for batch in each["used"])


def test_each_shard_is_used_once_and_a_faster_worker_takes_more() -> None:
    """One of three has a third of the speed: it takes 1/7 of the batches, within two shards."""

    def train() -> dict[str, Any]:
        training = Training()
        for epoch in range(3):
            training.stream.sampler.set_epoch(epoch)
            training.train(training.stream)
        return training.finish()

    results = simulated(train, slowdown={2: 3.0}).results
    assert count(results) == Counter(BATCHES * 3)
    for each in results:
        counts = Counter(each["used"])
        for shard in SHARDS:  # none is divided
            assert len({counts[shard, number] for number in range(LENGTHS[shard])}) <= 1
        assert (each["repeated"], each["missing"]) == (0, [])
    slow = len(results[2]["used"])
    assert slow == pytest.approx(3 * len(BATCHES) / 7, abs=2 * max(LENGTHS))


def test_a_shard_that_was_not_read_to_its_end_is_read_again() -> None:
    """After an error, and after a loop that was left. A shard counts from its last batch on."""
    failures = iter([True])

    def read(shard: int) -> Iterator[Batch]:
        for batch in Shard(shard):
            if batch == (2, 4) and next(failures, False):
                raise OSError("no such file")
            yield batch

    training = Training(read=read)
    with pytest.raises(OSError, match="no such file"):
        training.train(training.stream)
    # Batch 3 was read ahead and not used.
    expected = Counter(BATCHES) + Counter([(2, 0), (2, 1), (2, 2)])
    training.train(islice(training.stream, LENGTHS[2]))  # ends with the last batch of shard 2
    assert training.used[-1] == (2, 7)
    training.train(islice(training.stream, 1))
    assert LENGTHS[training.used[-1][0]] > 1
    expected[training.used[-1]] += 1
    training.train(training.stream)
    training.sync.detach()
    assert Counter(training.used) == expected


@pytest.mark.parametrize(
    ("strategy", "at"), [("streaming", 0.11), ("local:period=4", 0.36), ("streaming", 0.45)]
)
def test_the_model_has_all_shards_of_a_killed_worker(strategy: str, at: float) -> None:
    """In the middle of its shards, too. The others read these from their start."""
    record: dict[int, Any] = {}

    def train() -> dict[str, Any]:
        training = Training(strategy, min_workers=1)
        record[dist.get_rank()] = {"used": training.used}
        training.train(training.stream)
        training.train(training.stream.leftovers())
        return training.finish()

    run = simulated(train, workers=4, faults=(Kill(worker=2, at=at),), jitter=0.1)
    alive = [result for result in run.results if result is not None]
    assert not any(each["missing"] for each in alive)
    survivors, everything = count(alive), count(record.values())
    assert set(everything) == set(BATCHES)
    extra = {shard for shard, _ in (everything - Counter(BATCHES))}
    assert len(extra) <= sum(each["repeated"] for each in alive)
    for shard in extra:  # a survivor reads all of it
        assert all(survivors[shard, number] for number in range(LENGTHS[shard]))


def train_and_die(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 is killed in the middle of a shard, while processes read its shards."""
    membership._STORE_SECONDS = 0.1
    multiprocessing.current_process()._config["daemon"] = False  # it may start processes

    def read(shard: int) -> Any:
        return DataLoader(Shard(shard), batch_size=None, num_workers=1)

    training = Training("local:period=2", read, min_workers=1)
    for batch in training.stream:
        training.train([batch])
        time.sleep(0.01)
        if rank == 1 and len(training.used) >= 20 and 1 < batch[1] + 1 < LENGTHS[batch[0]]:
            os.kill(os.getpid(), signal.SIGKILL)
    training.train(training.stream.leftovers())
    return training.finish()


def test_real_processes_read_the_shards_of_a_killed_worker() -> None:
    """Over a TCPStore. Processes of DataLoaders read ahead, those of the killed worker, too."""
    results = on_processes(train_and_die, workers=3, newcomers=0, may_die=(1,))
    alive = [each for each in results if each is not None]
    assert not any(each["missing"] for each in alive)
    assert sum(each["repeated"] for each in alive) > 0
    assert set(count(alive)) < set(BATCHES)  # a mean contains the first shards of rank 1


@pytest.mark.parametrize("stop", [11, 30])
def test_another_number_of_workers_continues(stop: int) -> None:
    """With the shards that no worker has used completely, and with no others."""

    def first_part() -> dict[str, Any]:
        training = Training()
        training.train(islice(training.stream, stop))
        with training.sync.consensus():
            state = training.stream.sampler.state_dict()
        return {**training.finish(), "state": state}

    first = simulated(first_part).results
    state = first[0]["state"]

    def second_part() -> dict[str, Any]:
        training = Training()
        training.stream.sampler.load_state_dict(state)
        training.train(training.stream)
        return training.finish()

    before, after = count(first), count(simulated(second_part, workers=2).results)
    complete = {shard for shard in SHARDS if before[shard, LENGTHS[shard] - 1]}
    assert after == Counter(batch for batch in BATCHES if batch[0] not in complete)
