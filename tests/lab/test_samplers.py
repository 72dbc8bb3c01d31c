"""Samplers, batches, partitions, injection, and the factor on the learning rate."""

from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)
from torch.utils.data import Dataset, Subset, TensorDataset

from offbeat_lab.job import Job
from offbeat_lab.recipes import Task
from offbeat_lab.recipes.datasets import TensorData, as_samples
from offbeat_lab.recipes.held_out import HeldOut
from offbeat_lab.samplers import Batches, PartSampler, make_partition, make_sampler


def task(samples: int = 60, steps: int = 7) -> Task:
    """Return a task whose sample i is i with label i mod 6."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    numbers = torch.arange(samples)
    return Task(
        model=model,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        dataset=TensorData(numbers[:, None].float(), numbers % 6),
        batch_size=4,
        steps=steps,
        loss=lambda model, batch: model(batch[0]).mean(),
        evaluate=HeldOut(TensorData(numbers), lambda model, batch: {"nothing": 0.0 * batch[0]}),
    )


def read(one: Task, workers: int, **settings: Any) -> list[list[int]]:
    """Return the samples that each worker reads, in order."""
    return [
        [
            int(x)
            for batch in Batches(one, make_sampler(one, workers, rank, seed=3, **settings))
            for x in batch[0]
        ]
        for rank in range(workers)
    ]


def test_batches_are_as_many_as_steps_in_every_iteration() -> None:
    """They continue over the ends of epochs."""
    one = task(samples=10, steps=7)
    batches = Batches(one, make_sampler(one, 1, 0, seed=0))
    assert len(batches) == 7
    first, second = ([x.flatten().tolist() for x, _ in batches] for _ in range(2))
    assert len(first) == 7
    assert first == second
    assert {len(batch) for batch in first} == {4}


def test_seldp_reads_everything_and_the_others_a_share() -> None:
    """SelDP reads all samples, DefDP a fixed third, DistributedSampler a third per epoch."""
    one = task(samples=60, steps=15)
    for own in read(one, 3):
        assert sorted(own) == list(range(60))
    shares = read(one, 3, kind="defdp")
    assert [len(set(own)) for own in shares] == [20, 20, 20]
    assert set().union(*shares) == set(range(60))
    once = read(task(samples=60, steps=5), 3, kind="distributed")
    assert sorted(index for own in once for index in own) == list(range(60))
    assert [len(set(own)) > 20 for own in read(one, 3, kind="distributed")] == [True] * 3


@pytest.mark.parametrize("kind", ["seldp", "distributed", "defdp"])
def test_passes_have_all_samples_and_different_global_batches(kind: str) -> None:
    """In a pass, all workers together read each sample once; no pass repeats a global batch."""
    read_by = read(task(samples=60, steps=15), 3, kind=kind)  # 3 passes of 5 batches of 4
    batches = [
        frozenset(index for own in read_by for index in own[at : at + 4]) for at in range(0, 60, 4)
    ]
    for start in range(0, 15, 5):
        assert sorted(set().union(*batches[start : start + 5])) == list(range(60))
    assert len(set(batches)) == 15


def test_a_partition_keeps_labels_apart() -> None:
    """With label:2, each of three workers reads two of six labels."""
    shares = read(task(steps=30), 3, partition="label:2")
    labels = [{index % 6 for index in own} for own in shares]
    assert [len(own) for own in labels] == [2, 2, 2]
    assert set().union(*labels) == set(range(6))
    assert set(shares[0]).isdisjoint(shares[1])
    mixed = make_partition("dirichlet:1000", task(600), 3, seed=1)
    assert sorted(index for part in mixed for index in part) == list(range(600))


def test_parts_are_shuffled_by_seed_epoch_and_worker() -> None:
    """Each of the three changes the order; the same three give it again."""
    part = torch.arange(100).numpy()

    def order(rank: int, seed: int, epoch: int) -> list[int]:
        sampler = PartSampler(part, rank, seed)
        sampler.set_epoch(epoch)
        assert len(sampler) == 100
        return list(sampler)

    first = order(0, 0, 0)
    assert sorted(first) == list(range(100))
    assert order(0, 0, 0) == first
    orders = [first, order(1, 0, 0), order(0, -1, 0), order(0, 0, 1)]
    assert len({tuple(each) for each in orders}) == 4


def test_every_worker_needs_samples() -> None:
    with pytest.raises(ValueError, match="every worker needs samples, part 2 of the partition"):
        make_sampler(task(2), 3, 0, seed=0, kind="defdp")


def test_text_has_no_partition_by_label() -> None:
    with pytest.raises(ValueError, match="one label per sample; this recipe has none"):
        Job("stdlib-lm", "bsp", 2, epochs=0.01, partition="label:1").check()


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),  # from the first rate
        lambda optimizer: CosineAnnealingLR(optimizer, 8, eta_min=0.1),  # from the one before
        lambda optimizer: OneCycleLR(optimizer, 0.4, total_steps=11),  # sets momentum, too
        lambda optimizer: ChainedScheduler(
            [
                LinearLR(optimizer, 0.25, total_iters=3),
                PolynomialLR(optimizer, 10, 0.5),
            ]
        ),
        lambda optimizer: SequentialLR(
            optimizer, [ConstantLR(optimizer, 0.5, 4), ExponentialLR(optimizer, 0.9)], [4]
        ),
    ],
)
def test_the_factor_scales_every_rate_of_a_schedule(schedule: Any) -> None:
    """The rule holds for all kinds of schedulers, also for a chain of two."""
    rates = []
    for factor in (1.0, 0.5):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        one = replace(
            task(), model=model, optimizer=optimizer, scheduler=schedule(optimizer), lr_scale=factor
        )
        rates.append([])
        for _ in range(10):
            with one.scaled_lr():
                rates[-1].append(one.optimizer.param_groups[0]["lr"])
                one.optimizer.step()
            one.advance()
    assert len(set(rates[0])) > 1
    assert rates[1] == pytest.approx([0.5 * rate for rate in rates[0]], rel=1e-15)


NUMBERS = torch.arange(12)


class WithTargets(Dataset[Any]):
    """A data set with torchvision's attribute ``targets``."""

    targets: ClassVar[list[int]] = [i % 3 for i in range(12)]

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(index)), self.targets[index]


@pytest.mark.parametrize(
    ("dataset", "labels"),
    [
        (TensorDataset(NUMBERS, NUMBERS % 3), [i % 3 for i in range(12)]),
        (Subset(TensorDataset(NUMBERS, NUMBERS % 3), [5, 4, 3]), [2, 1, 0]),
        (Subset(Subset(WithTargets(), [7, 6, 5, 4]), [0, 3]), [1, 1]),
        (WithTargets(), [i % 3 for i in range(12)]),
        (TensorDataset(NUMBERS), None),
    ],
)
def test_labels_of_ordinary_data_sets(dataset: Dataset[Any], labels: list[int] | None) -> None:
    """Labels of torch's and torchvision's data sets and their subsets are known."""
    found = as_samples(dataset).labels
    assert (None if found is None else found.tolist()) == labels


def test_ordinary_data_sets_give_batches() -> None:
    """Items are collated in the given order."""
    inputs, labels = as_samples(WithTargets()).batch([4, 2])
    assert inputs.tolist() == [[4.0, 4.0], [2.0, 2.0]]
    assert labels.tolist() == [1, 2]
    (numbers,) = as_samples(TensorDataset(NUMBERS))[[3, 1]]
    assert numbers.tolist() == [3, 1]
