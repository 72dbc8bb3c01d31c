"""SSP against an event-by-event reference, its staleness bound, and BSP."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from cells import nightly
from loops import Sink, close
from offbeat import Compute, Network, Simulation, simulate
from offbeat_lab import SSP, Downpour
from problems import (
    OPTIMIZERS,
    Simulated,
    bsp_reference,
    flat,
    make_batch,
    make_model,
    train_step,
)
from worlds import run

STEP = 0.01
FAST = Network("100Gbit/s", latency=0)  # messages of this model take nanoseconds


def train(rank: int, size: int, strategy: SSP, kind: str, steps: Sequence[int]) -> dict[str, Any]:
    model = make_model(seed=rank)
    optimizer = OPTIMIZERS[kind](model.parameters())
    sink = Sink()
    sync = offbeat.attach(model, optimizer, strategy, log=sink, timeout_seconds=20)
    trace = []
    for step in range(steps[rank]):
        train_step(model, optimizer, make_batch(rank, step))
        trace.append(flat(model))
    stats = sync.stats.to_dict()
    sync.finish()
    return {"trace": trace, "end": flat(model), "stats": stats, "records": sink.records}


def in_simulator(
    strategy: SSP, kind: str, steps: Sequence[int], compute: Compute, network: Network = FAST
) -> Simulation:
    size = len(steps)
    return simulate(
        lambda: train(dist.get_rank(), size, strategy, kind, steps),
        workers=size,
        network=network,
        compute=compute,
    )


@dataclass
class Trip:
    """A request of one worker that was sent."""

    least: int  # answered when the slowest worker's clock is this
    answer: tuple[Tensor, int] | None = None  # z, and that clock
    turn: int = 0  # order of the answers: the worker answered first continues first


@dataclass
class Played:
    """One worker of ``play``."""

    x: Tensor
    steps: int
    unsent: Tensor
    waits_to_send: bool = False
    clock: int = 0
    known: int = 0  # all updates of clocks below this are in x
    trip: Trip | None = None
    trace: list[Tensor] = field(default_factory=list)
    pulls: list[int] = field(default_factory=list)


def play(
    strategy: SSP, kind: str, steps: Sequence[int], seconds: Callable[[int, int], float]
) -> tuple[list[list[Tensor]], Tensor, list[list[int]]]:
    """SSP event by event on messages that take no time, so that a request ends within a step.

    ``seconds(rank, step)`` is how long a step takes. Returns each worker's models after its steps,
    the server's last one, and at which clocks each worker's view was refreshed.
    """
    size, bound = len(steps), strategy.staleness
    reference = Simulated.start(size, kind)
    z = flat(reference.models[0])
    served, away = [0] * size, [False] * size  # clocks that the server has received
    workers = [Played(z.clone(), n, torch.zeros_like(z)) for n in steps]
    trips: list[Trip] = []  # in the order of arrival
    turns = itertools.count(1)
    events = [(seconds(rank, 0), rank) for rank in range(size) if steps[rank]]
    heapq.heapify(events)
    blocked: list[int] = []

    def answer() -> None:
        slowest = min((c for c, gone in zip(served, away, strict=True) if not gone), default=10**9)
        for trip in list(trips):
            if slowest >= trip.least:
                trip.answer, trip.turn = (z.clone(), slowest), next(turns)
                trips.remove(trip)

    def send(rank: int) -> None:
        nonlocal z
        one = workers[rank]
        need = one.known < one.clock - bound
        if one.trip is None and (one.waits_to_send or need):
            z = z + one.unsent
            one.unsent, one.waits_to_send = torch.zeros_like(z), False
            served[rank] = one.clock
            one.trip = Trip(min(one.clock, one.clock - bound + 1))
            trips.append(one.trip)
            answer()

    def take(rank: int) -> None:
        one = workers[rank]
        if one.trip is not None and one.trip.answer is not None:
            values, clock = one.trip.answer
            one.x, one.known = values + one.unsent, max(one.known, clock)
            one.trip = None
            if one.pulls[-1:] != [one.clock]:
                one.pulls.append(one.clock)

    def go_on(rank: int, now: float) -> bool:
        """Take what has arrived. Returns whether the worker may begin its next step."""
        one = workers[rank]
        while one.known < one.clock - bound:
            before = (one.trip, one.known)
            take(rank)
            send(rank)
            if (one.trip, one.known) == before:
                return False
        nn.utils.vector_to_parameters(one.x.clone(), reference.models[rank].parameters())
        one.trace.append(one.x.clone())
        if one.clock < one.steps:
            heapq.heappush(events, (now + seconds(rank, one.clock), rank))
        else:
            leaving.append(rank)
        return True

    leaving: list[int] = []
    while events:
        now, rank = heapq.heappop(events)
        one, model = workers[rank], reference.models[rank]
        train_step(model, reference.optimizers[rank], make_batch(rank, one.clock))
        update = (flat(model) - one.x) / size
        one.x, one.unsent, one.waits_to_send = one.x + update, one.unsent + update, True
        one.clock += 1
        take(rank)
        send(rank)
        if not go_on(rank, now):
            blocked.append(rank)
        moved = True
        while moved:
            moved = False
            while leaving:  # its last updates were applied; others may now continue
                gone = leaving.pop()
                z = z + workers[gone].unsent
                served[gone], away[gone] = workers[gone].clock, True
                answer()
            for other in sorted(blocked, key=lambda r: getattr(workers[r].trip, "turn", 0)):
                if go_on(other, now):
                    blocked.remove(other)
                    moved = True
    return [one.trace for one in workers], z, [one.pulls for one in workers]


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sgd", "momentum"])
@pytest.mark.parametrize("servers", [None, (1,)], ids=str)
def test_staleness_0_with_linear_optimizers_is_bsp(
    kind: str, servers: tuple[int, ...] | None
) -> None:
    """The mean of the updates is the update of the mean gradient; momentum and decay are linear."""
    want = bsp_reference(3, kind, 11)
    for result in run(train, SSP(staleness=0, servers=servers), kind, [11] * 3, workers=3):
        for got, expected in zip(result["trace"], want, strict=True):
            close(got, expected)
        close(result["end"], want[-1])
        assert result["stats"]["syncs"] == 11


SCHEDULES = {
    # rank r is always 2 ms·r behind rank 0, so that no two events coincide
    "one after the other": (
        [9, 9, 9],
        Compute(STEP, slowdown=lambda rank, step, _: 1 + 0.2 * rank * (step == 0)),
        lambda rank, step: STEP * (1 + 0.2 * rank * (step == 0)),
    ),
    "a straggler": (
        [20, 6, 20],
        Compute(STEP, slowdown={0: 1.013, 1: 5.0, 2: 1.371}),
        lambda rank, step: STEP * (1.013, 5.0, 1.371)[rank],
    ),
    "uneven": (
        [3, 17, 8],
        Compute(STEP, slowdown={0: 2.0, 1: 1.013, 2: 1.371}),
        lambda rank, step: STEP * (2.0, 1.013, 1.371)[rank],
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("staleness", [0, *nightly([1]), 2, *nightly([5])])
@pytest.mark.parametrize("name", SCHEDULES)
def test_it_is_ssp_event_by_event(name: str, staleness: int) -> None:
    """Compares every worker's model after every step, the refreshes, and the server's model."""
    steps, compute, seconds = SCHEDULES[name]
    # Workers that wait for a straggler continue together: with one server in a fixed order.
    servers = (1,) if name == "a straggler" else None
    strategy = SSP(staleness=staleness, servers=servers)
    result = in_simulator(strategy, "momentum", steps, compute)
    trace, z, pulls = play(strategy, "momentum", steps, seconds)
    for rank, one in enumerate(result.results):
        for got, want in zip(one["trace"], trace[rank], strict=True):
            close(got, want)
        close(one["end"], z)
        assert one["stats"]["syncs"] == one["stats"]["details"]["pulls"] == len(pulls[rank])
        synced = [r["step"] for r in one["records"] if r["decision"] == "sync"]
        assert synced == pulls[rank]


# -- the bound ------------------------------------------------------------------------------------


def marks(rank: int, steps: Sequence[int], strategy: SSP) -> list[Tensor]:
    """The model of a worker before each step: 1 for each update of each worker that it contains.

    The update of step t of worker n is 1 at place (n, t).
    """
    size, most = len(steps), max(steps)
    model = nn.Module()
    model.x = nn.Parameter(torch.zeros(size, most, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(size))
    sync = offbeat.attach(model, optimizer, strategy)
    read = []
    for step in range(steps[rank]):
        read.append(model.x.detach().clone())
        model.x.grad = torch.zeros_like(model.x)
        model.x.grad[rank, step] = -1.0
        optimizer.step()
    sync.finish()
    assert (model.x.sum(1) == torch.tensor(steps)).all(), "the end contains each update once"
    return read


@pytest.mark.sampled
@pytest.mark.parametrize("staleness", [0, *nightly([1, 2]), 7])
@pytest.mark.parametrize(
    "bandwidth", ["1Gbit/s", pytest.param("1Mbit/s", marks=pytest.mark.nightly), "200kbit/s"]
)
def test_a_cache_contains_all_updates_up_to_the_bound(bandwidth: str, staleness: int) -> None:
    """At clock c it contains all updates of clocks ≤ c − s − 1, and its own, each exactly once."""
    steps, late = [18, 15, 18, 9], {1: 2.5}
    strategy = SSP(staleness=staleness)
    results = simulate(
        lambda: marks(dist.get_rank(), steps, strategy),
        workers=4,
        network=Network(bandwidth, latency="1ms"),
        compute=Compute("10ms", jitter=0.3, slowdown=late),
        seed=5,
    ).results
    behind = set()
    for rank, reads in enumerate(results):
        for clock, read in enumerate(reads):
            assert set(read.unique().tolist()) <= {0.0, 1.0}
            assert read[rank, :clock].all()
            assert not read[rank, clock:].any()
            for other in range(4):
                least = min(max(0, clock - staleness), steps[other])
                assert read[other, :least].all(), (rank, clock, other)
                if clock <= steps[other]:
                    behind.add(clock - int(read[other].sum()))
    assert staleness == 0 or max(behind) > 0, "some reads are stale"


# -- far from the bound ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "steps"),
    [
        (SSP(staleness=1000), 7),
        (Downpour(), 7),
    ],
    ids=str,
)
def test_no_worker_waits_far_from_the_bound(strategy: Any, steps: int) -> None:
    """A push and its answer each take slightly more than 3 steps, and no step waits for them."""
    result = simulate(
        lambda: train(dist.get_rank(), 3, strategy, "sgd", [60] * 3),
        workers=3,
        network=Network("1Gbit/s", latency="30ms"),
        compute=Compute(STEP, jitter=0.1),
    )
    for one in result.results:
        assert one["stats"]["wait_seconds"] == 0
        pushes = one["stats"]["payload_bytes"] / (2 * 3 * 8 + 8 * 40 * 2 / 3)
        assert pushes == pytest.approx(60 / steps, rel=0.25), (
            "updates made meanwhile leave together"
        )


# -- reports --------------------------------------------------------------------------------------


def test_stats_contain_pushes_pulled_bytes_and_staleness() -> None:
    """Stats contain the pushes to each shard, the bytes pulled from other ranks, and staleness."""
    steps, compute, seconds = SCHEDULES["a straggler"]
    result = in_simulator(SSP(staleness=2), "sgd", steps, compute)
    _, _, pulls = play(SSP(staleness=2), "sgd", steps, seconds)
    for rank, one in enumerate(result.stats):
        assert one is not None
        others = 8 * (40 - [13, 13, 14][rank])  # 40 float64 in shards of 13, 13 and 14
        pulled, rest = divmod(one.details["pulled_bytes"], others)
        assert rest == 0
        assert 0 <= pulled - len(pulls[rank]) <= 1, "the last answer may not have been taken"
        histogram = one.details["staleness_histogram"]
        assert sum(histogram.values()) == one.details["pushes_served"] <= sum(steps)
        assert one.details["staleness_max"] == max(histogram)
