"""gradient_change: SelSync's Δ under every strategy, of the worker's own gradient."""

from typing import Any

import pytest
import torch

import offbeat
from loops import Sink, attach
from problems import (
    assign,
    changes,
    flat,
    gradients,
    loss_of,
    make_batch,
    make_model,
    squared,
)
from worlds import run


def train(
    rank: int, size: int, text: str, wanted: bool, max_norm: float | None = None
) -> dict[str, Any]:
    """Records, and ‖g‖² of the own gradient at the model of each step."""
    model, sink, norms = make_model(seed=rank), Sink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = attach(model, optimizer, text, log=sink, gradient_change=wanted)
    for step in range(25):
        batch = make_batch(rank, step)
        norms.append(squared(gradients(model, batch)))
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if max_norm is not None:
            sync.clip_grad_norm_(max_norm)
        optimizer.step()
    sync.finish()
    return {"records": sink.records, "norms": norms, "end": flat(model), "stats": sync.stats}


@pytest.mark.sampled
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize(
    "text", ["bsp", "local:period=3", "selsync:delta=0.05", "async:staleness=4", "ssp:staleness=0"]
)
def test_it_is_the_change_of_the_own_gradient(text: str, max_norm: float | None) -> None:
    """Δ of ‖g‖² before averaging and clipping, from the definition; as SelSync's own."""
    for result in run(train, text, True, max_norm, workers=3):
        found = [record["relative_change"] for record in result["records"]]
        assert found == pytest.approx(changes(result["norms"], 0.03), rel=1e-8, abs=1e-12)
        if text.startswith("selsync"):
            assert found == [record["change"] for record in result["records"]]


@pytest.mark.parametrize("text", ["bsp", "selsync:delta=0.05"])
def test_looking_changes_nothing(text: str) -> None:
    """The same models and bytes; without being asked there is no such number."""
    looked, plain = run(train, text, True, workers=2), run(train, text, False, workers=2)
    for a, b in zip(looked, plain, strict=True):
        assert torch.equal(a["end"], b["end"])
        assert a["stats"].payload_bytes == b["stats"].payload_bytes
        assert not any("relative_change" in record for record in b["records"])


def several(rank: int, size: int) -> Any:
    model, sink, norms = make_model(seed=rank), Sink(), []
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (model[0], model[2:])]
    with attach(model, optimizers, "bsp", log=sink, gradient_change=True):
        for step in range(10):
            batch = make_batch(rank, step)
            norms.append(squared(gradients(model, batch)))
            model.zero_grad()
            loss_of(model, batch).backward()
            for optimizer in optimizers:
                optimizer.step()
    return [record["relative_change"] for record in sink.records], norms


def test_it_is_over_all_optimizers() -> None:
    """‖g‖² is over all parameters, whichever optimizer moves them."""
    for found, norms in run(several, workers=2):
        assert found == pytest.approx(changes(norms, 0.02), rel=1e-8)


def scaled(rank: int, size: int, text: str) -> Any:
    """A GradScaler whose scale changes on the way."""
    model, sink, norms = make_model(rank, torch.float32), Sink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    options: dict[str, Any] = {"log": sink, "gradient_change": True, "scaler": scaler}
    with offbeat.attach(model, optimizer, offbeat.parse_strategy(text), **options):
        for step in range(10):
            batch = make_batch(rank, step, dtype=torch.float32)
            norms.append(squared(gradients(model, batch)))
            optimizer.zero_grad()
            scaler.scale(loss_of(model, batch)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() > 8
    return [record["relative_change"] for record in sink.records], norms


@pytest.mark.parametrize("text", ["bsp", "local:period=2"])
def test_the_scale_of_a_scaler_is_taken_out(text: str) -> None:
    """BSP averages scaled gradients; Δ is that of the true ones, also when the scale grows."""
    for found, norms in run(scaled, text, workers=2):
        assert found == pytest.approx(changes(norms, 0.02), rel=1e-4, abs=1e-6)


def test_training_goes_on_after_an_overflow() -> None:
    """A gradient that is not finite gives Δ = 0, as in SelSync."""

    def worker(rank: int, size: int) -> list[float]:
        model, sink = make_model(rank), Sink()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with attach(model, optimizer, "local:period=2", log=sink, gradient_change=True):
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, make_batch(rank, step)).backward()
                if step == 2:
                    before = flat(model)
                    model[0].weight.grad.fill_(float("inf"))
                optimizer.step()
                if step == 2:
                    assign(model, before)  # 0·∞ is no number
        return [record["relative_change"] for record in sink.records]

    for found in run(worker, workers=1):
        assert found[2] == 0.0
        assert found[3] > 0
