"""``sync.monitor``: the distance between the models, and SelSync's Δ, under every strategy."""

import itertools
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import worlds
from faults import Fault, Faults
from loops import Sink, attach, error_of
from offbeat.transport.communicator import Communicator
from offbeat.transport.connect import open_communicator
from problems import (
    Simulated,
    assign,
    changes,
    flat,
    gradients,
    loss_of,
    make_batch,
    make_model,
    squared,
    train_step,
)
from worlds import run, simulated

KEYS = ("distance", "distance_largest", "distance_step")
IN_STEP = [
    "bsp",
    "local:period=4",
    "selsync:delta=0.05",
    "selsync:delta=0.05,aggregate=gradients",
    "diloco:period=5,fragments=3,overlap=2",
    "async:staleness=4",
    "streaming:schedule=cyclic,staleness=4,parts=2",
]
FREE = [
    "async:staleness=3,schedule=eager",
    "streaming",
    "ssp:staleness=2",
    "easgd:period=2",
]


def apart(models: list[Tensor]) -> tuple[float, float]:
    """Return the mean distance to the mean and the largest distance of a pair, by definition."""
    mean = torch.stack(models).mean(0)
    pairs = [float((a - b).norm()) for a, b in itertools.combinations(models, 2)]
    return sum(float((model - mean).norm()) for model in models) / len(models), max(pairs)


def train(
    rank: int,
    size: int,
    text: str,
    counts: list[int],
    consensus_after: int | None = None,
    every: Any = 3,
) -> dict[str, Any]:
    """Train on local data for ``counts[rank]`` steps, with a consensus after some of them."""
    model, sink, after = make_model(seed=rank), Sink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = attach(model, optimizer, text, log=sink)
    sync.monitor(distance_every=every)
    optimizer.register_step_post_hook(lambda *_: after.append(flat(model)))
    for step in range(counts[rank]):
        train_step(model, optimizer, make_batch(rank, step))
        if step + 1 == consensus_after:
            with sync.consensus():
                pass
    bytes_so_far = sync.stats.payload_bytes
    sync.finish()
    found = [{key: r[key] for key in KEYS} for r in sink.records if "distance" in r]
    return {
        "found": found,
        "end": flat(model),
        "own": sync.stats.details,
        "bytes": (bytes_so_far, sync.stats.payload_bytes),
        "waited": [r["wait_seconds"] for r in sink.records],
    }


def local_sgd() -> dict[int, tuple[float, float]]:
    """Return the distances of three workers after each step, before a mean every fourth step."""
    sim, want = Simulated.start(3, "sgd"), {}
    for step in range(40):
        sim.step(step)
        want[step + 1] = apart(sim.flat())
        if (step + 1) % 4 == 0:
            sim.average()
    return want


def cyclic_averaging() -> dict[int, tuple[float, float]]:
    """The same for τ = 4: a mean of snapshots is launched and landed every other step."""
    sim, want, launched = Simulated.start(3, "sgd"), {}, None
    for step in range(40):
        sim.step(step)
        want[step + 1] = apart(sim.flat())
        if (step + 1) % 2 == 0:
            if launched is not None:
                mean = torch.stack(launched).mean(0)
                for model, own in zip(sim.models, launched, strict=True):
                    assign(model, flat(model) + mean - own)
            launched = sim.flat()
    return want


@pytest.mark.parametrize(
    ("text", "reference"), [("local:period=4", local_sgd), ("async:staleness=4", cyclic_averaging)]
)
def test_the_distance_is_that_of_the_models_before_the_mean(text: str, reference: Any) -> None:
    """The models are those after every fifth step, before the strategy synchronizes them."""
    results = run(train, text, [40] * 3, None, 5, workers=3)
    want = reference()
    # Where no worker waits a measurement may still run when the next one is due.
    none_skipped = worlds.world == "simulated" and text.startswith("local")
    for result in results:
        steps = [one["distance_step"] for one in result["found"]]
        assert {*steps} <= {*range(5, 41, 5)}
        assert len(steps) >= (4 if worlds.world == "simulated" else 1)
        for one in result["found"]:
            mean, largest = want[one["distance_step"]]
            assert one["distance"] == pytest.approx(mean, rel=1e-9)
            assert one["distance_largest"] == pytest.approx(largest, rel=1e-9)
        if (
            worlds.world == "simulated"
        ):  # on processes the last measurement may end too late for one
            assert result["found"] == results[0]["found"]
        if none_skipped:
            assert steps == [*range(5, 40, 5)]
            assert result["own"]["distance_step"] == 40, "finish waits for a running measurement"
            assert result["own"]["distances_measured"] == 8


@pytest.mark.sampled
@pytest.mark.parametrize("text", IN_STEP)
def test_measuring_does_not_change_the_training(text: str) -> None:
    """The final bits and the bytes sent are the same with and without the measurement."""
    measured = run(train, text, [20] * 3, 11, workers=3)
    plain = run(train, text, [20] * 3, 11, None, workers=3)
    for a, b in zip(measured, plain, strict=True):
        assert torch.equal(a["end"], b["end"])
        assert a["bytes"] == b["bytes"]
        assert not b["found"]
        assert a["own"]["distances_measured"] >= 2
    if text == "bsp":
        assert {one[key] for one in measured[0]["found"] for key in KEYS[:2]} == {0.0}
    else:
        assert all(one["distance_largest"] > 0 for one in measured[0]["found"])


