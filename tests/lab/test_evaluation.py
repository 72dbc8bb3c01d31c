"""Evaluation divided among workers: values, and how often."""

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab import tiny
from offbeat import Compute, Network
from offbeat.errors import CommunicationError
from offbeat.lab import evaluation, train
from offbeat.lab.compare import run_and_record
from offbeat.lab.evaluation import (
    EvaluationSchedule,
    affordable_evaluations,
    evaluate_together,
    expected_seconds,
    gather,
)
from offbeat.lab.events import Evaluation, EvaluationCount, Event, Step, Waiting
from offbeat.lab.job import Job
from offbeat.lab.launch.runners import VirtualCluster
from offbeat.lab.recipes import find_recipe
from offbeat.lab.recipes.base import Setup
from offbeat.lab.recipes.datasets import TensorData
from offbeat.lab.recipes.held_out import HeldOut, accuracy
from workers import run as on_processes
from worlds import run
from worlds import simulated as run_simulated

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
    return accuracy(TensorData(inputs, labels), {"one": 1, "three": 3}, batch_size=batch_size)


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
    }


def test_shares_are_balanced() -> None:
    """Batches become smaller if there are fewer batches than workers."""
    read: list[int] = []

    def count(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        read[-1] += len(batch[0])
        return {"nothing": torch.zeros(len(batch[0]))}

    model, inputs, labels = problem()
    evaluate = HeldOut(TensorData(inputs, labels), count, batch_size=1000)
    for rank in range(4):
        read.append(0)
        evaluate.share(model, rank, 4)
    assert read == [26, 26, 26, 25]


def test_real_numbers_add_up_to_the_same_bits() -> None:
    """The same batches give the same bits for any division among workers."""
    model, inputs, labels = problem()

    def nats(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return {"nats": loss}

    evaluate = HeldOut(TensorData(inputs, labels), nats, batch_size=10)
    alone = evaluate(model)
    for size in (2, 3, 5):
        shares = [evaluate.share(model, rank, size) for rank in range(size)]
        assert evaluate.combine(shares) == alone
    with torch.no_grad():
        whole = nn.functional.cross_entropy(model(inputs).double(), labels)
    assert alone["nats"] == pytest.approx(float(whole), rel=1e-6)


def test_metrics_are_made_of_means() -> None:
    """A perplexity is computed from the mean over all samples."""
    model, inputs, _ = problem()

    def first(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"m": batch[0][:, 0]}

    evaluate = HeldOut(
        TensorData(inputs), first, 10, metrics=lambda means: {"exp": math.exp(means["m"])}
    )
    shares = [evaluate.share(model, rank, 3) for rank in range(3)]
    assert evaluate.combine(shares)["exp"] == pytest.approx(math.exp(float(inputs[:, 0].mean())))


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


def test_the_first_batch_predicts_the_time_of_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def scores(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        clock[0] += len(batch[0])
        return {"nothing": batch[0][:, 0]}

    monkeypatch.setattr(evaluation, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def expect(rank: int, size: int) -> float:
        return expected_seconds(HeldOut(TensorData(problem()[1]), scores, 10), problem()[0])

    # 103 samples are 11 batches: worker 0 has 0, 4, 8; worker 3 has two of 10.
    assert run_simulated(expect, workers=4) == [30, 30, 30, 20]
    assert clock[0] == 40


def test_scores_need_one_value_per_sample() -> None:
    """A mean over the batch would give the last batch too much weight."""
    model, inputs, _ = problem()
    evaluate = HeldOut(TensorData(inputs), lambda model, batch: {"mean": batch[0].mean()}, 10)
    with pytest.raises(ValueError, match=r"each of the 10 samples .* got 'mean' of shape \(\)"):
        evaluate(model)


def together(rank: int, size: int) -> dict[str, float]:
    return evaluate_together(top(1000), problem()[0], CPU)


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
    assert message.startswith("rank 0 waited for the shares of an evaluation, but another worker")
    assert "--timeout" in message


# How often


def test_evaluations_are_evenly_spaced_without_the_last_step() -> None:
    schedule = EvaluationSchedule(100, 4)
    assert [step for step in range(1, 101) if step in schedule] == [25, 50, 75]
    assert not schedule.open
    for more_than_steps in (24, 10**18):
        schedule = EvaluationSchedule(3, more_than_steps)
        assert [step for step in range(1, 4) if step in schedule] == [1, 2]
    assert [step for step in range(1, 100) if step in EvaluationSchedule(100, 1)] == []


@pytest.mark.parametrize(
    ("evaluation", "training", "number"),
    [
        (1.0, 1000.0, 24),  # 100 s for them
        (5.0, 1000.0, 20),
        (33.0, 1000.0, 3),
        (200.0, 1000.0, 1),  # the end is evaluated whatever it takes
        (36.0, 128.0, 1),
        (0.1, 2.0, 24),  # 3 s, however short the run
        (1.0, 2.0, 3),
        (0.0, 1.0, 24),
    ],
)
def test_evaluations_cost_a_tenth_of_the_training(
    evaluation: float, training: float, number: int
) -> None:
    assert affordable_evaluations(evaluation, training) == number
    assert number * evaluation <= max(0.1 * training, 3.0) or number == 1


def slow_digits(rank: int, size: int, seconds: float, evaluations: int | None) -> list[Event]:
    """Train digits for 48 steps with slow evaluations. Return the events of this rank."""
    events: list[Event] = []
    share = HeldOut.share

    def slowly(self: HeldOut, *args: Any, **settings: Any) -> Any:
        time.sleep(seconds)
        return share(self, *args, **settings)

    HeldOut.share = slowly  # type: ignore[method-assign, assignment]
    evaluation.FREE_SECONDS = 4 * seconds
    job = Job("digits", "local:period=4", 2, epochs=2.1, evaluations=evaluations)
    train.train_worker(job, events.append)
    return events


@pytest.mark.nightly
def test_a_costly_evaluation_is_done_less_often() -> None:
    """The first evaluation determines the number. All workers use the same steps."""
    events, silent = on_processes(slow_digits, 0.3, None, workers=2)
    assert silent == []
    (chosen,) = (event for event in events if isinstance(event, EvaluationCount))
    assert 0.3 < chosen.seconds < 1.3
    assert 1 <= chosen.evaluations <= 3  # 1.2 s for them, or a tenth of a shorter run
    points = [event.step for event in events if isinstance(event, Evaluation)]
    assert points == [round(48 * (i + 1) / chosen.evaluations) for i in range(chosen.evaluations)]
    steps = [event.step for event in events if isinstance(event, Evaluation | Step)]
    assert steps == [*range(1, 49), 48]  # the last is evaluated once training is over


@pytest.mark.nightly
def test_a_given_number_of_evaluations_is_kept() -> None:
    events = on_processes(slow_digits, 0.02, 6, workers=2)[0]
    assert not any(isinstance(event, EvaluationCount) for event in events)
    points = [event.step for event in events if isinstance(event, Evaluation)]
    assert points == [8, 16, 24, 32, 40, 48]


def test_events_report_what_is_waited_for() -> None:
    events: list[Event] = []
    job = Job("digits", "bsp", 2, epochs=0.2, evaluations=2)
    run_and_record(job, events.append, VirtualCluster(Network("1Gbit/s"), Compute("5ms")))
    names = [e.what if isinstance(e, Waiting) else type(e).__name__ for e in events]
    assert names == [
        *("loading the data", "connecting to the other workers", "Start"),
        *("Step", "evaluating", "Evaluation", "Step", "Step", "Step"),
        *("finishing", "evaluating", "Evaluation", "End"),
    ]


def test_in_virtual_time_evaluation_is_free_and_nothing_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There are 24 evaluations, and the training is the same as with one."""
    monkeypatch.setitem(tiny.RECIPES, "tiny", tiny.RECIPE)
    monkeypatch.setattr(tiny, "STEPS", 30)
    results = []
    for evaluations in (None, 1):
        job = Job("tiny", "bsp", 2, evaluations=evaluations)
        events: list[Event] = []
        place = VirtualCluster(Network("1Gbit/s"), Compute("5ms"))
        results.append(run_and_record(job, events.append, place))
        assert not any(isinstance(event, EvaluationCount) for event in events)
    often, once = results
    assert (len(often.points), len(once.points)) == (24, 1)
    assert often.final == once.final
    assert often.seconds == pytest.approx(once.seconds, rel=1e-9)


def test_the_language_model_scores_each_sample() -> None:
    """A model with equal logits needs 8 bits per byte in every sample."""
    task = find_recipe("stdlib-lm").build(Setup(1, 0.001))
    nn.init.zeros_(task.model.head.weight)
    nn.init.zeros_(task.model.head.bias)
    (sums,) = task.evaluate.share(task.model, 1, 4).values()
    assert sums == pytest.approx([32 * 8.0] * 2, rel=1e-6)  # 256 windows, 32 at once, by 4 workers


def test_one_worker_gathers_its_own_share() -> None:
    assert run(together, workers=1) == [top(1000)(problem()[0])]
    assert not dist.is_initialized()
