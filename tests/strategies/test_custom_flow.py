"""The example of an algorithm with its own flow, which averages neither models nor gradients."""

from typing import Any

import pytest
import torch
from examples.gossip import Gossip
from torch import Tensor

import offbeat
from loops import attach, close, restart, sgd, start
from offbeat import AttachError
from offbeat_lab import PowerSGD, SparseLoCo
from problems import Simulated, assign, flat, make_batch, make_model, train_step
from worlds import run


def train(rank: int, size: int, counts: list[int], look: int, resume: int) -> dict[str, Any]:
    model, optimizer, sync = start(rank, Gossip(share=0.25), "momentum")
    trace, seen = [], None
    for step in range(counts[rank]):
        if step == resume:
            model, optimizer, sync = restart(
                model, optimizer, sync, lambda: start(100, Gossip(share=0.25), "momentum")
            )
        train_step(model, optimizer, make_batch(rank, step))
        trace.append(flat(model))
        if step == look:
            with sync.consensus():
                seen = flat(model)
    sync.finish()
    exchanges = sync._iteration.flow.state.exchanges
    return {"trace": trace, "seen": seen, "end": flat(model), "exchanges": exchanges}


def reference(counts: list[int], look: int) -> tuple[list[list[Tensor]], Tensor | None, Tensor]:
    sim, trace, seen = Simulated.start(len(counts), "momentum"), [], None
    for step in range(max(counts)):
        for rank, count in enumerate(counts):
            if step < count:
                train_step(sim.models[rank], sim.optimizers[rank], make_batch(rank, step))
        x = sim.flat()
        for rank, model in enumerate(sim.models):
            assign(model, 0.75 * x[rank] + 0.25 * x[rank - 1])
        trace.append(sim.flat())
        if step == look:
            seen = sum(sim.flat()) / len(counts)
    sim.average()
    return trace, seen, sim.flat()[0]


@pytest.mark.parametrize(
    ("counts", "look", "resume"), [([9, 9, 9], 4, -1), ([2, 9, 5], -1, -1), ([9, 9, 9], -1, 6)]
)
def test_gossip_trains(counts: list[int], look: int, resume: int) -> None:
    """Compares the values of every step, with uneven data, a consensus, and a checkpoint."""
    trace, seen, end = reference(counts, look)
    for rank, result in enumerate(run(train, counts, look, resume, workers=3)):
        for step in range(counts[rank]):
            close(result["trace"][step], trace[step][rank], 1e-11)
        if seen is not None:
            close(result["seen"], seen, 1e-11)
        close(result["end"], end, 1e-11)
        assert result["exchanges"] == max(counts)


def diverge(rank: int, size: int) -> str:
    model, optimizer, sync = start(rank, Gossip())
    train_step(model, optimizer, make_batch(rank, 0))
    if rank == 1:
        with torch.no_grad():
            next(model.parameters()).fill_(torch.nan)
    with pytest.raises(offbeat.OffbeatError) as caught:
        train_step(model, optimizer, make_batch(rank, 1))
    sync.detach()
    assert rank == 1 or flat(model).isfinite().all()
    return str(caught.value)


def test_the_policy_for_non_finite_values_applies() -> None:
    """By default all workers raise before another model has received the value."""
    for text in run(diverge, workers=3):
        assert text.startswith("rank 1 would contribute NaN or infinity to the mean at step 2")


@pytest.mark.parametrize(
    "option",
    [
        {"wire": "int8"},
        {"min_workers": 1},
        {"node_group": "auto"},
        {"adam_correction": True},
    ],
    ids=str,
)
def test_abilities_that_a_custom_flow_does_not_have_are_refused(option: dict[str, Any]) -> None:
    """No option is accepted without an effect, by a strategy of one's own or by a baseline."""

    def refuse(rank: int, size: int) -> list[str]:
        model, texts = make_model(), []
        for strategy in (Gossip(), PowerSGD(), SparseLoCo()):
            with pytest.raises(AttachError) as caught:
                attach(model, sgd(model), strategy, **option)
            texts.append(str(caught.value))
        attach(model, sgd(model), Gossip()).detach()
        return texts

    (name,) = option
    for texts in run(refuse, workers=2):
        assert all(text.startswith(name) for text in texts)
        assert "with examples.gossip:Gossip: " in texts[0]
        for text, baseline in zip(texts[1:], ("powersgd", "sparseloco"), strict=True):
            assert f"with {baseline}: baselines to compare with" in text
