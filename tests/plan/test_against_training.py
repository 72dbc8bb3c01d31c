"""Plans against real trainings in the simulator: seconds of a step, idle share and bytes.

A new strategy is one row. What is measured of a training is a whole number of the strategy's
cycles, after some have passed.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cells import nightly, some
from offbeat.plan.forecast import measure
from offbeat.plan.placeholder_model import Shapes
from offbeat.plan.run import run, with_node_cost
from offbeat.strategies.registry import parse_strategy
from plan_settings import ELEMENTS, FAST, SLOW, TENSORS, setting, shapes, train

CASES = [
    (4, "float32"),
    (4, "int8"),
    pytest.param(2, "bfloat16", marks=pytest.mark.nightly),
    pytest.param(2, "int2", marks=pytest.mark.nightly),
]


@dataclass(frozen=True)
class Row:
    """A strategy, and after how many steps everything repeats.

    Attributes:
        text: The strategy.
        cycle: The steps.
        bandwidth: Of the links.
        within: Relative error of seconds and bytes.
        wanders: True if nothing repeats: the same steps of both runs are compared.
    """

    text: str
    cycle: int = 1
    bandwidth: float = SLOW
    within: float = 1e-6
    wanders: bool = False

    def __str__(self) -> str:
        return f"{self.text} at {self.bandwidth / 1e6:g} Mbit/s"


ROWS = [
    Row("bsp"),
    Row("bsp", bandwidth=FAST),
    Row("local:period=1"),
    Row("local:period=6,warmup_steps=3", 6),
    Row("selsync:delta=0"),
    Row("selsync:delta=inf"),
    Row("selsync:delta=inf,max_interval=4", 4),
    Row("selsync:delta=inf,max_interval=4,flags=deferred", 4),
    Row("selsync:delta=inf,max_interval=4,aggregate=gradients", 4),
    Row("async:staleness=2"),
    Row("async:staleness=6", 3),
    Row("async:staleness=16", 8),
    Row("async:staleness=4,outer_lr=0.7,outer_momentum=0.5", 2),
    Row("async:staleness=1,schedule=eager"),
    Row("async:staleness=5,schedule=eager", 12),
    Row("async:staleness=16,schedule=eager", 12),
    Row("streaming:parts=2,schedule=cyclic,staleness=8", 4, FAST),
    Row("streaming:parts=4,schedule=cyclic,staleness=8", 4, FAST),
    Row("streaming", 64, wanders=True),
    Row("streaming:staleness=3", 64, wanders=True),
    Row("diloco:period=6", 6),
    Row("diloco:period=6,fragments=2,overlap=2", 6),
    Row("diloco:period=8,fragments=4,overlap=3,outer_momentum=0", 8),
]


def compare(row: Row, workers: int, wire: Any, of: Shapes, *, nodes: bool = False) -> None:
    strategy = parse_strategy(row.text)
    where = with_node_cost(setting(workers, row.bandwidth, nodes=nodes, of=of))
    settle, steps = (-(-least // row.cycle) * row.cycle for least in (8, 16))
    seconds, idle, sent = train(
        strategy,
        wire,
        workers=workers,
        bandwidth=row.bandwidth,
        settle=settle,
        steps=steps,
        elements=round(of.count / TENSORS),
        nodes=nodes,
    )
    if row.wanders:
        record = run(strategy, wire, where, lambda record: len(record) >= settle + steps)
        before, last = record.steps[settle - 1], record.steps[-1]
        assert (last.clock - before.clock) / steps == pytest.approx(seconds, rel=row.within)
        assert (last.payload - before.payload) / steps == pytest.approx(sent, rel=row.within)
        return
    told = measure(strategy, wire, where).forecast
    assert told.steady
    assert told.step_seconds == pytest.approx(seconds, rel=row.within)
    assert told.idle == pytest.approx(idle, abs=row.within)
    assert told.payload_bytes == pytest.approx(sent, rel=row.within, abs=1)


@pytest.mark.sampled
@pytest.mark.parametrize(("workers", "wire"), CASES)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_plan_agrees_with_a_training(row: Row, workers: int, wire: Any) -> None:
    """Each number of the placeholder stands for 64 numbers of the model."""
    compare(row, workers, wire, shapes())


@pytest.mark.parametrize("wire", ["float32", *nightly(["int8"])])
@pytest.mark.parametrize("row", some([ROWS[0], ROWS[2], ROWS[10], ROWS[16], ROWS[21]], 0), ids=str)
def test_a_plan_agrees_with_several_buckets(row: Row, wire: Any) -> None:
    """A model of 20 MB, in three buckets, of two workers on links of 1 Gbit/s."""
    compare(replace(row, bandwidth=1e9), 2, wire, shapes(elements=655_360, smaller=2**13))


@pytest.mark.parametrize("wire", ["float32", *nightly(["int8"])])
@pytest.mark.parametrize(
    "row",
    [
        Row("bsp"),
        Row("local:period=6", 6),
        Row("async:staleness=6", 3),
        Row("async:staleness=5,schedule=eager", 12),
        Row("streaming:parts=2,schedule=cyclic,staleness=8", 4, FAST),
        Row("diloco:period=6,fragments=2,overlap=2", 6, FAST),
    ],
    ids=str,
)
def test_a_plan_agrees_in_nodes(row: Row, wire: Any) -> None:
    """Two nodes of two. Parts are cut at numbers of the placeholder, hence the wider bounds."""
    compare(replace(row, within=2e-3), 4, wire, shapes(), nodes=True)


def test_a_placeholder_of_full_size_agrees() -> None:
    """At scale 1 payloads are not blank and the codecs compute."""
    of = shapes(smaller=1)
    assert of.scale == 1
    for row in (ROWS[0], ROWS[3], ROWS[10]):
        compare(row, 4, "int8", of)
    assert math.prod([TENSORS, ELEMENTS]) == of.count
