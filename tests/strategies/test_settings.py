"""The settings of strategies: their text form in both directions, and errors with a remedy."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat
import offbeat_lab
from loops import attach, sgd
from offbeat import AsyncAveraging, LocalSGD, SelSync, parse_strategy
from offbeat.arguments import check_settings, did_you_mean, setting
from offbeat.strategies import Strategy, registry
from offbeat.strategies.base import WorkerView
from offbeat_lab import FedAvg, baselines
from offbeat_lab.baselines import STRATEGIES
from problems import make_model
from strategies.rows import ROWS, Row, each
from worlds import run

OWN = registry.STRATEGIES
NAMES = {name: getattr(offbeat, name) for name in offbeat.__all__} | vars(baselines)
NAMES["inf"] = math.inf
positive = st.floats(1e-9, 1e9)
whole = st.integers(1, 10**6)
unit = st.floats(0.001, 0.999)

# All text forms are read by one function; these have every type of setting.
MADE = st.one_of(
    st.builds(
        SelSync,
        delta=positive | st.sampled_from([0, 0.0, 1, math.inf]),
        smoothing=st.none() | unit | st.just(1),
        window=st.none() | whole,
    ),
    st.builds(AsyncAveraging, schedule=st.just("eager"), staleness=whole),
    st.builds(
        FedAvg,
        period=whole,
        weights=st.none() | st.lists(whole | positive, min_size=1).map(tuple),
        seed=st.integers(0, 10**6),
    ),
    st.builds(FedAvg, rounds_per_epoch=st.floats(0.001, 5), steps_per_epoch=whole),
)


def test_every_strategy_has_a_name_and_is_public() -> None:
    assert all(kind.name == name for name, kind in STRATEGIES.items())
    for kind in OWN.values():
        assert getattr(offbeat, kind.__name__) is kind
    others = {name: kind.__name__ for name, kind in STRATEGIES.items() if name not in OWN}
    assert others == registry.LABORATORY
    assert set(others.values()) <= set(offbeat_lab.__all__)


@pytest.mark.parametrize("text", ["ssp", "ssp:staleness=3", " easgd "])
def test_a_strategy_of_the_laboratory_is_named_with_its_package(text: str) -> None:
    """The library knows none of them. The error says where they are, and that text works."""
    name = registry.LABORATORY[text.strip().partition(":")[0]]
    with pytest.raises(ValueError, match=f"import {name} from offbeat_lab, or write ") as caught:
        parse_strategy(text)
    path = str(caught.value).rpartition("write ")[2]
    assert path == f"offbeat_lab:{name}"
    assert type(parse_strategy(path + (":staleness=3" * (name == "SSP")))).__name__ == name


@each(ROWS)
def test_the_text_of_every_strategy_is_read_back(row: Row) -> None:
    assert parse_strategy(str(row.strategy), STRATEGIES) == row.strategy
    assert eval(repr(row.strategy), NAMES) == row.strategy


@given(MADE)
def test_text_and_repr_make_the_strategy_again(strategy: Strategy) -> None:
    """parse_strategy(str(s)) == s with the same type, and eval(repr(s)) == s."""
    for again in (
        parse_strategy(str(strategy), STRATEGIES),
        parse_strategy(f"  {strategy}\n", STRATEGIES),
        eval(repr(strategy), NAMES),
    ):
        assert type(again) is type(strategy)
        assert again == strategy
        assert (str(again), repr(again)) == (str(strategy), repr(strategy))


@pytest.mark.parametrize(
    ("text", "shown", "call"),
    [
        ("selsync:delta=0.3,window=25", "", "SelSync(delta=0.3, window=25)"),
        ("selsync:delta=inf,max_interval=50", "", "SelSync(delta=inf, max_interval=50)"),
        ("diloco:period=100,outer_lr=0.7", "diloco", "DiLoCo()"),
        (
            "local: period = 8 , warmup_steps = 100",
            "local:period=8,warmup_steps=100",
            "LocalSGD(period=8, warmup_steps=100)",
        ),
        ("fedavg:period=8,weights=6/3/1", "", "FedAvg(period=8, weights=(6, 3, 1))"),
        (
            "fedavg:period=8,weights=0.5 / 1e2",
            "fedavg:period=8,weights=0.5/100.0",
            "FedAvg(period=8, weights=(0.5, 100.0))",
        ),
        ("fedavg:period=8,weights=600/", "", "FedAvg(period=8, weights=(600,))"),
    ],
)
def test_text_is_the_constructor_call(text: str, shown: str, call: str) -> None:
    """Spaces are allowed. str is the text form, repr the call, both without the defaults."""
    strategy = parse_strategy(text, STRATEGIES)
    assert strategy == eval(call, NAMES)
    assert (str(strategy), repr(strategy)) == (shown or text, call)


def test_the_settings_of_the_paper() -> None:
    assert SelSync.paper() == SelSync(delta=0.3, window=25)


WRONG_TYPES = {
    "local:period=eight": "period must be an integer of at least 1, got 'eight'",
    "fedavg:period=8,weights=a/b": "weights must be a tuple, one number for each",
    "fedavg:period=8,weights=1//2": "got '1//2'",
    "fedavg:period=8,weights=/": "got '/'",
}
WRONG_VALUES = {
    "": "unknown strategy ''; there are async, bsp, diloco, ",
    "xyz": f"unknown strategy 'xyz'; there are {', '.join(sorted(STRATEGIES))}",
    "SelSync": "'SelSync' (did you mean 'selsync'?); there are async, bsp, dil",
    "selsync:detla=1": "'detla' (did you mean 'delta'?); it has delta, target_lss",
    "bsp:delta=1": "bsp has no setting 'delta'; it has no settings",
    "local": "local needs period, as in local:period=8",
    "local:8": "in 'local:8': '8' is not of the form setting=value",
    "local:period=": "'period=' is not of the form setting=value",
    "local:period=4,period=4": "period is given twice",
    "async:schedule=none": 'schedule must be "cyclic" or "eager", got None',
    "fedavg": "give either period or rounds_per_epoch",
    "local:period=4,warmup_steps=-1": "warmup_steps must be at least 0",
    "async:schedule=fast": "schedule must be \"cyclic\" … got 'fast'",
    "selsync:delta=-0.1": "delta must be at least 0 … got -0.1",
    "selsync:smoothing=0": "smoothing must be in (0, 1], got 0",
    "selsync:target_lssr=1.0": "target_lssr must be between 0 and 1, got 1.0",
    "selsync:target_lssr=0.5,delta=0.2": "delta or target_lssr, not both",
    "async:staleness=1": "staleness must be even and at least 2 … got 1",
    "async:staleness=0,schedule=eager": "staleness must be at least 1",
    "diloco:outer_lr=0": "outer_lr must be positive and finite, got 0",
    "diloco:outer_momentum=1.0": "outer_momentum must be in [0, 1), got 1.0",
    "diloco:period=3,fragments=4": "got fragments=4 and period=3",
    "diloco:period=3,overlap=3": "overlap must be less than period",
    "streaming:parts=0": "parts must be at least 1, got 0",
    "streaming:parts=1025": "parts must be at most 1024, got 1025",
    "streaming:parts=many": "parts must be \"auto\", got 'many'",
    "streaming:outer_gain=0.05": "outer_gain must be finite and at least 0.1, got 0.05",
}


@pytest.mark.parametrize("text", [*WRONG_TYPES, *WRONG_VALUES])
def test_errors_say_what_is_allowed(text: str) -> None:
    """An unknown name, setting or value is a one-line error that lists the allowed ones."""
    with pytest.raises(TypeError if text in WRONG_TYPES else ValueError) as caught:
        parse_strategy(text, STRATEGIES)
    words = (WRONG_TYPES | WRONG_VALUES)[text].split(" … ")
    assert all(part in str(caught.value) for part in words), caught.value
    assert "\n" not in str(caught.value)


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
    for near in ("digit", "SELSYNC", "nothing", "", 8):
        name = suggested.get(near)
        text = did_you_mean(near, ["digits", "selsync", None, 8])
        assert text == (f" (did you mean {name!r}?)" if name else "")
