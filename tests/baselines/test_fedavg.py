"""FedAvg against a simulation of all workers in one process, with the observed draws."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat
from loops import Sink, close, start
from offbeat import LocalSGD
from offbeat.strategies.base import Strategy
from offbeat_lab import FedAvg
from problems import PARAMETERS, Simulated, assign, flat, make_batch
from problems import train_step as take_step
from worlds import run

VOTE_BYTES = 9 * 8


def train(rank: int, size: int, strategy: Strategy, counts: Sequence[int]) -> dict[str, Any]:
    """Train from a different seed on different data, ``counts[rank]`` steps."""
    sink = Sink()
    model, optimizer, sync = start(rank, strategy, "momentum", log=sink)
    trace = []
    for step in range(counts[rank]):
        take_step(model, optimizer, make_batch(rank, step))
        trace.append(flat(model))
    own = flat(model)
    payload = sync.stats.payload_bytes
    with sync.consensus():
        seen = flat(model)
    assert torch.equal(own, flat(model)) or len(set(counts)) > 1
    sync.finish()
    return {
        "trace": trace,
        "seen": seen,
        "end": flat(model),
        "payload": payload,
        "details": sync.stats.details,
        "synced": [record["decision"] == "sync" for record in sink.records],
        "drawn": [record["drawn"] for record in sink.records if "drawn" in record],
    }


def reference(
    strategy: FedAvg, counts: Sequence[int], draws: Sequence[set[int]], period: int
) -> tuple[list[list[Tensor]], Tensor]:
    """Return every worker's model after each step, and the final model, by the definition."""
    size = len(counts)
    sim = Simulated.start(size, "momentum")
    samples = list(strategy.weights or [1.0] * size)
    news, since, rounds, trace = [False] * size, 0, 0, []
    for step in range(max(counts)):
        for rank in range(size):
            if step < counts[rank]:
                take_step(sim.models[rank], sim.optimizers[rank], make_batch(rank, step))
                news[rank] = True
        since += 1
        if since == period:
            taking = [n for n in draws[rounds] if news[n]]
            rounds, since = rounds + 1, 0
            if taking:
                total = sum(samples[n] for n in taking)
                mean = sum(samples[n] / total * flat(sim.models[n]) for n in taking)
                heirs = draws[rounds - 1] if strategy.unselected == "keep" else range(size)
                for n in heirs:
                    assign(sim.models[n], mean.clone())  # parameters become views of it
                    news[n] = False
        trace.append(sim.flat())
    if strategy.unselected == "restart" or strategy.fraction == 1:
        samples = [w * new for w, new in zip(samples, news, strict=True)]
    if any(samples):
        sim.average(samples)
    return trace, sim.flat()[0]


def observed(results: Sequence[dict[str, Any]]) -> list[set[int]]:
    """Return the workers that were drawn in each round, from their own records."""
    rounds = zip(*(result["drawn"] for result in results), strict=True)
    return [{rank for rank, drawn in enumerate(row) if drawn} for row in rounds]


@pytest.mark.sampled
@pytest.mark.parametrize("unselected", ["keep", "restart"])
@pytest.mark.parametrize("weights", [None, (600, 300, 100)])
@pytest.mark.parametrize("fraction", [0.67, 1.0])
def test_rounds_average_the_drawn_by_their_samples(
    unselected: Any, weights: tuple[float, ...] | None, fraction: float
) -> None:
    """x ← Σ_D w·x / Σ_D w on the drawn or on all workers; other workers keep their models."""
    strategy = FedAvg(period=3, fraction=fraction, unselected=unselected, weights=weights, seed=4)
    results = run(train, strategy, [20] * 3, workers=3)
    draws = observed(results)
    assert [len(draw) for draw in draws] == [2 if fraction < 1 else 3] * 6
    assert draws == drawn_by(strategy, 3, 6)
    trace, end = reference(strategy, [20] * 3, draws, 3)
    for rank, result in enumerate(results):
        assert result["synced"] == [step % 3 == 0 for step in range(1, 21)]
        for step, got in enumerate(result["trace"]):
            close(got, trace[step][rank])
        close(result["seen"], end)
        close(result["end"], end)
        assert torch.equal(result["end"], results[0]["end"])
        assert result["payload"] == 6 * (8 * PARAMETERS + VOTE_BYTES), "the same drawn or not"
        assert result["details"]["launches"] == 6
        assert result["details"]["drawn"] == sum(result["drawn"])
    for i, draw in enumerate(draws):
        models = [result["trace"][3 * i + 2] for result in results]
        alike = draw if unselected == "keep" else {0, 1, 2}
        for n in range(3):
            for m in range(n):
                assert torch.equal(models[n], models[m]) == ({n, m} <= alike), "bit-identical"


