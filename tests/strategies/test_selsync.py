"""SelSync's trigger in training: clipping, several optimizers, records.

``test_decisions`` tests the trigger on plain numbers, ``test_conformance`` the models.
"""

from typing import Any

import pytest
import torch
from torch import nn

from loops import Sink, attach, close
from offbeat import SelSync
from problems import OPTIMIZERS, flat, loss_of, make_batch, make_model
from strategies.references import SelSync as Reference
from worlds import run

TRIGGER: Any = {"delta": 0.5, "smoothing": 0.5}


def train(
    rank: int, size: int, strategy: SelSync, max_norm: float | None, split: bool
) -> dict[str, Any]:
    """Thirty steps, with clipping, or with one optimizer for each of two halves."""
    model, sink = make_model(seed=rank), Sink()
    halves = [model[0].parameters(), model[2:].parameters()] if split else [model.parameters()]
    optimizers = [OPTIMIZERS["sgd"](half) for half in halves]
    sync = attach(model, optimizers, strategy, log=sink)
    trace = []
    for step in range(30):
        model.zero_grad()
        loss_of(model, make_batch(rank, step)).backward()
        if max_norm is not None:
            sync.clip_grad_norm_(max_norm)
        for optimizer in optimizers:
            optimizer.step()
        trace.append(flat(model))
    sync.finish()
    return {"trace": trace, "end": flat(model), "records": sink.records}


@pytest.mark.parametrize(
    ("aggregate", "max_norm", "split"),
    [("parameters", 0.2, False), ("gradients", 0.5, False), ("parameters", None, True)],
    ids=["clipped", "mean then clipped", "two optimizers"],
)
def test_the_norm_is_that_of_the_whole_unclipped_gradient(
    aggregate: Any, max_norm: float | None, split: bool
) -> None:
    """Before clipping, and over all optimizers; a mean of gradients comes before clipping."""
    strategy = SelSync(aggregate=aggregate, **TRIGGER)
    reference = Reference([30] * 3, "sgd", aggregate=aggregate, max_norm=max_norm, **TRIGGER)
    results = run(train, strategy, max_norm, split, workers=3)
    for step in range(30):
        reference.step()
        for model, result in zip(reference.models(), results, strict=True):
            close(result["trace"][step], model, 1e-11)
    for trigger, result in zip(reference.triggers, results, strict=True):
        records = result["records"]
        assert [record["flag"] for record in records] == trigger.flags
        assert [record["decision"] == "sync" for record in records] == reference.synced
        close(result["end"], reference.mean(), 1e-11)
    assert 5 < sum(reference.synced) < 25


def two_sizes(rank: int, size: int) -> Any:
    """Train with one optimizer that has steady gradients and one whose gradients jump."""
    model, sink = nn.Linear(6, 2).double(), Sink()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (model.weight, model.bias)]
    strategy = SelSync(delta=0.3, smoothing=1.0, aggregate="gradients")
    sync = attach(model, optimizers, strategy, log=sink)
    seen = []
    for step in range(8):
        model.weight.grad = torch.full_like(model.weight, 1.0 + rank)
        model.bias.grad = torch.full_like(model.bias, (1.0 + rank) * 2 ** (step % 2))
        for optimizer in optimizers:
            optimizer.step()
        seen.append([float(p.grad.flatten()[0]) for p in (model.weight, model.bias)])
    sync.finish()
    return seen


def test_with_gradients_each_optimizer_has_a_trigger_of_its_own() -> None:
    """Only the gradients that jump are averaged."""
    for rank, seen in enumerate(run(two_sizes, workers=2)):
        own, factors = 1.0 + rank, [2 ** (step % 2) for step in range(8)]
        assert [weight for weight, _ in seen] == [1.5] + [own] * 7, "Δ is ∞ in the first step"
        assert [bias for _, bias in seen] == [1.5 * factor for factor in factors]
