"""Asynchronous DiLoCo against Algorithm 3 of Liu et al., step by step in the order of arrivals."""

import heapq
import math
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from loops import close
from offbeat import AsyncDiLoCo, Compute, Network, simulate
from offbeat.baselines.async_diloco import DelayedNesterovRule
from problems import (
    OPTIMIZERS,
    flat,
    gradient_at,
    make_batch,
    make_model,
    train_step,
)
from workers import run as run_processes
from worlds import run

FAST = Network("100Gbit/s", latency=0)  # messages of this model take nanoseconds
RATE = 0.05  # of OPTIMIZERS["sgd"]


# -- the server's step -----------------------------------------------------------------------------


def make_rule(elements: int, **settings: Any) -> DelayedNesterovRule:
    zeros = torch.zeros(elements, dtype=torch.float64)
    return DelayedNesterovRule(**settings, velocity=zeros.clone(), buffer=zeros.clone())


def pushed(rule: DelayedNesterovRule, theta: Tensor, arrivals: Sequence[Tensor]) -> list[Tensor]:
    shard, trace = theta.clone(), []
    for g in arrivals:
        rule.push(shard, g.clone(), source=0)
        trace.append(shard.clone())
    return trace


def draws(number: int, elements: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = torch.randn(number, elements, generator=generator, dtype=torch.float64)
    return list(draw)


def test_a_small_example_by_hand() -> None:
    """K = 2, μ = 1/2, η = 1, u = 4, 8, 2, 0.

    1: D = 2, θ −= 2.  2: m = D = 6, θ −= 3 + 4.  3: D = 1, θ −= 1.  4: m = 3 + 1 = 4, θ −= 2.
    """
    rule = make_rule(1, lr=1.0, momentum=0.5, weight=0.5, period=2)
    arrivals = [torch.tensor([u], dtype=torch.float64) for u in (4, 8, 2, 0)]
    got = pushed(rule, torch.zeros(1, dtype=torch.float64), arrivals)
    assert [one.item() for one in got] == [-2, -9, -10, -12]


@pytest.mark.parametrize("period", [1, 3])
def test_a_period_of_arrivals_is_a_nesterov_step_with_their_mean(period: int) -> None:
    """Compares with torch's SGD, which is DiLoCo's outer optimizer."""
    theta, *arrivals = draws(1 + 4 * period)
    rule = make_rule(5, lr=0.7, momentum=0.9, weight=1 / period, period=period)
    got = pushed(rule, theta, arrivals)[period - 1 :: period]
    parameter = nn.Parameter(theta.clone())
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for i, one in enumerate(got):
        parameter.grad = torch.stack(arrivals[i * period : (i + 1) * period]).mean(0)
        sgd.step()
        close(one, parameter.detach())


# -- workers and server in virtual time ------------------------------------------------------------


def train(rank: int, size: int, strategy: AsyncDiLoCo, steps: Sequence[int]) -> dict[str, Any]:
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    sync = offbeat.attach(model, optimizer, strategy, timeout_seconds=20)
    trace = []
    for step in range(steps[rank]):
        train_step(model, optimizer, make_batch(rank, step))
        trace.append(flat(model))
    periods = sync.stats.details.get("period_steps")
    sync.finish()
    return {"trace": trace, "end": flat(model), "period_steps": periods}


def play(
    strategy: AsyncDiLoCo, paces: Sequence[float], steps: Sequence[int]
) -> tuple[list[list[Tensor]], Tensor, list[int], set[int]]:
    """Reference: workers that take steps of these durations, one event after the other.

    Returns the models after each step, the server's model at the end, the last period of each
    worker, and the lengths of all periods. Messages take no time. A worker pushes its remaining
    steps at its end, after which its speed does not count.
    """
    workers, beta, lr = len(paces), strategy.outer_momentum, strategy.outer_lr
    every = strategy.momentum_period or workers
    weight = 1 / math.sqrt(workers) if every == 1 else 1 / every
    theta = flat(make_model(seed=0))
    xs, starts = [theta] * workers, [theta] * workers
    m, delta, arrivals = torch.zeros_like(theta), torch.zeros_like(theta), 0
    periods, taken, known = [strategy.period] * workers, [0] * workers, dict[int, float]()
    trace: list[list[Tensor]] = [[] for _ in paces]
    lengths = set[int]()
    queue = [(pace, rank) for rank, pace in enumerate(paces)]
    heapq.heapify(queue)
    while queue:
        now, rank = heapq.heappop(queue)
        step = len(trace[rank])
        xs[rank] = xs[rank] - RATE * gradient_at(xs[rank], rank, step)
        taken[rank] += 1
        last = step + 1 == steps[rank]
        due = taken[rank] == periods[rank]
        if due or last:
            g, arrivals = weight * (starts[rank] - xs[rank]), arrivals + 1
            delta = delta + g
            theta = theta - lr * g
            if arrivals % every == 0:
                m, delta = beta * m + delta, torch.zeros_like(m)
                theta = theta - lr * beta * m
        if due:
            xs[rank] = starts[rank] = theta
            taken[rank] = 0
            known[rank] = paces[rank]
            if strategy.dynamic_steps:
                fastest = min(known.values())
                periods[rank] = max(1, math.floor(strategy.period * fastest / paces[rank] + 1e-9))
        trace[rank].append(xs[rank])
        lengths.add(periods[rank])
        if last:
            known.pop(rank, None)
        else:
            heapq.heappush(queue, (now + paces[rank], rank))
    return trace, theta, periods, lengths


@pytest.mark.sampled
@pytest.mark.parametrize("servers", [None, (2,)], ids=str)
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"period": 4},
        {"period": 6, "momentum_period": 2, "outer_lr": 0.5},
        {"period": 3, "momentum_period": 1, "outer_momentum": 0.6, "outer_lr": 0.4},
        {"period": 5, "outer_momentum": 0.0},
    ],
    ids=str,
)
def test_workers_exchange_one_at_a_time(
    settings: dict[str, Any], dynamic: bool, servers: tuple[int, ...] | None
) -> None:
    """Every model after every step, the server's at the end, and the lengths of the periods."""
    paces, steps = (1.0, 1.37, 2.63), (31, 24, 13)
    strategy = AsyncDiLoCo(**settings, dynamic_steps=dynamic, servers=servers)
    result = simulate(
        lambda: train(dist.get_rank(), 3, strategy, steps),
        workers=3,
        network=FAST,
        compute=Compute(0.01, slowdown=dict(enumerate(paces))),
    )
    trace, theta, periods, lengths = play(strategy, paces, steps)
    for rank, one in enumerate(result.results):
        for got, want in zip(one["trace"], trace[rank], strict=True):
            close(got, want)
        close(one["end"], theta)
        assert one["period_steps"] == periods[rank]
    assert (len(lengths) > 1) == dynamic


