"""The table of strategies that the tests of all strategies read. A new strategy is one row."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

import worlds
from offbeat import parse_strategy
from offbeat.strategies.base import CustomFlow, Strategy
from offbeat_lab.baselines import STRATEGIES
from offbeat_lab.baselines.server_strategy import ServerStrategy
from strategies.low_rank_reference import PowerSGD
from strategies.references import BSP, AsyncAveraging, DiLoCo, Gossip, Make, SelSync, Streaming
from strategies.sparse_references import SparseLoCo


@dataclass(frozen=True)
class Row:
    """A strategy.

    Attributes:
        text: Its text form.
        reference: Makes a reference of all workers. None: the values depend on the network's
            timing, or on a controller.
        alone: Text form with which one worker's model moves as if it trained alone; empty if it is
            ``text``.
        exactly: True if it does so to the last bit, otherwise to rounding.
        timed: True if the values depend on how fast workers and network are.
    """

    text: str
    reference: Make | None = None
    alone: str = ""
    exactly: bool = True
    timed: bool = False

    def __str__(self) -> str:
        return self.text

    @property
    def strategy(self) -> Strategy:
        return parse_strategy(self.text, STRATEGIES)

    @property
    def baseline(self) -> bool:
        """True if it trains with exact messages and a fixed number of workers only."""
        return isinstance(self.strategy.averages(), CustomFlow)

    @property
    def served(self) -> bool:
        """True if a parameter server holds the model."""
        return isinstance(self.strategy, ServerStrategy)

    @property
    def repeatable(self) -> int:
        """Number of workers with which two runs give the same bits."""
        # A server of processes adds up in the order in which updates arrive, which rounds.
        return 1 if self.timed or (self.served and worlds.world == "gloo") else 3


_TRIGGER: Any = {"delta": 0.5, "smoothing": 0.5}
_HALF = "selsync:delta=0.5,smoothing=0.5"
_AVERAGING = partial(DiLoCo, outer_lr=1.0, outer_momentum=0.0)

TO_TRAIN_WITH = [
    Row("bsp", BSP),
    Row("local:period=4", partial(_AVERAGING, period=4)),
    Row("local:period=5,warmup_steps=7", partial(_AVERAGING, period=5, warmup_steps=7)),
    Row("selsync:delta=0.05", partial(SelSync, delta=0.05)),
    Row(_HALF, partial(SelSync, **_TRIGGER)),
    Row(
        "selsync:delta=0.5,smoothing=0.3,window=4,warmup_steps=3,max_interval=6",
        partial(SelSync, delta=0.5, smoothing=0.3, window=4, warmup_steps=3, max_interval=6),
    ),
    Row("selsync:target_lssr=0.5,max_interval=3"),
    Row("async:staleness=4", partial(AsyncAveraging, staleness=4)),
    Row(
        "async:staleness=6,outer_lr=0.7,outer_momentum=0.5",
        partial(AsyncAveraging, staleness=6, outer_lr=0.7, outer_momentum=0.5),
        alone="async:staleness=2",
    ),
    Row("async:staleness=3,schedule=eager", timed=True),
    Row("streaming:parts=3", timed=True),
    Row("streaming:parts=3,schedule=cyclic,staleness=4", partial(Streaming, parts=3, staleness=4)),
    Row(
        "streaming:parts=2,schedule=cyclic,staleness=10,outer_gain=2",
        partial(Streaming, parts=2, staleness=10, outer_gain=2.0),
    ),
    Row(
        "streaming:parts=3,schedule=cyclic,staleness=4,outer_gain=lookahead",
        partial(Streaming, parts=3, staleness=4, outer_gain=0.5),
    ),
    Row(
        "diloco:period=5",
        partial(DiLoCo, period=5),
        alone="diloco:period=3,outer_lr=1.0,outer_momentum=0.0",
        exactly=False,
    ),
    Row(
        "diloco:period=7,fragments=3,overlap=2",
        partial(DiLoCo, period=7, fragments=3, overlap=2),
        alone="diloco:period=1000",
    ),
    Row(
        "diloco:period=6,fragments=2,overlap=5,outer_lr=0.4,outer_momentum=0.0",
        partial(DiLoCo, period=6, fragments=2, overlap=5, outer_lr=0.4, outer_momentum=0.0),
        alone="diloco:period=1000",
    ),
]
REFERENCES = [
    Row("fedavg:period=3,fraction=0.67", alone="fedavg:period=3"),
    Row("ssp:staleness=0"),
    Row("ssp:staleness=2", timed=True),
    Row("downpour", alone="downpour:fetch_every=1000", timed=True),
    Row("easgd:period=2", alone="easgd:period=1000", timed=True),
    Row(
        "sparseloco:period=4,density=0.25",
        partial(SparseLoCo, period=4, density=0.25),
        alone="sparseloco:period=1000",
    ),
    Row(
        "sparseloco:period=3,density=0.1,outer_lr=0.7,decay=0.5",
        partial(SparseLoCo, period=3, density=0.1, outer_lr=0.7, decay=0.5),
        alone="sparseloco:period=1000",
    ),
    Row("powersgd:rank=1", partial(PowerSGD, rank=1)),
    Row("powersgd:rank=2", partial(PowerSGD, rank=2)),
    Row("powersgd", PowerSGD),
    Row(
        "selsync_gradients:delta=0.5,smoothing=0.5,max_interval=9",
        partial(SelSync, **_TRIGGER, aggregate="gradients", max_interval=9),
    ),
]
ROWS = [*TO_TRAIN_WITH, *REFERENCES]
CUSTOM = Row("examples.gossip:Gossip:share=0.25", partial(Gossip, share=0.25))
"""An algorithm with its own flow, which averages neither models nor gradients."""


def each(rows: Iterable[Row]) -> Any:
    """A test of each of these rows."""
    return pytest.mark.parametrize("row", list(rows), ids=str)


def first_of_each(rows: Iterable[Row]) -> Any:
    """A test of the first row of each strategy; the others run nightly."""
    rows, seen, chosen = list(rows), set[str](), []
    for row in rows:
        name = row.text.partition(":")[0]
        chosen.append(pytest.param(row, marks=[pytest.mark.nightly] if name in seen else []))
        seen.add(name)
    return pytest.mark.parametrize("row", chosen, ids=str)
