"""Data injection: senders, samples, and the batches that the workers train on.

Most tests run on simulated workers. ``--world gloo`` runs those with ``run`` on real processes.
"""

import itertools
import math
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import offbeat
from offbeat import Compute, Network
from offbeat_lab.compare import run_and_record
from offbeat_lab.injection import (
    Injection,
    count_to_send,
    draw_samples,
    draw_senders,
    injected_batch_size,
)
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import VirtualCluster
from strategies.rows import ROWS, Row, each
from worlds import real, run

few = settings(deadline=None, max_examples=30)
fractions = st.sampled_from(["0.05", "0.1", "0.25", "0.3", "0.5", "0.7", "0.9", "1"])

# -- who sends, and how much ----------------------------------------------------------------------


@few
@given(fractions, st.integers(1, 40), st.integers(0, 3), st.integers(0, 50))
def test_ceil_alpha_n_different_workers_send(alpha: str, n: int, seed: int, step: int) -> None:
    """⌈αN⌉ distinct ranks, ascending, the same in every call."""
    senders = draw_senders(seed, step, n, float(alpha))
    assert len(senders) == math.ceil(Fraction(alpha) * n)
    assert senders == sorted(set(senders))
    assert set(senders) <= set(range(n))
    assert senders == draw_senders(seed, step, n, float(alpha))


@few
@given(st.integers(1, 500), fractions, fractions, st.integers(1, 64))
def test_equation_3(b: int, alpha: str, beta: str, n: int) -> None:
    """b' = b / (1 + αβN), in exact arithmetic, rounded to nearest, a half up; at least 1."""
    exact = Fraction(b) / (1 + Fraction(alpha) * Fraction(beta) * n)
    own = injected_batch_size(b, float(alpha), float(beta), n)
    assert own == max(1, math.floor(exact + Fraction(1, 2)))


@few
@given(st.integers(1, 100), fractions)
def test_a_sender_gives_beta_of_its_samples(samples: int, beta: str) -> None:
    """β of them, a half rounded up, at least one."""
    exact = Fraction(beta) * samples
    want = max(1, math.floor(exact + Fraction(1, 2)))
    assert count_to_send(samples, float(beta)) == want
    chosen = draw_samples(0, 3, 1, samples, float(beta))
    assert len(set(chosen)) == want
    assert chosen == sorted(chosen)
    assert set(chosen) <= set(range(samples))


# -- between workers ------------------------------------------------------------------------------

STEPS = 6


def own_batch(rank: int, step: int, samples: int) -> tuple[Tensor, Tensor]:
    """Images whose pixels and labels say whose they are: rank, step, index."""
    label = 10**6 * rank + 100 * step + torch.arange(samples)
    return label.double().reshape(-1, 1).expand(-1, 3), label  # the images are not contiguous


def injection(batches: Any, alpha: float = 0.5, beta: float = 0.5, seed: int = 3) -> Injection:
    ticks = itertools.count()
    return Injection(
        batches,
        alpha,
        beta,
        seed=seed,
        device=torch.device("cpu"),
        now=lambda: float(next(ticks)),
    )


def exchange(
    rank: int, size: int, alpha: float, beta: float, samples: int
) -> tuple[list[list[int]], dict[str, int]]:
    """Return the labels of the batches of a worker, and its totals."""
    batches = injection([own_batch(rank, step, samples) for step in range(STEPS)], alpha, beta)
    labels = []
    for x, y in batches:
        assert torch.equal(x, y.double().reshape(-1, 1).expand(-1, 3)), "labels stay with x"
        labels.append(y.tolist())
    assert batches.wait_seconds == STEPS  # of a clock that counts how often it is read
    return labels, batches.details


