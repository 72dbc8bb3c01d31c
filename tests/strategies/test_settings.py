"""Settings of the strategies: an impossible one is refused with a remedy."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from loops import attach, sgd
from offbeat import LocalSGD, SelSync, parse_strategy
from offbeat.arguments import check_settings, did_you_mean, setting
from offbeat.strategies.base import WorkerView
from problems import make_model
from worlds import run

REFUSED = [
    ("local:period=4,warmup_steps=-1", "warmup_steps must be at least 0"),
    ("local:period=4,optimizer_state=mean", "optimizer_state must be \"local\" .* got 'mean'"),
    ("selsync:delta=-0.1", "delta must be at least 0 .* got -0.1"),
    ("selsync:smoothing=0", r"smoothing must be in \(0, 1\], got 0"),
    ("selsync:target_lssr=1.0", "target_lssr must be between 0 and 1, got 1.0"),
    ("selsync:target_lssr=0.5,delta=0.2", "delta or target_lssr, not both"),
    (
        "selsync:aggregate=gradients,optimizer_state=average",
        'optimizer_state="average" requires aggregate="parameters"',
    ),
    ("async:staleness=1", "staleness must be even and at least 2 .* got 1"),
    ("async:staleness=0,schedule=eager", "staleness must be at least 1"),
    ("diloco:outer_lr=0", "outer_lr must be positive and finite, got 0"),
    ("diloco:outer_momentum=1.0", r"outer_momentum must be in \[0, 1\), got 1.0"),
    ("diloco:period=3,fragments=4", "got fragments=4 and period=3"),
    ("diloco:period=3,overlap=3", "overlap must be less than period"),
    ("diloco:overlap=2,optimizer_state=average", 'optimizer_state="average" requires overlap=0'),
    ("streaming:parts=0", "parts must be at least 1, got 0"),
    ("streaming:parts=1025", "parts must be at most 1024, got 1025"),
    ("streaming:parts=many", "parts must be \"auto\", got 'many'"),
    ("streaming:outer_gain=0.5", "outer_gain must be finite and at least 1, got 0.5"),
]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_impossible_settings_say_what_is_allowed(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_strategy(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "period"),
        ({"period": True}, "period must be an integer of at least 1, got True"),
        ({"period": 4, "momentum": 0.9}, "momentum"),
    ],
)
def test_other_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        LocalSGD(**options)


def test_settings_are_keywords_and_do_not_change() -> None:
    with pytest.raises(TypeError):
        SelSync(0.3)
    with pytest.raises(AttributeError):
        SelSync().delta = 0.1


class Misfit(LocalSGD):
    """A strategy that does not fit the model."""

    def state(self, worker: WorkerView) -> None:
        raise ValueError("the model does not fit")


def attach_a_misfit(rank: int, size: int) -> None:
    model = make_model(seed=rank)
    optimizer = sgd(model)
    with pytest.raises(ValueError, match="the model does not fit"):
        attach(model, optimizer, Misfit(period=2))
    attach(model, optimizer, LocalSGD(period=2)).finish()


def test_a_strategy_that_does_not_fit_the_model_is_refused_by_attach() -> None:
    """Every worker raises and closes what it has opened, so it can attach again."""
    run(attach_a_misfit, workers=2)


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


def test_a_similar_name_is_suggested() -> None:
    """The case of letters does not matter. Values that are no text are ignored."""
    suggested: dict[object, str] = {"digit": "digits", "SELSYNC": "selsync"}
    for given in ("digit", "SELSYNC", "nothing", "", 8):
        name = suggested.get(given)
        text = did_you_mean(given, ["digits", "selsync", None, 8])
        assert text == (f" (did you mean {name!r}?)" if name else "")
