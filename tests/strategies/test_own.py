"""The custom strategy of the page about extensions: its text form, its values over every wire."""

import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import workers
from loops import attach, sgd
from offbeat import parse_strategy
from offbeat.extend import GlobalModel, SummedVotes, WorkerView
from offbeat.strategies import Strategy
from pages import ROOT, code_on
from problems import flat, make_wide, wide_step
from worlds import simulated


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Strategy:
    """A mean after steps 1, 3, 7 and 11, if the period may grow to 4."""
    (tmp_path / "growing_period.py").write_text(code_on("extending", "class GrowingPeriod"))
    monkeypatch.syspath_prepend(tmp_path)
    return parse_strategy("growing_period:GrowingPeriod:most=4")


def train(rank: int, size: int, own: Strategy, wire: Any) -> dict[str, Any]:
    """Train uneven numbers of steps: rank 0 takes one less."""
    model = make_wide(seed=rank)
    optimizer = sgd(model)
    with attach(model, optimizer, own, wire=wire) as sync:
        for step in range(12 - (rank == 0)):
            wide_step(model, optimizer, rank, step)
    sent, details = sync.stats.payload_bytes, sync.stats.details
    return {"model": flat(model), "sent": sent, "launches": details["launches"]}


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8", "int4", "int2"])
def test_processes_and_the_simulator_agree_over_every_wire(own: Strategy, wire: Any) -> None:
    """Models and bytes are the same."""
    real, virtual = (run(train, own, wire, workers=3) for run in (workers.run, simulated))
    exact = simulated(train, own, "float32", workers=3)[0]["model"]
    for one, other in zip(real, virtual, strict=True):
        assert torch.equal(one["model"], real[0]["model"])
        assert torch.equal(other["model"], virtual[0]["model"])
        assert one["launches"] == other["launches"] == 4
        torch.testing.assert_close(one["model"], other["model"], rtol=1e-6, atol=1e-6)
        assert one["sent"] == other["sent"]
        moved = (exact - flat(make_wide(0))).norm()
        assert (other["model"] - exact).norm() < 0.5 * moved


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


def test_the_example_of_a_custom_flow_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """It checks by itself that all workers end with the same model."""
    runpy.run_path(str(ROOT / "examples" / "gossip.py"), run_name="__main__")
    assert "all workers end with" in capsys.readouterr().out
