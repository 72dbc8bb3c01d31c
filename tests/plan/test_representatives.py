"""Runs of one worker against runs of all, and the cluster on which they run."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import override

from cells import nightly, some
from offbeat.plan.cluster import DivergedError, RepresentativeCluster, StepTime, workers_for
from offbeat.plan.record import Record
from offbeat.plan.run import Setting, run, run_members
from offbeat.simulate.cluster import Contribution
from offbeat.strategies import Strategy
from offbeat.strategies.base import SharedModel, WorkerView
from offbeat.strategies.base import setting as argument
from offbeat.strategies.registry import parse_strategy
from plan_settings import FAST, SLOW, network, setting

TEXTS = [
    "bsp",
    "local:period=3",
    "selsync:target_lssr=0.8",
    "selsync:delta=inf,max_interval=4,flags=deferred",
    "selsync:target_lssr=0.8,aggregate=gradients",
    "async:staleness=6",
    "async:staleness=5,schedule=eager",
    "streaming",
    "streaming:parts=3,schedule=cyclic,staleness=8",
    "diloco:period=6,fragments=2,overlap=2",
]
WIRES = ["float32", "int8", "int2"]
ASKING = ("async", "streaming")  # whether something has arrived: at each step, so clocks differ


def until(steps: int) -> Any:
    return lambda record: len(record) >= steps


def same(one: Record, other: Record) -> None:
    """The same clock, bytes and means after each step."""
    clocks = [step.clock for step in one.steps]
    assert clocks == pytest.approx([step.clock for step in other.steps], rel=1e-9)
    totals = [(step.payload, step.syncs) for step in one.steps]
    assert totals == [(step.payload, step.syncs) for step in other.steps]


def compare(text: str, wire: Any, where: Setting, steps: int = 60) -> None:
    workers = where.network.workers_per_node
    every = range(0, where.workers, workers)
    one, all_ = (
        run_members(parse_strategy(text), wire, where, members, until(steps))
        for members in (every[:1], every)
    )
    assert (one.running, all_.running) == (1, len(every))
    same(one, all_)
    numbers = {name for name, value in one.details.items() if isinstance(value, float)}
    assert one.details.keys() == all_.details.keys()
    for name, value in one.details.items():
        expected = pytest.approx(value) if name in numbers else value
        assert all_.details[name] == expected, name


EACH = [(text, WIRES[i % 3]) for i, text in enumerate(TEXTS)]  # each strategy over one wire


@pytest.mark.parametrize(
    "pair", [*EACH, *nightly(pair for pair in product(TEXTS, WIRES) if pair not in EACH)], ids=str
)
def test_one_worker_represents_all(pair: tuple[str, str]) -> None:
    """The same clock, bytes and means after each step, and the same totals."""
    compare(*pair, setting(5, (SLOW, FAST)[TEXTS.index(pair[0]) % 2]))


@pytest.mark.parametrize("text", some(TEXTS, 0, 2, 5, 7))
def test_one_node_represents_all(text: str) -> None:
    compare(text, "int8", setting(6, FAST, nodes=True))


@pytest.mark.parametrize("wire", some(["float32", "int8"], 0))
@pytest.mark.parametrize("text", [text for text in TEXTS if not text.startswith(ASKING)])
def test_clocks_represent_workers_with_jitter(text: str, wire: str) -> None:
    """All workers draw the same seconds in both runs."""
    where = setting(5, FAST, jitter=0.3)
    strategy = parse_strategy(text)
    try:
        one = run_members(strategy, wire, where, [0], until(60))
    except DivergedError:
        assert wire == "int8", "over an exact wire nobody asks whether something is done"
        return
    all_ = run_members(strategy, wire, where, range(5), until(60))
    same(one, all_)


def test_all_workers_run_if_decisions_depend_on_the_time() -> None:
    """Eager workers poll whether a mean has arrived; with jitter the results differ."""
    eager = parse_strategy("async:staleness=8,schedule=eager")
    where = setting(4, FAST, jitter=0.3)
    with pytest.raises(DivergedError):
        run_members(eager, "float32", where, [0], until(60))
    assert run(eager, "float32", where, until(60)).running == 4
    assert run(parse_strategy("bsp"), "float32", where, until(20)).running == 1
    assert run(parse_strategy("bsp"), "float32", setting(4, nodes=True, jitter=0.3), until(9))


@dataclass(frozen=True, kw_only=True, repr=False)
class Alike(Strategy):
    """Means at every third step."""

    every: int = argument(3, least=1)

    @override
    def averages(self) -> SharedModel:
        return SharedModel()

    @override
    def due(self, worker: WorkerView) -> float:
        return float(worker.step % self.every == 0)


@dataclass(frozen=True, kw_only=True, repr=False)
class SecondIsRare(Alike):
    """Worker 1 wants a mean at every third step only, the others at each: all follow worker 1."""

    @override
    def averages(self) -> SharedModel:
        return SharedModel(lands="arrived")

    @override
    def due(self, worker: WorkerView) -> float:
        wants = worker.rank != 1 or worker.step % self.every == 0
        return float(wants and worker.since_launch > 0 and worker.ready)


def test_all_workers_run_a_custom_strategy() -> None:
    """It may treat the ranks differently."""
    where = setting(6, FAST)
    rare = run(SecondIsRare(), "float32", where, until(30))
    assert rare.running == 6
    wrong = run_members(SecondIsRare(), "float32", where, [0], until(30))
    assert rare.steps[-1].payload < 0.7 * wrong.steps[-1].payload


def test_a_plan_keeps_the_random_state() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state(legacy=False)
    run(parse_strategy("local:period=2"), "float32", setting(), until(5))
    assert torch.equal(torch.get_rng_state(), before[0])
    after = np.random.get_state(legacy=False)["state"]
    assert np.array_equal(after["key"], before[1]["state"]["key"])


@pytest.mark.parametrize(
    ("workers", "jitter", "expected"),
    [
        (1, 0.0, 0.05),
        (4, 0.0, 0.05),
        (1, 0.2, 0.05),
        (2, 0.1, 0.05 * 1.0563),  # 2·Φ(s/√2), s² = ln 1.01
    ],
)
def test_a_node_takes_as_long_as_its_slowest_worker(
    workers: int, jitter: float, expected: float
) -> None:
    drawn = StepTime(0.05, jitter, workers).draw(np.random.default_rng(1), 40_000)
    assert drawn.mean() == pytest.approx(expected, rel=0.003)
    if jitter and workers == 1:
        assert drawn.std() == pytest.approx(0.05 * jitter, rel=0.03)


def test_collectives_queue_on_the_link() -> None:
    """One after the other, each after the slowest clock has joined it."""
    workers = workers_for([0])
    links = network(8e6, latency=0.0)
    cluster = RepresentativeCluster(workers, [0], 3, links, StepTime(1.0, 0.5), scale=1.0)
    assert cluster.clocks is not None
    group = cluster.connections.subgroup(0, (0, 1, 2), 1)

    def work(_: Any) -> tuple[float, float]:
        assert cluster.clocks is not None
        cluster.clocks[:] = [0.0, 3.0, 1.0]
        tensor = torch.zeros(1)
        call = Contribution("reduce", "a sum", tensor, 750_000, lambda _: None, lambda _: None)
        first, second = (cluster.join(group, 0, 0, call).seconds for _ in range(2))
        return first, second

    workers.run(work)
    # 2·(3 − 1)/3 · 750 kB at 1 MB/s is a second
    assert workers.all[0].result == pytest.approx((4.0, 5.0))
