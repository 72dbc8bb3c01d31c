"""The example of an algorithm with its own flow; ``test_conformance`` tests its values."""

from typing import Any

import pytest
import torch
from examples.gossip import Gossip

import offbeat
from loops import attach, sgd, start
from offbeat import AttachError
from offbeat_lab import PowerSGD, SparseLoCo
from problems import flat, make_batch, make_model, train_step
from worlds import run


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
    (name,) = option
    averages_models = [SparseLoCo()] * (name != "adam_correction")  # it has that one, see below

    def refuse(rank: int, size: int) -> list[str]:
        model, texts = make_model(), []
        for strategy in (Gossip(), PowerSGD(), *averages_models):
            with pytest.raises(AttachError) as caught:
                attach(model, sgd(model), strategy, **option)
            texts.append(str(caught.value))
        attach(model, sgd(model), Gossip()).detach()
        return texts

    for texts in run(refuse, workers=2):
        assert all(text.startswith(name) for text in texts)
        assert "with examples.gossip:Gossip: " in texts[0]
        for text, baseline in zip(texts[1:], ("powersgd", "sparseloco"), strict=False):
            assert f"with {baseline}: baselines to compare with" in text


def adam_factors(rank: int, size: int, strategy: str, wanted: bool | None) -> Any:
    model = make_model(seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = attach(model, optimizer, strategy, adam_correction=wanted)
    for step in range(30):
        train_step(model, optimizer, make_batch(rank, step))
    sync.finish()
    return sync.stats.details.get("lr_factor")


@pytest.mark.parametrize(
    ("strategy", "wanted", "corrected"),
    [
        *(("sparseloco:period=2", wanted, wanted is not False) for wanted in (None, True, False)),
        ("easgd", None, False),
    ],
)
def test_only_a_flow_that_averages_models_has_longer_steps_of_adam(
    strategy: str, wanted: bool | None, corrected: bool
) -> None:
    for factors in run(adam_factors, strategy, wanted, workers=2):
        assert (factors is not None) == corrected