@pytest.mark.sampled
@pytest.mark.parametrize("text", [*IN_STEP, *FREE])
def test_workers_may_take_different_numbers_of_steps(text: str) -> None:
    """No worker hangs, and all get the same result.

    The triangle inequality relates the two distances.
    """
    results = run(train, text, [7, 26, 15], 5, workers=3)
    for result in results:
        assert result["own"]["distances_measured"] >= 1
        assert {key: result["own"][key] for key in KEYS[:2]} == {
            key: results[0]["own"][key] for key in KEYS[:2]
        }
        for one in result["found"]:
            assert 0 <= one["distance"] <= one["distance_largest"] < math.inf


class Broken:
    """A communicator whose second duplicate, the monitor's, fails on rank 1 at one operation."""

    def __init__(self, operation: int) -> None:
        self._operation, self._made = operation, 0

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        made = open_communicator(None, timeout_seconds, what="a test")
        self._made += 1
        fault = Fault("fail", rank=1, operation=self._operation)
        return made if self._made == 1 else Faults(made, [fault])


@pytest.mark.sampled
@pytest.mark.parametrize("text", ["local:period=2", "ssp:staleness=1"])
@pytest.mark.parametrize("operation", [0, 1, 2, 3, 4])
def test_a_failed_measurement_ends_only_the_measuring(text: str, operation: int) -> None:
    """Every worker warns, at the latest at the next barrier. Training continues unchanged."""
    messages: list[str] = []

    def worker(rank: int, size: int, every: int | None) -> Any:
        model = make_model(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = attach(model, optimizer, text, group=Broken(operation))
        sync.monitor(distance_every=every)
        for step in range(12):
            train_step(model, optimizer, make_batch(rank, step))
            if step == 8:
                with sync.consensus():
                    pass
        sync.finish()
        return flat(model)

    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("offbeat")
    logger.addHandler(handler)
    try:
        ends = simulated(worker, 3, workers=2)
    finally:
        logger.removeHandler(handler)
    messages = [line for line in messages if "is no longer measured" in line]
    assert len(messages) == 2
    assert any(line.startswith("rank 1: ") and "failed on purpose" in line for line in messages)
    assert torch.equal(ends[0], ends[1])
    if text.startswith("local"):
        assert torch.equal(ends[0], simulated(worker, None, workers=2)[0])


def test_wrong_monitors_are_refused() -> None:
    """They are refused at the call, and leave nothing behind."""

    def worker(rank: int, size: int) -> Any:
        model = make_model(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = attach(model, optimizer, "bsp")
        found = [
            error_of(lambda: sync.monitor(distance_every=0)),
            error_of(lambda: sync.monitor(distance_every=1.5)),
        ]
        sync.monitor(distance_every=2)
        found.append(error_of(lambda: sync.monitor(distance_every=2)))
        sync.detach()
        sync = attach(model, optimizer, "bsp")
        train_step(model, optimizer, make_batch(rank, 0))
        found.append(error_of(lambda: sync.monitor(distance_every=2)))
        sync.finish()
        found.append(error_of(lambda: sync.monitor(gradient_change=True)))
        return found

    expected = [
        ("ValueError", "distance_every must be at least 1, got 0"),
        ("TypeError", "distance_every must be an integer of at least 1"),
        ("AttachError", "monitor(distance_every=…): call it once, before the first step"),
        ("AttachError", "monitor(distance_every=…): call it once, before the first step"),
        ("AttachError", "monitor() after finish() or detach(): attach again first"),
    ]
    for found in simulated(worker, workers=2):
        for (kinds, text), (kind, words) in zip(found, expected, strict=True):
            assert kinds[0] == kind, text
            assert words in text


def test_workers_that_measure_at_different_steps_are_refused() -> None:
    """The models of different steps have no distance that says something about the training."""

    def worker(rank: int, size: int) -> Any:
        model = make_model(seed=rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sync = attach(model, optimizer, "bsp")
        found = error_of(lambda: sync.monitor(distance_every=[3, 5][rank]))
        sync.detach()
        return found

    for kinds, text in simulated(worker, workers=2):
        assert kinds[:1] == ["MismatchError"]
        assert "distance_every" in text


# -- the change of the gradient --------------------------------------------------------------------


def observed(
    rank: int, size: int, text: str, wanted: bool, max_norm: float | None = None
) -> dict[str, Any]:
    """Return the records, and ‖g‖² of this worker's gradient at the model of each step."""
    model, sink, norms = make_model(seed=rank), Sink(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = attach(model, optimizer, text, log=sink)
    sync.monitor(gradient_change=wanted)
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
def test_the_change_is_that_of_the_local_gradient(text: str, max_norm: float | None) -> None:
    """Δ of ‖g‖² before averaging and clipping, by definition; the same as SelSync's own."""
    for result in run(observed, text, True, max_norm, workers=3):
        found = [record["relative_change"] for record in result["records"]]
        assert found == pytest.approx(changes(result["norms"], 0.03), rel=1e-8, abs=1e-12)
        if text.startswith("selsync"):
            assert found == [record["change"] for record in result["records"]]


@pytest.mark.parametrize("text", ["bsp", "selsync:delta=0.05"])
def test_measuring_the_change_does_not_change_the_training(text: str) -> None:
    """The same models and bytes. Without the option the records have no such number."""
    looked, plain = run(observed, text, True, workers=2), run(observed, text, False, workers=2)
    for a, b in zip(looked, plain, strict=True):
        assert torch.equal(a["end"], b["end"])
        assert a["stats"].payload_bytes == b["stats"].payload_bytes
        assert not any("relative_change" in record for record in b["records"])


def test_the_change_of_an_overflow_is_0() -> None:
    """A non-finite gradient gives Δ = 0, as in SelSync."""

    def worker(rank: int, size: int) -> list[float]:
        model, sink = make_model(rank), Sink()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with attach(model, optimizer, "local:period=2", log=sink) as sync:
            sync.monitor(gradient_change=True)
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
