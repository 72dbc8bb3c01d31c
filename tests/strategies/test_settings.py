"""Settings of the strategies: an impossible one is refused with a remedy."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from loops import attach, sgd
from offbeat import AsyncAveraging, DiLoCo, LocalSGD, SelSync, StreamingAveraging
from offbeat.arguments import check_settings, did_you_mean, setting
from offbeat.strategies import Strategy
from problems import make_model
from worlds import run

REFUSED: list[tuple[type[Strategy], dict[str, Any], type[Exception], str]] = [
    (LocalSGD, {}, TypeError, "period"),
    (LocalSGD, {"period": True}, TypeError, "period must be an integer of at least 1, got True"),
    (LocalSGD, {"period": 4, "warmup_steps": -1}, ValueError, "warmup_steps must be at least 0"),
    (LocalSGD, {"period": 4, "momentum": 0.9}, TypeError, "momentum"),
    (
        LocalSGD,
        {"period": 4, "optimizer_state": "mean"},
        ValueError,
        'optimizer_state must be "local" or "average", got \'mean\'',
    ),
    (SelSync, {"delta": -0.1}, ValueError, "delta must be at least 0 .* got -0.1"),
    (SelSync, {"smoothing": 0}, ValueError, r"smoothing must be in \(0, 1\], got 0"),
    (SelSync, {"target_lssr": 1.0}, ValueError, "target_lssr must be between 0 and 1, got 1.0"),
    (SelSync, {"target_lssr": 0.5, "delta": 0.2}, ValueError, "delta or target_lssr, not both"),
    (
        SelSync,
        {"aggregate": "gradients", "optimizer_state": "average"},
        ValueError,
        'optimizer_state="average" requires aggregate="parameters"',
    ),
    (
        AsyncAveraging,
        {"staleness": 1},
        ValueError,
        "staleness must be even and at least 2 .* got 1",
    ),
    (
        AsyncAveraging,
        {"staleness": 0, "schedule": "eager"},
        ValueError,
        "staleness must be at least 1",
    ),
    (DiLoCo, {"outer_lr": 0}, ValueError, "outer_lr must be positive and finite, got 0"),
    (DiLoCo, {"outer_momentum": 1.0}, ValueError, r"outer_momentum must be in \[0, 1\), got 1.0"),
    (DiLoCo, {"period": 3, "fragments": 4}, ValueError, "got fragments=4 and period=3"),
    (DiLoCo, {"period": 3, "overlap": 3}, ValueError, "overlap must be less than period"),
    (
        DiLoCo,
        {"overlap": 2, "optimizer_state": "average"},
        ValueError,
        'optimizer_state="average" requires overlap=0',
    ),
    (StreamingAveraging, {"parts": 0}, ValueError, "parts must be at least 1, got 0"),
    (StreamingAveraging, {"parts": 1025}, ValueError, "parts must be at most 1024, got 1025"),
    (StreamingAveraging, {"parts": "many"}, ValueError, "parts must be \"auto\", got 'many'"),
    (
        StreamingAveraging,
        {"outer_gain": 0.5},
        ValueError,
        "outer_gain must be finite and at least 1, got 0.5",
    ),
]


@pytest.mark.parametrize(("kind", "options", "error", "words"), REFUSED, ids=str)
def test_impossible_settings_say_what_is_allowed(
    kind: type[Strategy], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        kind(**options)


def test_settings_are_keywords_and_do_not_change() -> None:
    with pytest.raises(TypeError):
        SelSync(0.3)
    with pytest.raises(AttributeError):
        SelSync().delta = 0.1


def too_many(rank: int, size: int) -> str:
    model = make_model(seed=rank)
    optimizer = sgd(model)
    with pytest.raises(ValueError) as caught:
        attach(model, optimizer, DiLoCo(fragments=7))
    attach(model, optimizer, DiLoCo(fragments=6)).finish()
    return str(caught.value)


def test_a_strategy_that_does_not_fit_the_model_is_refused_by_attach() -> None:
    """Every worker raises and closes what it has opened, so it can attach again."""
    for text in run(too_many, workers=2):
        assert text.startswith("the number of parts must be at most 6, the number of parameter")


@dataclass(frozen=True)
class Bounded:
    """Settings with every kind of bound."""

    most: int = setting(1, least=1, most=3)
    between: int = setting(1, above=0, below=4)
    choice: int | Literal["auto"] = setting("auto", most=3)


@pytest.mark.parametrize("wrong", [{"most": 4}, {"between": 0}, {"between": 4}, {"choice": 4}])
def test_integers_are_compared_with_every_bound(wrong: dict[str, int]) -> None:
    check_settings(Bounded(most=3, between=3, choice=3))
    with pytest.raises(ValueError, match=rf"{next(iter(wrong))} must be .*, got \d"):
        check_settings(Bounded(**wrong))


SUGGESTED: list[tuple[object, str]] = [
    ("digit", " (did you mean 'digits'?)"),
    ("SELSYNC", " (did you mean 'selsync'?)"),
    ("nothing", ""),
    ("", ""),
    (8, ""),
]


@pytest.mark.parametrize(("given", "text"), SUGGESTED)
def test_a_similar_name_is_suggested(given: object, text: str) -> None:
    """The case of letters does not matter. Values that are no text are ignored."""
    assert did_you_mean(given, ["digits", "selsync", None, 8]) == text
