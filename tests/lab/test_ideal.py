"""The reference ideal: the values of BSP, at the step time without communication."""

import random
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from lab import tiny
from offbeat import Compute, Network, Stats
from offbeat_lab.compare import run_and_record
from offbeat_lab.events import End, Evaluation, Start
from offbeat_lab.job import LEASED, Job
from offbeat_lab.launch.runners import Loopback, VirtualCluster
from offbeat_lab.methods.ideal import summed_speeds
from offbeat_lab.recipes import Setup
from offbeat_lab.results import Result
from offbeat_lab.scenario import Process, Scenario, ScenarioEvent
from offbeat_lab.timing import step_time


def test_a_result_has_the_seconds_of_the_end() -> None:
    """The step time of the end replaces the seconds of earlier events."""

    class Told(Loopback):
        def run(self, job: Job, on_event: Any) -> None:
            on_event(Start(9, 8))
            on_event(Evaluation(3, 0.3, 0.5, {"size": 0.5}))
            on_event(Evaluation(9, 1.8, 0.75, {"size": 0.75}))
            on_event(End((Stats(steps=9),), 0.25))

    one = run_and_record(Job("tiny", "ideal", 1), lambda event: None, Told())
    assert [(point.step, point.seconds) for point in one.points] == [(3, 0.75), (9, 2.25)]
    assert one.is_ideal


def simulated(
    method: str, compute: Compute, partition: str | None = None, scenario: str | None = None
) -> Result:
    job = Job("tiny", workers=3, evaluations=tiny.STEPS, seed=4, partition=partition).under(method)
    job = replace(job, scenario=scenario)
    place = VirtualCluster(Network("1Mbit/s", latency="10ms"), compute)
    return run_and_record(job, lambda event: None, place)


def test_in_virtual_time_it_is_bsp_without_a_network() -> None:
    """The values of bsp, steps · step time, and no waiting."""
    one, bsp = (simulated(text, Compute("5ms")) for text in ("ideal", "bsp"))
    assert [p.metrics for p in one.points] == [p.metrics for p in bsp.points]
    assert [p.seconds for p in one.points] == pytest.approx([0.005 * p.step for p in bsp.points])
    assert (one.idle, one.lssr, one.payload_bytes) == (0, 0, bsp.payload_bytes)
    assert bsp.seconds > 2 * one.seconds


def test_in_virtual_time_no_worker_waits_for_the_slowest() -> None:
    """With workers of unequal speed, the clock is the mean of their compute times."""
    compute = Compute("5ms", jitter=0.5, slowdown={1: 3.0})
    one = simulated("ideal", compute)
    own = [[compute.seconds(rank, step, 0.0, 4) for step in range(tiny.STEPS)] for rank in range(3)]
    means = np.cumsum(own, axis=1).mean(axis=0)
    assert [point.seconds for point in one.points] == pytest.approx(means)


def test_leased_data_let_it_train_at_the_sum_of_the_speeds() -> None:
    """The models of equal shares. Speeds 1 and 1/3: steps of 5 ms become 5 · 3 / (2 + 1/3) ms."""
    compute = Compute("5ms", slowdown={1: 3.0})
    leased = simulated("ideal", compute, partition=LEASED)
    assert [p.seconds for p in leased.points] == pytest.approx(
        [0.005 * 3 / (2 + 1 / 3) * p.step for p in leased.points]
    )
    equal = simulated("ideal --sampler distributed", compute)
    assert [p.step for p in leased.points] == [p.step for p in equal.points]
    assert [p.metric for p in leased.points] == pytest.approx([p.metric for p in equal.points])


def test_it_trains_on_a_batch_of_each_worker_that_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three workers: one dies after 2 steps, and one joins after 5. By hand: 36 batches.

    Each step has the mean gradient of its batches and the rate of the position, which is the number
    of batches divided by three.
    """
    monkeypatch.setattr(tiny, "STEPS", 12)
    sizes = [3, 3, 2, 2, 2, *[3] * 8]
    before = 1e-9  # an event at the end of a step would concern the step after the next one
    events = (
        ScenarioEvent(0.2 - before, worker=1, alive=False),
        ScenarioEvent(0.5 - before, worker=3, alive=True),
    )
    scenario = Scenario(events)
    one = simulated("ideal", Compute("100ms"), LEASED, str(scenario))
    starts = np.cumsum([0, *sizes])
    expected = {int(n // 3): 0.1 * i for i, n in reversed([*enumerate(starts)]) if n // 3}
    assert {p.step: p.seconds for p in one.points} == pytest.approx(expected)
    assert one.stats[0].steps == len(sizes)
    task = tiny.build(Setup(3, 1.0, 4))
    shuffles = [torch.Generator().manual_seed(4 + epoch) for epoch in range(2)]
    order = torch.cat([torch.randperm(96, generator=each) for each in shuffles]).tolist()
    parameters = [*task.model.parameters()]
    for start, size in zip(starts, sizes, strict=False):
        batches = [order[n * 4 : n * 4 + 4] for n in range(start, start + size)]
        losses = [tiny.loss(task.model, task.samples.batch(batch)) for batch in batches]
        gradients = torch.autograd.grad(sum(losses) / size, parameters)
        norm = float(torch.sqrt(sum(((g**2).sum() for g in gradients), torch.zeros(()))))
        factor = tiny.LR * tiny.rate(start // 3) * min(1.0, tiny.CLIP / (norm + 1e-6))
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= factor * gradient
    assert one.final == pytest.approx(tiny.size_of(parameters))


def test_the_summed_speeds_follow_changes_and_jitter() -> None:
    """At each time, the workers' own steps and their parts of a step add up to multiples of N."""

    def slowdown(rank: int, step: int, now: float) -> float:
        return 3.0 if rank == 1 else 4.0 if rank == 0 and now >= 0.03 else 1.0

    compute = Compute("5ms", jitter=0.5, slowdown=slowdown)
    ends = np.zeros((3, 41))
    for rank, own in enumerate(ends):
        for step in range(40):
            own[step + 1] = own[step] + compute.seconds(rank, step, own[step], 7)
    processes = [Process(rank) for rank in range(3)]
    times = [now for now, size in islice(summed_speeds(compute, processes, 7), 12) if size == 3]
    done = [sum(np.interp(now, own, range(41)) for own in ends) for now in times]
    assert done == pytest.approx([3 * number for number in range(1, 13)])
    assert times == sorted(times)
    assert times[-1] < ends[:, -1].min()  # so the references are long enough


