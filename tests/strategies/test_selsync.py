"""SelSync's trigger in training: clipping, several optimizers, records.

``test_decisions`` tests the trigger on plain numbers, ``test_conformance`` the models.
"""

from typing import Any

import pytest

from loops import Sink, attach, close
from offbeat import AttachError, SelSync
from offbeat_lab import GradientSelSync
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
    ("kind", "max_norm", "split"),
    [(SelSync, 0.2, False), (GradientSelSync, 0.5, False), (SelSync, None, True)],
    ids=["clipped", "mean then clipped", "two optimizers"],
)
def test_the_norm_is_that_of_the_whole_unclipped_gradient(
    kind: type[SelSync], max_norm: float | None, split: bool
) -> None:
    """Before clipping, and over all optimizers; a mean of gradients comes before clipping."""
    strategy = kind(**TRIGGER)
    aggregate = "gradients" if kind is GradientSelSync else "parameters"
    reference = Reference([30] * 3, "sgd", max_norm=max_norm, aggregate=aggregate, **TRIGGER)
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


def test_a_mean_of_gradients_needs_one_backward_pass_and_one_optimizer() -> None:
    def twice(rank: int, size: int) -> None:
        model = make_model(seed=rank)
        sync = attach(model, [OPTIMIZERS["sgd"](model.parameters())], GradientSelSync(**TRIGGER))
        loss_of(model, make_batch(rank, 0)).backward()
        again = loss_of(model, make_batch(rank, 1))
        with pytest.raises(AttachError, match="put all backward passes"):
            again.backward()
        sync.detach()

    def split(rank: int, size: int) -> None:
        model = make_model(seed=rank)
        halves = [model[0].parameters(), model[2:].parameters()]
        with pytest.raises(AttachError, match="takes one optimizer"):
            attach(model, [OPTIMIZERS["sgd"](half) for half in halves], GradientSelSync(**TRIGGER))

    run(twice, workers=2)
    run(split, workers=2)
