"""The text form of strategies, in both directions."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat
import offbeat_lab
from offbeat import (
    AsyncAveraging,
    DiLoCo,
    LocalSGD,
    SelSync,
    parse_strategy,
)
from offbeat.strategies import Strategy, registry
from offbeat_lab import FedAvg, baselines
from offbeat_lab.baselines import STRATEGIES
from strategies.rows import ROWS, Row, each

OWN = registry.STRATEGIES
NAMES = {name: getattr(offbeat, name) for name in offbeat.__all__} | vars(baselines)
positive = st.floats(1e-9, 1e9)
some = st.none() | st.integers(1, 10**6)
unit = st.floats(0.001, 0.999)
states = st.sampled_from(["local", "average"])


def build(kind: type[Strategy], **options: st.SearchStrategy[Any]) -> st.SearchStrategy[Strategy]:
    return st.builds(kind, **options)


# All text forms are read by one function; these have every type of setting.
MADE: dict[str, st.SearchStrategy[Strategy]] = {
    "selsync": build(
        SelSync,
        delta=positive | st.sampled_from([0, 0.0, 1, math.inf]),
        aggregate=st.sampled_from(["parameters", "gradients"]),
        smoothing=st.none() | unit | st.just(1),
        window=some,
        max_interval=some,
        warmup_steps=st.integers(0, 10**6),
        flags=st.sampled_from(["blocking", "deferred"]),
    )
    | build(SelSync, target_lssr=unit, window=some, max_interval=some, optimizer_state=states),
    "async": build(
        AsyncAveraging,
        staleness=st.integers(1, 500).map(lambda half: 2 * half),
        schedule=st.sampled_from(["cyclic", "eager"]),
        outer_lr=positive,
        outer_momentum=st.just(0.0) | unit,
    ),
    "fedavg": build(
        FedAvg,
        period=st.integers(1, 10**6),
        fraction=unit | st.just(1.0),
        unselected=st.sampled_from(["keep", "restart"]),
        weights=st.none() | st.lists(st.integers(1, 10**6) | positive, min_size=1).map(tuple),
        seed=st.integers(0, 10**6),
    )
    | build(FedAvg, rounds_per_epoch=st.floats(0.001, 5), steps_per_epoch=st.integers(5, 10**6)),
    "diloco": build(
        DiLoCo,
        period=st.integers(20, 10**6),
        outer_lr=positive,
        outer_momentum=st.just(0.0) | unit,
        fragments=st.integers(1, 20),
        overlap=st.integers(0, 19),
    ),
}


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


@given(st.sampled_from(sorted(MADE)).flatmap(MADE.__getitem__))
def test_text_and_repr_make_the_strategy_again(strategy: Strategy) -> None:
    """parse_strategy(str(s)) == s with the same type, and eval(repr(s)) == s."""
    for again in (
        parse_strategy(str(strategy), STRATEGIES),
        parse_strategy(f"  {strategy}\n", STRATEGIES),
        eval(repr(strategy), {**NAMES, "inf": math.inf}),
    ):
        assert type(again) is type(strategy)
        assert again == strategy
        assert (str(again), repr(again)) == (str(strategy), repr(strategy))


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("local: period = 8 , warmup_steps = 100", LocalSGD(period=8, warmup_steps=100)),
        ("selsync:delta=0.3,window=25", SelSync.paper()),
        ("selsync:delta=inf,max_interval=50", SelSync(delta=math.inf, max_interval=50)),
        ("fedavg:period=8,weights=600/300/100", FedAvg(period=8, weights=(600, 300, 100))),
        ("fedavg:period=8,weights=0.5 / 1e2", FedAvg(period=8, weights=(0.5, 100.0))),
        ("fedavg:period=8,weights=600/", FedAvg(period=8, weights=(600,))),
    ],
)
def test_text_is_the_constructor_call(text: str, strategy: Strategy) -> None:
    """Names and settings are those of the classes; spaces and ``none`` are allowed."""
    assert parse_strategy(text, STRATEGIES) == strategy


@pytest.mark.parametrize(
    ("strategy", "text", "call"),
    [
        (SelSync.paper(), "selsync:delta=0.3,window=25", "SelSync(delta=0.3, window=25)"),
        (
            FedAvg(period=8, weights=(5,)),
            "fedavg:period=8,weights=5/",
            "FedAvg(period=8, weights=(5,))",
        ),
        (DiLoCo(), "diloco", "DiLoCo()"),
    ],
)
def test_only_what_differs_from_the_defaults_is_shown(
    strategy: Strategy, text: str, call: str
) -> None:
    """str is the text form, repr the constructor call, both without the defaults."""
    assert (str(strategy), repr(strategy)) == (text, call)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("", ValueError, "unknown strategy ''; there are async, bsp, diloco, "),
        ("xyz", ValueError, f"unknown strategy 'xyz'; there are {', '.join(sorted(STRATEGIES))}"),
        (
            "SelSync",
            ValueError,
            "'SelSync' (did you mean 'selsync'?); there are async, bsp, dil",
        ),
        (
            "selsync:detla=1",
            ValueError,
            "'detla' (did you mean 'delta'?); it has delta, target_lss",
        ),
        ("bsp:delta=1", ValueError, "bsp has no setting 'delta'; it has no settings"),
        ("local", ValueError, "local needs period, as in local:period=8"),
        ("local:8", ValueError, "in 'local:8': '8' is not of the form setting=value"),
        ("local:period=", ValueError, "'period=' is not of the form setting=value"),
        ("local:period=4,period=4", ValueError, "period is given twice"),
        ("local:period=eight", TypeError, "period must be an integer of at least 1, got 'eight'"),
        ("selsync:flags=none", ValueError, 'flags must be "blocking" or "deferred", got None'),
        ("fedavg:period=8,weights=a/b", TypeError, "weights must be a tuple, one number for each"),
        ("fedavg:period=8,weights=1//2", TypeError, "got '1//2'"),
        ("fedavg:period=8,weights=/", TypeError, "got '/'"),
        ("fedavg", ValueError, "give either period or rounds_per_epoch"),
    ],
)
def test_errors_say_what_is_allowed(text: str, error: type[Exception], words: str) -> None:
    """An unknown name, setting or value is a one-line error that lists the allowed ones."""
    with pytest.raises(error) as caught:
        parse_strategy(text, STRATEGIES)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