@pytest.mark.parametrize("last", [15, 12])
def test_a_measurement_restores_the_state(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """Model, buffers, optimizer, schedule and random states are as before, although it trained.

    This holds for an interrupted measurement, too.
    """
    monkeypatch.setattr(
        step_time, "gather", lambda value, device, what: [value, 3 * value if value else 0]
    )
    monkeypatch.setattr(step_time, "REFERENCE", step_time.Duration(5, 10, 0.0))
    task = tiny.build(Setup(1, 1.0))
    task.optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1, momentum=0.9)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    drawn = random.getstate()
    before = [t.detach().clone() for t in (*task.model.parameters(), *task.model.buffers())]
    seen: list[float] = []

    def batches() -> Any:
        for batch in tiny.Batches(task, tiny.make_sampler(task, 1, 0, seed=0)):
            torch.rand(1)
            np.random.random()
            random.random()
            if len(seen) == last:
                raise KeyboardInterrupt
            seen.append(tiny.size_of([*task.model.parameters()]))
            yield batch

    alone = step_time.LocalTraining(task, batches)
    with nullcontext() if last == 5 + 10 else pytest.raises(KeyboardInterrupt):
        alone.measure()
    assert len(seen) == last
    assert len(set(seen)) == len(seen)
    for tensor, value in zip(
        (*task.model.parameters(), *task.model.buffers()), before, strict=True
    ):
        assert torch.equal(tensor, value)
    assert task.optimizer.state_dict()["state"] == {}
    assert all(parameter.grad is None for parameter in task.model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # type: ignore[index]
    assert random.getstate() == drawn


def test_the_step_time_is_the_mean_over_steps_and_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both measurements count, without their warm-up, by a clock written by hand."""
    stretches = [[9.0] * 5 + [1.0] * 6 + [2.0] * 5, [9.0] * 5 + [4.0] * 10]
    others = iter([None, 7.0, None, 5.0])
    gathered: list[Any] = []

    def gather(value: Any, device: object, what: str) -> list[Any]:
        gathered.append(value)
        return [value, next(others)]

    now = 0.0
    ticks = iter([0.0, *stretches[0], 0.0, *stretches[1]])

    def clock() -> float:
        nonlocal now
        now += next(ticks)
        return now

    monkeypatch.setattr(step_time, "gather", gather)
    monkeypatch.setattr(
        step_time, "REFERENCE", step_time.Duration(5, 10, 16.0)
    )  # of 6·1 + 5·2 in the first
    monkeypatch.setattr(step_time.time, "perf_counter", clock)
    task = tiny.build(Setup(1, 1.0))
    alone = step_time.LocalTraining(
        task, lambda: tiny.Batches(task, tiny.make_sampler(task, 1, 0, seed=0))
    )
    alone.measure()
    assert alone.step_seconds == (16 / 11 + 7.0) / 2
    alone.measure()
    own = (6 * 1.0 + 5 * 2.0 + 10 * 4.0) / 21
    assert gathered == [None, 16 / 11, None, own]
    assert alone.step_seconds == (own + 5.0) / 2


def test_the_step_time_is_robust_to_other_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds on a made-up clock. The five warm-up steps and a few long steps do not count."""
    durations = iter([1000.0] * 5 + [6.0] * 15 + [5.0] * 13 + [90.0] * 2)
    clock = 0.0

    def train(task: Any, batch: Any) -> None:
        nonlocal clock
        clock += next(durations) / 1000

    monkeypatch.setattr(step_time, "_train_on", train)
    monkeypatch.setattr(step_time.time, "perf_counter", lambda: clock)
    assert step_time.measure_recipe("tiny") == pytest.approx((0.005, 0.005, 0.006))
