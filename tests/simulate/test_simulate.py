"""Simulated runs against values computed by hand."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat import AsyncAveraging, Compute, LocalSGD, Network, SelSync, parse_strategy, simulate
from offbeat.simulate import DeadlockError
from offbeat.strategies import Strategy
from offbeat_lab.baselines import STRATEGIES
from problems import flat, loss_of, make_batch, make_model, train_step
from strategies.rows import ROWS, Row, first_of_each
from worlds import require_complete

STEP = 0.05
ALPHA = 0.001
BANDWIDTH = 8e6  # bit/s: 1e6 bytes a second
NETWORK = Network(BANDWIDTH, latency=ALPHA)


def ring(size_bytes: float, workers: int) -> float:
    """2(N−1)(α + M/(N·B)), by hand."""
    return 2 * (workers - 1) * (ALPHA + size_bytes / (workers * 1e6))


def gathered(size_bytes: float, workers: int) -> float:
    """α + (N−1)·M/B, by hand: each worker sends its numbers to all others at once."""
    return ALPHA + (workers - 1) * size_bytes / 1e6


class Big(nn.Module):
    """One parameter whose gradient is 1: a model of ``elements`` float32."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(elements))

    def forward(self) -> Tensor:
        return self.p.sum()


def training(
    strategy: Strategy, steps: int, elements: int = 25_000
) -> Callable[[], dict[str, Any]]:
    """A training function; 100 kB take ``ring(1e5, N)`` a mean."""

    def worker() -> dict[str, Any]:
        model = Big(elements)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = offbeat.attach(model, optimizer, strategy)
        start = sync._host.now()
        times = []
        for _ in range(steps):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            times.append(sync._host.now() - start)
        stats = sync.stats.to_dict()
        sync.finish()
        return {"times": times, "stats": stats, "model": model.p[:3].tolist()}

    return worker


VOTE = 8 * 8  # the eight numbers of a vote, in float64


def test_a_bsp_step_is_compute_and_all_reduce() -> None:
    """Exactly: without overlap, because the time of backward is charged at its end."""
    result = simulate(
        training(offbeat.BSP(), 10), workers=4, network=NETWORK, compute=Compute(STEP)
    )
    # the agreement: the vote, the contribution and the layout of the parameter; then the gradient
    step = STEP + gathered(VOTE + 8 * (1 + 1), 4) + ring(4 * 25_000, 4)
    for one in result.results:
        assert one["times"] == pytest.approx([step * (i + 1) for i in range(10)], rel=1e-12)
        assert one["stats"]["idle"] == pytest.approx(1 - STEP / step, rel=1e-9)


