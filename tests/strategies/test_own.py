"""Strategies of one's own: the votes with which they decide, and the example of a custom flow."""

import runpy
from dataclasses import dataclass, field
from typing import Literal

import pytest

from loops import attach, sgd
from offbeat.extend import GlobalModel, SummedVotes, WorkerView
from offbeat.strategies import Strategy
from pages import ROOT
from problems import make_wide, wide_step
from worlds import simulated


@dataclass
class Decided:
    """Local step and ``SummedVotes.stepping`` of each call of ``decide`` during training."""

    calls: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, repr=False)
class EveryFourth(Strategy):
    """A message in every fourth step."""

    def averages(self) -> GlobalModel:
        return GlobalModel(lands="arrived")

    def state(self, worker: WorkerView) -> Decided:
        return Decided()

    def due(self, worker: WorkerView) -> bool:
        return worker.since_launch >= 4

    def decide(self, worker: WorkerView, sums: SummedVotes) -> float:
        if worker.stepping:
            worker.state.calls.append((worker.step, sums.stepping))
            worker.details["calls"] = worker.state.calls
        return 1


def decided(rank: int, size: int) -> list[tuple[int, int]]:
    model = make_wide(seed=rank)
    optimizer = sgd(model)
    with attach(model, optimizer, EveryFourth()) as sync:
        for step in range(12):
            wide_step(model, optimizer, rank, step)
    calls: list[tuple[int, int]] = sync.stats.details["calls"]
    return calls


def test_a_due_message_is_decided_with_the_votes_of_the_one_before() -> None:
    """The messages are faster than four steps."""
    for calls in simulated(decided, workers=3):
        assert calls == [(4, 0), (8, 3), (12, 3)]


@dataclass(frozen=True, kw_only=True, repr=False)
class Wrong(Strategy):
    """Decides a number of parts that is not allowed."""

    lands: Literal["arrived"] | int = 1
    number: float = 1.5

    def averages(self) -> GlobalModel:
        return GlobalModel(lands=self.lands)

    def due(self, worker: WorkerView) -> bool:
        return True

    def decide(self, worker: WorkerView, sums: SummedVotes) -> float:
        return self.number


@pytest.mark.parametrize(
    ("lands", "number"), [(1, 1.5), (1, 99), (1, -1), ("arrived", 0), ("arrived", 0.5)]
)
def test_a_wrong_number_of_parts_is_an_error(
    lands: Literal["arrived"] | int, number: float
) -> None:
    def train(rank: int, size: int) -> None:
        model = make_wide(seed=rank)
        optimizer = sgd(model)
        with attach(model, optimizer, Wrong(lands=lands, number=number)):
            for step in range(3):
                wide_step(model, optimizer, rank, step)

    with pytest.raises(ValueError, match=rf"Wrong.decide returned {number}: .* at most \d+"):
        simulated(train, workers=2)


def test_the_example_of_a_custom_flow_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """It checks by itself that all workers end with the same model."""
    runpy.run_path(str(ROOT / "examples" / "gossip.py"), run_name="__main__")
    assert "all workers end with" in capsys.readouterr().out