@pytest.mark.parametrize("unselected", ["keep", "restart"])
@pytest.mark.parametrize(("counts", "seed"), [([3, 17, 9], 8), ([13, 2, 4], 1)])
def test_uneven_counts(unselected: Any, counts: list[int], seed: int) -> None:
    """A worker without new steps has weight 0, and all workers compute the same draws."""
    strategy = FedAvg(period=3, fraction=0.5, unselected=unselected, weights=(1, 2, 4), seed=seed)
    draws = drawn_by(strategy, 3, 6)
    assert [len(draw) for draw in draws] == [2] * 6, "1.5 is rounded up"
    late = [rank for rank in range(3) if rank not in draws[(counts[rank] - 1) // 3]]
    assert late, "the last steps of some worker wait for a later draw"
    trace, end = reference(strategy, counts, draws, 3)
    results = run(train, strategy, counts, workers=3)
    rounds = max(counts) // 3
    for rank, result in enumerate(results):
        for step, got in enumerate(result["trace"]):
            close(got, trace[step][rank])
        close(result["end"], end)
        assert torch.equal(result["end"], results[0]["end"])
        assert result["details"]["launches"] == rounds, "those without an own step count"
        assert result["details"]["drawn"] == sum(rank in draw for draw in draws[:rounds])


@pytest.mark.parametrize("counts", [[12, 12, 12], [4, 11, 6]])
def test_all_workers_with_equal_weights_are_local_sgd(counts: list[int]) -> None:
    """fraction=1 is bitwise LocalSGD, also with explicit equal weights and with "restart"."""
    expected = run(train, LocalSGD(period=4), counts, workers=3)
    for strategy in (
        FedAvg(period=4),
        FedAvg(period=4, weights=(7, 7, 7)),
        FedAvg(period=4, unselected="restart"),
        FedAvg(rounds_per_epoch=5, steps_per_epoch=20),
    ):
        for got, want in zip(run(train, strategy, counts, workers=3), expected, strict=True):
            assert torch.equal(torch.stack(got["trace"]), torch.stack(want["trace"]))
            assert torch.equal(got["end"], want["end"])
            assert torch.equal(got["seen"], want["seen"])


@pytest.mark.parametrize(
    ("rate", "exact", "steps", "total"),
    [
        (0.25, Fraction(1, 4), 7, 60),  # after steps 28 and 56
        (3, Fraction(3), 10, 40),  # 4, 7, 10: no period
        (1 / 3, Fraction(1, 3), 5, 46),  # read as one round in three epochs
        (0.7, Fraction(7, 10), 3, 50),
        (10, Fraction(10), 10, 12),  # every step
    ],
)
def test_rounds_in_an_epoch_are_exact(rate: float, exact: Fraction, steps: int, total: int) -> None:
    """A round ends after step t iff ⌊t·E/S⌋ grows at t, in exact arithmetic."""
    strategy = FedAvg(rounds_per_epoch=rate, steps_per_epoch=steps)
    (result,) = run(train, strategy, [total], workers=1)
    expected = [
        math.floor(t * exact / steps) > math.floor((t - 1) * exact / steps)
        for t in range(1, total + 1)
    ]
    assert result["synced"] == expected
    assert sum(expected) == math.floor(total * exact / steps)


def drawn_by(strategy: FedAvg, workers: int, rounds: int) -> list[set[int]]:
    """Return the workers that are drawn in each round."""
    return [
        {rank for rank in range(workers) if strategy.draws(rank, workers, round_)}
        for round_ in range(1, rounds + 1)
    ]


def test_draws_are_fair_and_independent() -> None:
    """Every pair of 5 workers is drawn equally often. The draws depend on the seed only."""
    rounds = 300
    draws = drawn_by(FedAvg(period=1, fraction=0.4), 5, rounds)
    assert {len(draw) for draw in draws} == {2}
    for n in range(5):
        mine = sum(n in draw for draw in draws)
        assert abs(mine - 0.4 * rounds) < 4 * math.sqrt(rounds * 0.4 * 0.6)
        for m in range(n):
            both = sum({n, m} == draw for draw in draws)
            assert abs(both - 0.1 * rounds) < 4 * math.sqrt(rounds * 0.1 * 0.9)
    repeats = sum(a == b for a, b in itertools.pairwise(draws))
    assert abs(repeats - 0.1 * rounds) < 4 * math.sqrt(rounds * 0.1 * 0.9), "independent draws"
    again = drawn_by(FedAvg(period=1, fraction=0.4, unselected="restart"), 5, 40)
    assert again == draws[:40]
    assert drawn_by(FedAvg(period=1, fraction=0.4, seed=1), 5, 40) != draws[:40]


@pytest.mark.parametrize(
    ("fraction", "workers", "count"),
    [(0.01, 4, 1), (0.1, 4, 1), (0.37, 4, 1), (0.375, 4, 2), (0.5, 3, 2), (0.29, 100, 29)],
)
def test_the_number_drawn_is_rounded_half_up(fraction: float, workers: int, count: int) -> None:
    """m = max(1, ⌊C·N + ½⌋)."""
    assert FedAvg(period=1, fraction=fraction)._count(workers) == count


def statistics(rank: int, size: int, unselected: Any) -> dict[str, list[Tensor]]:
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sink = Sink()
    strategy = FedAvg(period=1, fraction=0.5, unselected=unselected, weights=(1, 2, 3))
    sync = offbeat.attach(model, optimizer, strategy, log=sink, timeout_seconds=20)
    before, after = [], []
    for step in range(4):
        for _ in range(1 + rank):
            loss = model(make_batch(rank, step, dtype=torch.float32)[0]).square().sum()
        loss.backward()
        before.append(torch.cat([b.reshape(-1).double() for b in model.buffers()]))
        optimizer.step()
        after.append(torch.cat([b.reshape(-1).double() for b in model.buffers()]))
    sync.finish()
    counted = int(model[1].num_batches_tracked)
    drawn = [record["drawn"] for record in sink.records]
    return {"before": before, "after": after, "counted": counted, "drawn": drawn}


@pytest.mark.parametrize("unselected", ["keep", "restart"])
def test_buffers_are_averaged_with_the_models(unselected: str) -> None:
    """Running statistics become the drawn workers' mean. Batch counts are equal at the end."""
    results = run(statistics, unselected, workers=3)
    for i, draw in enumerate(observed(results)):
        before = [result["before"][i] for result in results]
        mean = sum((n + 1) * before[n] for n in draw) / sum(n + 1 for n in draw)
        for n, result in enumerate(results):
            want = mean if n in draw or unselected == "restart" else before[n]
            want = torch.cat([want[:-1], before[n][-1:]])  # num_batches_tracked comes last
            torch.testing.assert_close(result["after"][i], want, rtol=1e-6, atol=1e-6)
    assert [result["counted"] for result in results] == [12] * 3, "rank 2 has seen the most"