def check(results: list[list[list[int]]], alpha: float, beta: float, samples: int) -> None:
    """What the definition demands of the batches of each step, read from their labels."""
    size, each_sends = len(results), max(1, math.floor(beta * samples + 0.5))
    for step, rows in enumerate(zip(*results, strict=True)):
        sent: dict[int, list[int]] = {}  # rank → what it sent, the same to all
        for rank, labels in enumerate(rows):
            assert labels[:samples] == own_batch(rank, step, samples)[1].tolist()
            sources = [label // 10**6 for label in labels[samples:]]
            assert sources == sorted(sources)
            assert rank not in sources
            for source, group in itertools.groupby(labels[samples:], lambda one: one // 10**6):
                part = list(group)
                assert sent.setdefault(source, part) == part
                assert len(part) == each_sends
                assert set(part) <= set(own_batch(source, step, samples)[1].tolist())
        assert len(sent) == math.ceil(alpha * size)
        for rank, labels in enumerate(rows):
            assert {one // 10**6 for one in labels[samples:]} == set(sent) - {rank}


@pytest.mark.parametrize(("alpha", "beta"), [(0.2, 1.0), (1.0, 0.3), (0.6, 0.01)])
def test_batches_hold_own_samples_and_those_of_the_senders(alpha: float, beta: float) -> None:
    results = run(exchange, alpha, beta, 5, workers=5)
    check([labels for labels, _ in results], alpha, beta, 5)


def test_real_processes_exchange_what_simulated_workers_do() -> None:
    simulated = offbeat.simulate(lambda: exchange(dist.get_rank(), 3, 0.5, 0.5, 4), workers=3)
    assert real(exchange, 0.5, 0.5, 4, workers=3) == simulated.results


def test_bytes_and_samples_are_counted() -> None:
    """Workers receive as much as they send: 8 bytes per label, 24 per image."""
    results = run(exchange, 0.5, 0.5, 4, workers=3)
    for labels, details in results:
        assert details["injected_samples"] == sum(len(batch) - 4 for batch in labels)
        assert details["injected_bytes_received"] == 32 * details["injected_samples"]
        assert details["injected_bytes_sent"] == 32 * details["injected_samples_sent"]
    total = sum((Counter(details) for _, details in results), Counter[str]())
    assert total["injected_samples_sent"] == total["injected_samples"] == STEPS * 2 * 2 * 2


def uneven(rank: int, size: int) -> list[list[int]]:
    return [y.tolist() for (y,) in injection([[torch.arange(2 * rank)]], 1.0, 1.0)]


def test_a_batch_without_samples_takes_part() -> None:
    assert run(uneven, workers=3) == [[[0, 1, 0, 1, 2, 3]]] * 2 + [[[0, 1, 2, 3, 0, 1]]]


def test_one_worker_gets_its_own_batches() -> None:
    ((labels, details),) = run(exchange, 0.5, 0.5, 4, workers=1)
    assert labels == [own_batch(0, step, 4)[1].tolist() for step in range(STEPS)]
    assert set(details.values()) == {0}


JOB = Job("digits", "bsp", 4, evaluations=1, max_steps=6)
WHERE = VirtualCluster(Network("1Mbit/s", latency="1us"), Compute("1ms"))


def test_the_exchange_takes_time_on_the_network() -> None:
    """In each step each of four workers sends a batch of 6 to three others.

    A sample has 64 numbers of 4 bytes and a label of 8. The archive of a message has about another
    1500 bytes. This counts as waiting. The bytes of the strategy stay.
    """
    job = replace(JOB, strategy="local:period=100")
    alone = run_and_record(job, lambda event: None, WHERE)
    result = run_and_record(replace(job, injection="1,1"), lambda event: None, WHERE)
    least, most = (6 * 3 * 8 * (6 * 264 + more) / 1e6 for more in (0, 3000))
    assert least < result.seconds - alone.seconds < most
    for one, other in zip(result.stats, alone.stats, strict=True):
        assert least < one.wait_seconds - other.wait_seconds < most
        assert one.compute_seconds == pytest.approx(other.compute_seconds, abs=1e-6)
        assert one.payload_bytes == other.payload_bytes
        assert one.details["injected_samples"] == 6 * 3 * 6


def test_senders_and_samples_of_published_results() -> None:
    """The draws of the results in docs/reproduction.md, which a change would invalidate."""
    assert [draw_senders(0, step, 10, 0.5) for step in range(3)] == [
        [2, 3, 6, 8, 9],
        [1, 2, 4, 5, 7],
        [2, 5, 6, 7, 8],
    ]
    assert [draw_samples(2, step, 7, 9, 0.5) for step in range(3)] == [
        [0, 3, 4, 5, 7],
        [2, 4, 6, 7, 8],
        [1, 5, 6, 7, 8],
    ]


@each([row for row in ROWS if row.strategy.averages().blocking])
def test_no_strategy_blocks_workers_that_wait_for_each_other(row: Row) -> None:
    """However fast they are. ``Job.check`` refuses the other strategies; see test_job.py."""

    def work() -> list[list[int]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-12)
        sync = offbeat.attach(model, optimizer, row.strategy, timeout_seconds=20)
        labels = []
        for x, y in injection([own_batch(dist.get_rank(), step, 4) for step in range(9)]):
            labels.append(y.tolist())
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        sync.finish()
        return labels

    for seed in range(2):
        compute = Compute("5ms", jitter=0.9)
        check(offbeat.simulate(work, workers=3, compute=compute, seed=seed).results, 0.5, 0.5, 4)


# -- what goes wrong ------------------------------------------------------------------------------


def test_other_batches_are_refused() -> None:
    def work() -> None:
        with pytest.raises(
            TypeError, match=r"tuples or lists of tensors, got a dict: .*--injection"
        ):
            list(injection([{"x": torch.zeros(2)}]))

    offbeat.simulate(work, workers=1)


def restarted(rank: int, size: int) -> str:
    """Worker 1 begins a second iteration while worker 0 continues the first one."""
    batches = injection([own_batch(rank, step, 2) for step in range(2)])
    first: Iterator[Any] = iter(batches)
    next(first)
    with pytest.raises(offbeat.MismatchError) as found:
        next(iter(batches) if rank == 1 else first)
    return str(found.value)


def test_workers_at_different_steps_are_refused() -> None:
    assert run(restarted, workers=2) == [
        "data injection: rank 1 is at step 0, rank 0 at step 1",
        "data injection: rank 0 is at step 1, rank 1 at step 0",
    ]


def die(rank: int, size: int) -> str:
    try:
        for step, _ in enumerate(injection([own_batch(rank, step, 2) for step in range(50)])):
            if rank == 2 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
    except offbeat.CommunicationError as error:
        return str(error)
    return "nothing was raised"


def test_a_worker_that_dies_ends_the_iteration_of_the_others() -> None:
    for rank, text in enumerate(real(die, workers=3, may_die=(2,))[:2]):
        assert re.match(f"rank {rank} waited for injected samples at step 5: ", text), text