def test_one_worker_alone_is_diloco() -> None:
    settings: dict[str, Any] = {"period": 4, "outer_lr": 0.5, "outer_momentum": 0.8}
    (one,) = run(train, AsyncDiLoCo(**settings), [12], workers=1)
    (other,) = run(train, offbeat.DiLoCo(**settings), [12], workers=1)
    for got, want in zip(one["trace"], other["trace"], strict=True):
        close(got, want)


def test_no_worker_waits_for_another_one() -> None:
    """Worker 1 is ten times slower, and worker 0 takes all its steps in their computing time."""
    strategy = AsyncDiLoCo(period=5, dynamic_steps=False)

    def work() -> float:
        model = make_model(seed=0)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        sync = offbeat.attach(model, optimizer, strategy)
        start = sync._host.now()
        for step in range(40):
            train_step(model, optimizer, make_batch(dist.get_rank(), step))
        seconds: float = sync._host.now() - start
        sync.finish()
        return seconds

    compute = Compute("10ms", slowdown={1: 10.0})
    fast, slow = simulate(work, workers=2, network=FAST, compute=compute).results
    assert fast == pytest.approx(0.4, rel=1e-4)
    assert slow == pytest.approx(4.0, rel=1e-4)


# -- dynamic local updates -------------------------------------------------------------------------


def speeds(
    rank: int, size: int, period: int, seconds: float, looks: Sequence[float], pause: float
) -> int:
    """Train for this time, with consensuses at given times; return a late length of a period.

    The steps of a real worker take ``pause`` seconds, those of worker 1 three times as long.
    """
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    sync = offbeat.attach(model, optimizer, AsyncDiLoCo(period=period), timeout_seconds=20)
    start, due, late, step = sync._host.now(), list(looks), 0, 0
    while (now := sync._host.now() - start) < seconds:
        train_step(model, optimizer, make_batch(rank, step))
        time.sleep(pause * (1 + 2 * rank))
        step += 1
        if due and now > due[0]:
            due.pop(0)
            with sync.consensus():
                pass
        if now < 0.8 * seconds:  # later, other workers may have finished
            late = sync.stats.details.get("period_steps", 0)
    sync.finish()
    return late


@pytest.mark.parametrize("looks", [(), (0.4, 1.2)])
def test_periods_are_proportional_to_the_speeds(looks: Sequence[float]) -> None:
    """Paces 1, 1.25, 2 and 8: periods 20, 16, 10 and 2. Barriers are not part of a step."""
    result = simulate(
        lambda: speeds(dist.get_rank(), 4, 20, 2.0, looks, 0.0),
        workers=4,
        network=FAST,
        compute=Compute("10ms", slowdown={1: 1.25, 2: 2.0, 3: 8.0}),
    )
    assert result.results == [20, 16, 10, 2]


@pytest.mark.quiet
def test_real_workers_measure_their_speeds() -> None:
    """Worker 1 sleeps three times as long, so that its periods have about a third of the steps.

    On a busy machine both need further time, so that the difference is smaller.
    """
    fast, slow = run_processes(speeds, 12, 2.5, (), 0.02, workers=2)
    assert fast == 12
    assert slow <= 9


# -- numbers of less precision ---------------------------------------------------------------------


def test_the_rounding_of_a_smaller_dtype_is_not_pushed() -> None:
    """Without local steps, θ stays as it is, although x is θ rounded to bfloat16."""

    def work() -> list[Tensor]:
        model = nn.Module()
        model.x = nn.Parameter(torch.linspace(0.1, 1, 8).to(torch.bfloat16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        strategy = AsyncDiLoCo(period=1, outer_lr=0.7, outer_momentum=0.0)
        sync: Any = offbeat.attach(model, optimizer, strategy)
        seen = []
        for gradient in (0.3, 0.0, 0.0):
            model.x.grad = torch.full_like(model.x, gradient)
            optimizer.step()
            seen.append(sync._iteration.flow.server.shard.values.clone())
        assert not torch.equal(model.x.detach().float(), seen[0])
        sync.finish()
        return seen

    first, *others = simulate(work, workers=1).results[0]
    assert all(torch.equal(one, first) for one in others)
