"""A strategy of the user's own: the one of the page, wherever a strategy of the package works."""

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat
from offbeat.plan import plan
from offbeat.strategies import Strategy
from pages import code_on
from problems import flat, make_wide, wide_loss
from workers import run as on_processes
from worlds import simulated

STEPS = 7  # means after 1, 3 and 7, if the period may grow to 4
CODE = code_on("writing-a-strategy", "class GrowingPeriod")


@pytest.fixture
def growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the page."""
    (tmp_path / "growing_period.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "growing_period", raising=False)
    import growing_period  # type: ignore[import-not-found]

    yield growing_period
    sys.modules.pop("growing_period")


def train(
    rank: int, size: int, strategy: Strategy, wire: Any
) -> tuple[Tensor, int, dict[str, Any]]:
    """Uneven steps: rank 0 takes one less."""
    model = make_wide(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with offbeat.attach(model, optimizer, strategy, wire=wire, timeout_seconds=20) as sync:
        for step in range(STEPS - (rank == 0)):
            optimizer.zero_grad()
            wide_loss(model, rank, step).backward()
            optimizer.step()
    return flat(model), sync.stats.payload_bytes, sync.stats.details


def test_it_is_short() -> None:
    """Thirty lines, with imports and docstrings."""
    assert len([line for line in CODE.splitlines() if line.strip()]) <= 30
    ast.parse(CODE)


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_processes_and_simulator_agree(growing: Any, wire: str) -> None:
    """Over every wire: the same models, the same bytes, the same details."""
    strategy = growing.GrowingPeriod(most=4)
    real = on_processes(train, strategy, wire, workers=2)
    virtual = simulated(train, strategy, wire, workers=2)
    for (model, sent, details), (want, want_sent, want_details) in zip(real, virtual, strict=True):
        torch.testing.assert_close(model, want, rtol=1e-6, atol=1e-7)
        assert (sent, details) == (want_sent, want_details)
        assert details["period"] == 4
    assert torch.equal(real[0][0], real[1][0])


def test_a_lossy_wire_is_honoured(growing: Any) -> None:
    """Three means, in about a half and a quarter of the bytes; rolls are small against them."""
    strategy = growing.GrowingPeriod(most=4)
    sent = {
        wire: simulated(train, strategy, wire, workers=2)[0][1]
        for wire in ("float32", "bfloat16", "int8")
    }
    assert 0.49 < sent["bfloat16"] / sent["float32"] < 0.8
    assert 0.24 < sent["int8"] / sent["float32"] < sent["bfloat16"] / sent["float32"] - 0.1


def test_it_is_planned(growing: Any) -> None:
    """As local SGD with the longest period, with every wire."""
    case: dict[str, Any] = {"parameters": 25e6, "step_time": 0.1, "workers": 4, "bandwidth": 1e9}
    for wire in ("float32", "bfloat16", "int8"):
        own, local = plan(
            **case, wire=wire, strategies=[growing.GrowingPeriod(most=8), "local:period=8"]
        ).rows
        assert own.step_seconds == pytest.approx(local.step_seconds, rel=1e-9)
        assert own.strategy == "growing_period:GrowingPeriod:most=8"


def test_the_page_s_own_test_passes(growing: Any) -> None:
    space: dict[str, Any] = {}
    exec(code_on("writing-a-strategy", "def test_growing_period_of_one_is_bsp"), space)
    space["test_growing_period_of_one_is_bsp"]()
