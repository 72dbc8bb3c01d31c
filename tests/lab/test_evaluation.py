"""Evaluation divided among workers: values, and how often."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cells import some
from lab import tiny
from offbeat import Compute, LocalSGD, Network, attach, simulate
from offbeat.errors import CommunicationError
from offbeat.synchronizer import snapshot_of
from offbeat_lab import evaluator
from offbeat_lab.compare import run_and_record
from offbeat_lab.evaluation import average_over_workers, evaluate, gather, storable_evaluations
from offbeat_lab.events import Evaluation, Event
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import VirtualCluster
from offbeat_lab.methods.base import Attached
from offbeat_lab.methods.registry import parse_method
from offbeat_lab.recipes.base import Setup, Task
from offbeat_lab.recipes.datasets import TensorData
from offbeat_lab.recipes.held_out import HeldOut, accuracy
from offbeat_lab.results import Result
from workers import run as on_processes
from worlds import run

CPU = torch.device("cpu")
SAMPLES, CLASSES = 103, 7  # no multiple of anything below


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(5, CLASSES)
    with torch.no_grad():
        model.weight.copy_(torch.randn(CLASSES, 5, generator=generator))
        model.bias.zero_()
    inputs = torch.randn(SAMPLES, 5, generator=generator)
    return model, inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def top(batch_size: int) -> HeldOut:
    _, inputs, labels = problem()
    ranks = {"one": 1, "three": 3, "all": 2 * CLASSES}
    return accuracy(TensorData(inputs, labels), ranks, batch_size=batch_size)


# Shares


@pytest.mark.parametrize("size", [1, 2, 3, 8, 200])
@pytest.mark.parametrize("batch_size", [1, 10, 1000])
def test_shares_together_are_the_whole(size: int, batch_size: int) -> None:
    """Any number of workers together evaluates every sample once."""
    model, inputs, labels = problem()
    order = model(inputs).argsort(1, descending=True)
    right = [labels[i] in order[i, :k] for k in (1, 3) for i in range(SAMPLES)]
    evaluate = top(batch_size)
    shares = [evaluate.share(model, rank, size) for rank in range(size)]
    assert evaluate.combine(shares) == {
        "one": sum(right[:SAMPLES]) / SAMPLES,
        "three": sum(right[SAMPLES:]) / SAMPLES,
        "all": 1.0,
    }


def test_real_numbers_add_up_to_the_same_bits() -> None:
    """The same batches give the same bits for any division. A perplexity is made of the mean."""
    model, inputs, labels = problem()

    def nats(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return {"nats": loss}

    evaluate = HeldOut(
        TensorData(inputs, labels),
        nats,
        batch_size=10,
        metrics=lambda means: {**means, "exp": math.exp(means["nats"])},
    )
    alone = evaluate(model)
    for size in (2, 3, 5):
        shares = [evaluate.share(model, rank, size) for rank in range(size)]
        assert evaluate.combine(shares) == alone
    with torch.no_grad():
        whole = nn.functional.cross_entropy(model(inputs).double(), labels)
    expected = {"nats": float(whole), "exp": math.exp(float(whole))}
    assert alone == pytest.approx(expected, rel=1e-6)


def test_an_evaluation_changes_no_state() -> None:
    """Training mode and random state are as before."""
    model, inputs, _ = problem()

    def noise(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        assert not model.training
        return {"noise": torch.rand(len(batch[0]))}

    state = torch.get_rng_state()
    HeldOut(TensorData(inputs), noise)(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    model.extra = nn.Dropout().eval()  # a layer that the user has frozen
    for training in (True, False):
        model.training = training
        HeldOut(TensorData(inputs), noise)(model)
        assert (model.training, model.extra.training) == (training, False)


def test_scores_need_one_value_per_sample() -> None:
    """A mean over the batch would give the last batch too much weight."""
    model, inputs, _ = problem()
    evaluate = HeldOut(TensorData(inputs), lambda model, batch: {"mean": batch[0].mean()}, 10)
    with pytest.raises(ValueError, match=r"each of the 10 samples .* got 'mean' of shape \(\)"):
        evaluate(model)


def together(rank: int, size: int) -> dict[str, float]:
    model, inputs, labels = problem()
    optimizer = torch.optim.SGD(model.parameters())
    task = Task(model, optimizer, TensorData(inputs, labels), 1, lambda *_: inputs, top(1000))
    return evaluate(task, "one", 0, 0.0, device=CPU).metrics


@pytest.mark.parametrize("world", [run, on_processes])
def test_all_workers_get_the_metrics_of_all_samples(world: Any) -> None:
    assert world(together, workers=3) == [top(1000)(problem()[0])] * 3


def leave_one_out(rank: int, size: int) -> str:
    if rank == 1:
        return ""
    try:
        gather(rank, CPU, "the shares of an evaluation")
    except CommunicationError as error:
        return str(error)
    return "no error"


def test_a_missing_share_is_an_error() -> None:
    """The error names the waiting rank, the operation and the option."""
    message = on_processes(leave_one_out, workers=2)[0]
    assert message.startswith("rank 0 waited for the shares of an evaluation: ")
    assert "--timeout" in message


# How often


@pytest.mark.parametrize(
    ("steps", "snapshot_bytes", "number"),
    [
        (1000, 2**20, 24),
        (1000, 2**28, 5),  # four snapshots, and the model at the end
        (1000, 2**31, 1),
        (9, 2**20, 9),
    ],
)
def test_snapshots_take_at_most_a_gibibyte(steps: int, snapshot_bytes: int, number: int) -> None:
    assert storable_evaluations(steps, snapshot_bytes) == number


# In a run


@pytest.fixture
def tiny_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "STEPS", 30)


SLOW_LINKS = Network("1Mbit/s", latency="5ms")


def trained(job: Job, on_event: Callable[[Event], None] = lambda event: None) -> Result:
    return run_and_record(job, on_event, VirtualCluster(SLOW_LINKS, Compute("5ms", jitter=0.3)))


@pytest.mark.usefixtures("tiny_steps")
@pytest.mark.parametrize("text", some(["streaming:parts=2", "ssp:staleness=3", "bsp"], 0))
def test_evaluations_change_neither_training_nor_times(text: str) -> None:
    """Totals, such as bytes and landings, final model and common points have the same bits."""
    once, some, often = (trained(Job("tiny", text, 3, evaluations=n)) for n in (1, 4, 30))
    assert [len(one.points) for one in (once, some, often)] == [1, 4, 30]
    for one in (once, some):
        assert one.stats == often.stats
        assert set(map(repr, one.points)) <= set(map(repr, often.points))
    assert [point.step for point in some.points] == [8, 15, 22, 30]


@pytest.mark.usefixtures("tiny_steps")
def test_an_evaluation_has_the_time_of_the_slowest_worker() -> None:
    """Local steps of 10 and 25 ms. The final mean waits for the slowest, too."""
    place = VirtualCluster(Network(1e12, latency=0.0), Compute("10ms", slowdown={1: 2.5}))
    job = Job("tiny", "local:period=100", 2, evaluations=3)
    found = run_and_record(job, lambda event: None, place)
    assert [p.seconds for p in found.points] == pytest.approx([0.25, 0.5, 0.75], rel=1e-3)


def snapshots_and_means(rank: int, size: int, text: str) -> tuple[list[Tensor], list[Tensor]]:
    """Train differently on each worker. Return the average of the snapshots, and the own model."""
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    model.register_buffer("mean", torch.rand(2, dtype=torch.float64))
    model.register_buffer("count", torch.tensor(rank))
    model.register_buffer("mask", torch.tensor([rank == 0, True]))
    sync = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), parse_method(text))
    with torch.no_grad():
        for tensor in (*model.parameters(), model.mean):
            tensor += rank
        model.count += rank
        model.mask[1] = rank == 0
    before = sync.stats.payload_bytes
    tensors = snapshot_of(sync)
    assert sync.stats.payload_bytes == before
    average_over_workers(tensors, CPU)
    own = [model.bias, model.weight, model.mean, model.count, model.mask]
    sync.detach()
    return tensors, [tensor.detach() for tensor in own]


@pytest.mark.parametrize(
    ("text", "weights"),
    [("local:period=100", (1, 1, 1)), ("fedavg:period=100,weights=1/2/5", (1, 2, 5))],
)
def test_a_snapshot_is_averaged_as_a_consensus_combines_models(
    text: str, weights: tuple[int, ...]
) -> None:
    """Real numbers become the (weighted) mean, counters the maximum, and masks those of rank 0."""
    results = run(snapshots_and_means, text, workers=3)
    for averaged, _ in results:
        for i in range(3):
            total = sum(w * own[i] for w, (_, own) in zip(weights, results, strict=True))
            torch.testing.assert_close(averaged[i], total / sum(weights))
        assert torch.equal(averaged[3], torch.tensor(2))
        assert torch.equal(averaged[4], results[0][1][4])


def server_and_snapshot(rank: int, size: int, text: str) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, parse_method(text))
    for step in range(5):
        model(torch.full((1, 3), float(rank + step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with sync.consensus():  # no push is in flight, and the model is the server's
        shown = [model.bias.detach().clone(), model.weight.detach().clone()]
        tensors = snapshot_of(sync)
        average_over_workers(tensors, CPU)
    sync.finish()
    return tensors, shown


@pytest.mark.parametrize("text", ["ssp:staleness=1", "downpour"])
def test_snapshots_of_a_parameter_server_are_its_vector(text: str) -> None:
    for averaged, shown in run(server_and_snapshot, text, workers=3):
        torch.testing.assert_close(averaged, shown)


def test_infinite_buffers_are_no_divergence() -> None:
    """An attention mask holds -inf."""

    def evaluated() -> Evaluation:
        task = tiny.build(Setup(1, 1.0))
        task.model.register_buffer("mask", torch.full((1,), -math.inf))
        sync = attach(task.model, task.optimizer, LocalSGD(period=4))
        events: list[Event] = []
        job = Job("tiny", "local", 1, evaluations=1)
        one = evaluator.Evaluator(job, task, "size", CPU, events.append)
        one.finish(Attached(task, sync))
        return events[-1]

    (found,) = simulate(evaluated, workers=1).results
    assert found.finite
