"""Settings of the baselines: an impossible one is refused, and the error says what is allowed."""

import math
from typing import Any

import pytest

import offbeat
from offbeat.strategies import Strategy
from offbeat_lab.baselines import EASGD, SSP, Downpour, FedAvg, PowerSGD, SparseLoCo
from problems import OPTIMIZERS, make_model
from worlds import run

REFUSED: list[tuple[type[Strategy], dict[str, Any], type[Exception], str]] = [
    (FedAvg, {}, ValueError, "give either period or rounds_per_epoch"),
    (FedAvg, {"period": 4, "rounds_per_epoch": 1}, ValueError, "give either period or rounds_per"),
    (FedAvg, {"rounds_per_epoch": 1}, ValueError, "rounds_per_epoch and steps_per_epoch go toget"),
    (FedAvg, {"rounds_per_epoch": 0, "steps_per_epoch": 5}, ValueError, "rounds_per_epoch must be"),
    (FedAvg, {"rounds_per_epoch": 6, "steps_per_epoch": 5}, ValueError, "most steps_per_epoch=5"),
    (FedAvg, {"rounds_per_epoch": math.nan, "steps_per_epoch": 5}, ValueError, "rounds_per_epoch"),
    (FedAvg, {"period": 4, "fraction": 0}, ValueError, r"fraction must be in \(0, 1\], got 0"),
    (FedAvg, {"period": 4, "unselected": "x"}, ValueError, 'must be "keep" or "restart"'),
    (FedAvg, {"period": 4, "weights": [1, 2]}, TypeError, "weights must be a tuple"),
    (FedAvg, {"period": 4, "weights": (1, 0)}, ValueError, "weights must be positive and finite"),
    (FedAvg, {"period": 4, "weights": ("a",)}, TypeError, "each of weights must be a number, got"),
    (SSP, {"staleness": -1}, ValueError, "staleness must be at least 0, got -1"),
    (Downpour, {"push_every": 0}, ValueError, "push_every must be at least 1, got 0"),
    (EASGD, {"alpha": 0.0}, ValueError, r"alpha must be between 0 and 1, got 0\.0"),
    (SparseLoCo, {"density": 0.0}, ValueError, r"density must be in \(0, 1\], got 0\.0"),
    (SparseLoCo, {"decay": 1.5}, ValueError, "decay must be"),
    (PowerSGD, {"rank": 0}, ValueError, "rank must be at least 1, got 0"),
]


@pytest.mark.parametrize(("kind", "settings", "error", "text"), REFUSED)
def test_bad_settings_are_refused(
    kind: type[Strategy], settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        kind(**settings)


def test_settings_must_fit_the_number_of_workers() -> None:
    """``attach`` raises on every worker, and can be called again."""

    def work(rank: int, size: int) -> str:
        model = make_model(seed=rank)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        with pytest.raises(ValueError) as caught:
            offbeat.attach(
                model, optimizer, FedAvg(period=2, weights=(1, 2, 3)), timeout_seconds=20
            )
        offbeat.attach(model, optimizer, FedAvg(period=2), timeout_seconds=20).finish()
        return str(caught.value)

    text = "one number for each of the 2 workers, got 3"
    assert all(text in message for message in run(work, workers=2))