def test_the_totals_include_the_end() -> None:
    """Rank 0 finishes a step early: it waits one step, and both wait for the mean of 100 kB."""

    def worker() -> tuple[float, float]:
        model = Big(25_000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = offbeat.attach(model, optimizer, LocalSGD(period=1000))
        for _ in range(1 + dist.get_rank()):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        waited, sent = sync.stats.wait_seconds, sync.stats.payload_bytes
        sync.finish()
        return sync.stats.wait_seconds - waited, sync.stats.payload_bytes - sent

    (early, _), (late, sent) = simulate(
        worker, workers=2, network=NETWORK, compute=Compute(STEP)
    ).results
    assert late == pytest.approx(ring(1e5, 2), rel=0.2)
    assert early == pytest.approx(STEP + late, rel=0.1)
    assert 1e5 <= sent <= 1.1e5


@pytest.mark.parametrize("elements", [25_000, 100_000])
def test_cyclic_async_waits_for_what_a_merge_exceeds_the_cycle(elements: int) -> None:
    """A worker waits max(0, mean − β·step) per cycle."""
    strategy = AsyncAveraging(staleness=8)
    result = simulate(
        training(strategy, 40, elements), workers=4, network=NETWORK, compute=Compute(STEP)
    )
    mean = gathered(VOTE, 4) + ring(4 * elements, 4)  # the vote goes first over the same cards
    cycle = max(4 * STEP, mean)
    assert (mean > 4 * STEP) == (elements == 100_000)
    for one in result.results:
        ends = one["times"][3::4]
        assert ends[0] == pytest.approx(4 * STEP, rel=1e-12)
        assert np.diff(ends) == pytest.approx([cycle] * 9, rel=1e-9)
        waited = 9 * max(0.0, mean - 4 * STEP)
        assert one["stats"]["wait_seconds"] == pytest.approx(waited, abs=1e-9)


def draw(kind: str) -> float:
    match kind:
        case "normal":  # numpy makes them in pairs, and keeps the second
            return float(np.random.normal())
        case "uniform":
            return float(np.random.random())
        case "torch":
            return float(torch.rand(()))
    return random.random()


def drawn_alone(seed: int, rank: int, kinds: list[str]) -> list[float]:
    """Draw from generators of its own, which nobody else touches."""
    a, b, c = (int(x) for x in np.random.SeedSequence((seed, rank)).generate_state(3))
    one, two, three = torch.Generator().manual_seed(a), np.random.RandomState(b), random.Random(c)
    draws = {
        "torch": lambda: float(torch.rand((), generator=one)),
        "normal": two.normal,
        "uniform": two.random_sample,
        "random": three.random,
    }
    return [draws[kind]() for kind in kinds]


def test_each_worker_draws_as_a_process_of_its_own() -> None:
    """In turns, the last one from later on. A worker may install another generator of numpy."""

    def worker() -> tuple[list[str], list[float], float]:
        rank, kinds, found = dist.get_rank(), list[str](), []
        turns = random.Random(rank)
        for turn in range(60):
            number = 0 if rank == 2 and turn < 30 else turns.randrange(3)
            for kind in turns.choices(["normal", "uniform", "torch", "random"], k=number):
                kinds.append(kind)
                found.append(draw(kind))
            dist.barrier()
        if rank == 1:
            np.random.set_bit_generator(np.random.PCG64(4))
        dist.barrier()
        return kinds, found, np.random.random()

    outside = np.random.RandomState(3)
    np.random.seed(3)
    assert np.random.normal() == outside.normal()
    results = simulate(worker, workers=3, seed=5).results
    for rank, (kinds, found, _) in enumerate(results):
        assert found == drawn_alone(5, rank, kinds)
        assert len(found) > 20
    assert results[1][2] == np.random.RandomState(np.random.PCG64(4)).random()
    assert [np.random.normal() for _ in range(3)] == [outside.normal() for _ in range(3)]


SYNCHRONOUS = [
    *("bsp", "local:period=3", "selsync:delta=0.3"),
    "selsync:target_lssr=0.5",
]


def noisy(text: str) -> Callable[[], dict[str, Any]]:
    """Uneven steps, random data, an evaluation."""

    def worker() -> dict[str, Any]:
        rank = dist.get_rank()
        model = make_model(seed=rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sync = offbeat.attach(model, optimizer, parse_strategy(text, STRATEGIES))
        for step in range(12 + rank):
            x = torch.randn(4, 4, dtype=torch.float64)
            y = torch.tensor(np.random.rand(4, 1)) + random.random()
            train_step(model, optimizer, (x, y))
            if step == 7:
                with sync.consensus():
                    seen = loss_of(model, make_batch(0, 0)).item()
        sync.finish()
        return {"model": flat(model).tolist(), "seen": seen}

    return worker


def trace(text: str, shuffle: int | None = None) -> str:
    """Everything a run gives, as text."""
    result = simulate(
        noisy(text),
        workers=3,
        network=NETWORK,
        compute=Compute(STEP, jitter=0.2, slowdown={1: 1.5}),
        seed=5,
        shuffle_ties=shuffle,
    )
    require_complete(result)
    return result.to_json() + json.dumps(result.results)


@pytest.mark.sampled
@first_of_each(ROWS)
def test_the_same_seed_gives_the_same_bytes(row: Row) -> None:
    """Twice in this process, and whatever the random state outside."""
    torch.manual_seed(1)
    first = trace(row.text)
    before = torch.get_rng_state()
    torch.manual_seed(2)
    assert trace(row.text) == first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before), "the outside's random state is left alone"


@pytest.mark.nightly  # starts two processes
def test_two_processes_give_the_same_bytes() -> None:
    code = (
        "import sys, hashlib; sys.path.insert(0, sys.argv[1]);"
        "from simulate.test_simulate import ROWS, trace;"
        "print([hashlib.sha256(trace(r.text).encode()).hexdigest() for r in ROWS])"
    )
    argv = [sys.executable, "-c", code, str(Path(__file__).parent.parent)]
    outs = [
        subprocess.run(argv, capture_output=True, text=True, timeout=100, check=True).stdout
        for _ in range(2)
    ]
    assert outs[0] == outs[1] != ""


@pytest.mark.sampled
@pytest.mark.parametrize("text", SYNCHRONOUS)
def test_shuffled_ties_do_not_change_synchronous_strategies(text: str) -> None:
    plain = json.loads(trace(text).rpartition("}[")[0] + "}")
    for shuffle in (1, 2):
        other = json.loads(trace(text, shuffle).rpartition("}[")[0] + "}")
        assert other["seconds"] == plain["seconds"]
        assert other["stats"] == plain["stats"]


def test_a_seed_shuffles_ties() -> None:
    """Without one, workers take turns in the order of their ranks."""

    def order(seed: int | None) -> list[int]:
        turns: list[int] = []
        simulate(lambda: turns.append(dist.get_rank()), workers=20, shuffle_ties=seed)
        return turns

    assert order(None) == list(range(20))
    assert order(1) == order(1) != list(range(20))
    assert order(2) != order(1)


def test_calls_of_torch_distributed_are_answered() -> None:
    """Per worker, without init_process_group, and undone after the run."""

    def worker() -> dict[str, Any]:
        assert dist.is_initialized()
        dist.init_process_group("gloo")  # a script may call it: nothing happens
        rank, size = dist.get_rank(), dist.get_world_size()
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        largest = torch.tensor([float(rank)])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        mean = torch.tensor([float(rank)])
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        one = torch.tensor([float(rank)])
        dist.broadcast(one, src=2)
        parts = [torch.zeros(2) for _ in range(size)]
        work = dist.all_gather(parts, torch.full((2,), float(rank)), async_op=True)
        work.wait()
        dist.barrier()
        dist.destroy_process_group()
        return {
            "rank": (rank, size),
            "values": [t.item() for t in (total, largest, mean, one)],
            "parts": [part.tolist() for part in parts],
        }

    result = simulate(worker, workers=4)
    for rank, one in enumerate(result.results):
        assert one["rank"] == (rank, 4)
        assert one["values"] == [10.0, 3.0, 1.5, 2.0]
        assert one["parts"] == [[float(r)] * 2 for r in range(4)]
    assert not dist.is_initialized()
    assert result.seconds > 0


def test_a_deadlock_names_every_worker() -> None:
    """Rank, virtual time, operation and source line, the last events and the seed."""

    def worker() -> None:
        if dist.get_rank() == 1:
            return
        dist.all_reduce(torch.ones(3))  # the line that waits

    with pytest.raises(DeadlockError) as caught:
        simulate(worker, workers=3, seed=77)
    text = str(caught.value)
    assert "seed 77" in text
    assert "rank 1 finished" in text
    for rank in (0, 2):
        line = next(one for one in text.splitlines() if one.startswith(f"  rank {rank} "))
        assert "waits in dist.all_reduce" in line
        assert "test_simulate.py" in line
        assert "the line that waits" in line
    assert "the last events" in text


def test_an_exception_ends_the_run_and_names_the_rank() -> None:
    def worker() -> None:
        dist.barrier()
        if dist.get_rank() == 2:
            raise KeyError("lost")
        dist.barrier()

    with pytest.raises(KeyError, match="lost") as caught:
        simulate(worker, workers=4)
    assert "simulated worker 2" in "".join(caught.value.__notes__)
    assert simulate(dist.get_rank, workers=2).results == [0, 1], "the next run is not affected"


def test_mismatched_collectives_are_named() -> None:
    def worker() -> None:
        dist.all_reduce(torch.ones(3 + dist.get_rank()))

    with pytest.raises(offbeat.OffbeatError, match=r"rank 1 starts .* but rank 0 started"):
        simulate(worker, workers=2)


def test_the_account_is_complete(tmp_path: Path) -> None:
    """compute + wait = elapsed per worker; bytes sent by the ring formula; JSON and plot."""
    result = simulate(
        training(SelSync(delta=0), 5), workers=3, network=NETWORK, compute=Compute(STEP)
    )
    require_complete(result)
    assert [stats.compute_seconds for stats in result.stats] == pytest.approx([5 * STEP] * 3)
    payload = 5 * (100_000 + VOTE)
    ring_share = 4 / 3  # 2(N−1)/N
    assert result.sent_bytes[0] >= payload * ring_share
    assert 0 < result.idle < 1
    told = json.loads(result.to_json())
    assert told["simulated"] is True
    assert told["configuration"]["workers"] == 3
    result.plot(tmp_path / "lanes.png")
    assert (tmp_path / "lanes.png").read_bytes().startswith(b"\x89PNG")


def test_sixty_four_workers_run() -> None:
    result = simulate(training(AsyncAveraging(staleness=4), 6), workers=64, network=NETWORK)
    assert len(result.results) == 64
    assert len({tuple(one["model"]) for one in result.results}) == 1


@pytest.mark.parametrize("workers", [0, -1, 2.0, True])
def test_bad_worker_counts_are_refused(workers: Any) -> None:
    with pytest.raises(
        (ValueError, TypeError), match=r"workers must be (an integer of )?at least 1"
    ):
        simulate(lambda: None, workers=workers)


def when_received(
    messages: list[tuple[int, int]], elements: int, workers: int, network: Network
) -> list[float]:
    """Return the time at which each worker has sent and received its messages, in this order."""

    def worker() -> float:
        communicator = dist.group.WORLD.make_communicator(60.0)  # type: ignore[union-attr]
        rank, x = communicator.rank, torch.zeros(elements)
        to = [destination for source, destination in messages if source == rank]
        of = [source for source, destination in messages if destination == rank]
        futures = [communicator.send(x, destination=other, what="part") for other in to]
        futures += [communicator.receive(x, source=other, what="part") for other in of]
        for future in futures:
            future.wait()
        return float(communicator.host.now())

    return simulate(worker, workers=workers, network=network).results


def test_messages_queue_on_each_link_separately() -> None:
    """All to all at once takes as long as one link needs for N − 1 messages, and one latency."""
    messages = [(rank, (rank + i) % 5) for i in range(1, 5) for rank in range(5)]
    # 500 kB: 40 ms at 100 Mbit/s
    found = when_received(messages, 125_000, 5, Network("100Mbit/s", latency="3ms"))
    assert found == pytest.approx([4 * 0.04 + 0.003] * 5)


def test_a_server_takes_messages_one_after_the_other() -> None:
    """Its link is the bottleneck: the k-th message arrives after k times the time of one.

    It asks for the last one first.
    """
    messages = [(rank, 0) for rank in (3, 2, 1)]
    found = when_received(messages, 125_000, 4, Network("100Mbit/s", latency="3ms"))
    assert found == pytest.approx([0.123, 0.043, 0.083, 0.123])


@pytest.mark.parametrize(("number", "seconds"), [(1, 0.004), (2, 0.012)])
def test_messages_meet_a_bandwidth_that_changes(number: int, seconds: float) -> None:
    """4 kB take 4 ms at 1 MB/s, then 8 ms at half of it; a later change has no effect on them."""

    def bandwidth(rank: int, now: float) -> float:
        return 8e6 if now < 0.004 or rank == 1 else 4e6 if now < 0.005 else 24e6

    found = when_received([(0, 1)] * number, 1000, 2, Network(bandwidth, latency=0.0))
    assert found[1] == pytest.approx(seconds)
