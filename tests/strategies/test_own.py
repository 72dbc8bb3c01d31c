"""A custom strategy with two methods trains over every wire, and is planned."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat
import workers
from loops import attach
from pages import ROOT, code_on
from problems import (
    OPTIMIZERS,
    flat,
    make_batch,
    make_model,
    make_wide,
    train_step,
    wide_step,
)
from strategies import own_strategy
from strategies.decisions import Workers
from strategies.own_strategy import GrowingPeriod
from worlds import simulated

STEPS = 12  # means after 1, 3, 7 and 11 steps, if the period may grow to 4
OWN = GrowingPeriod(most=4)
WIRES: list[Any] = ["float32", "bfloat16", "int8", "int4", "int2"]


def test_it_is_short_and_has_three_members_of_its_own() -> None:
    lines = Path(own_strategy.__file__).read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 40
    written = {name for name in vars(GrowingPeriod) if not name.startswith("_")}
    assert written - {"most", "outer_lr"} == {"name", "averages", "due"}


def test_when_it_is_due() -> None:
    """Plain views of a worker are enough for the test, without torch."""
    assert Workers(OWN, 3).launch_steps(20) == [1, 3, 7, 11, 15, 19]
    assert Workers(GrowingPeriod(most=1), 3).launch_steps(4) == [1, 2, 3, 4]


def test_it_is_parsed_and_shown_by_its_module_and_settings() -> None:
    text = "strategies.own_strategy:GrowingPeriod:most=4"
    assert offbeat.parse_strategy(text) == OWN
    assert repr(OWN) == "GrowingPeriod(most=4)"


def train(rank: int, size: int, wire: Any, **options: Any) -> dict[str, Any]:
    """Train uneven numbers of steps: rank 0 takes one less."""
    model = make_wide(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(model, optimizer, OWN, wire=wire, **options) as sync:
        for step in range(STEPS - (rank == 0)):
            wide_step(model, optimizer, rank, step)
    sent, details = sync.stats.payload_bytes, sync.stats.details
    return {"model": flat(model), "sent": sent, "launches": details["launches"]}


def trained_exactly() -> list[dict[str, Any]]:
    return simulated(train, "float32", workers=3)


@pytest.mark.parametrize("wire", WIRES)
def test_processes_and_the_simulator_agree_over_every_wire(wire: Any) -> None:
    """Models and bytes are the same."""
    real, virtual = (run(train, wire, workers=3) for run in (workers.run, simulated))
    for one, other, exact in zip(real, virtual, trained_exactly(), strict=True):
        assert torch.equal(one["model"], real[0]["model"])
        assert torch.equal(other["model"], virtual[0]["model"])
        assert one["launches"] == other["launches"] == 4
        torch.testing.assert_close(one["model"], other["model"], rtol=1e-6, atol=1e-6)
        assert one["sent"] == other["sent"]
        moved = (exact["model"] - flat(make_wide(0))).norm()
        assert (other["model"] - exact["model"]).norm() < 0.5 * moved


# -- the page -------------------------------------------------------------------------------------


def test_the_strategy_of_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has at most 40 lines in a file, and the page's test passes."""
    code = code_on("extending", "class GrowingPeriod")
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    (tmp_path / "growing_period.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    strategy = offbeat.parse_strategy("growing_period:GrowingPeriod:most=4")

    def train(rank: int, size: int) -> Tensor:
        model = make_model(seed=rank)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with attach(model, optimizer, strategy) as sync:
            for step in range(7):
                train_step(model, optimizer, make_batch(rank, step))
        assert sync.stats.syncs == 3, "after 1, 3 and 7 steps"
        return flat(model)

    first, second = simulated(train, workers=2)
    assert torch.equal(first, second)
    space: dict[str, Any] = {}
    exec(code_on("extending", "def test_growing_period_of_one_is_bsp"), space)
    space["test_growing_period_of_one_is_bsp"]()


def test_the_example_of_a_custom_flow_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """It checks by itself that all workers end with the same model."""
    runpy.run_path(str(ROOT / "examples" / "gossip.py"), run_name="__main__")
    assert "all workers end with" in capsys.readouterr().out
