"""Carried state, which survives a change of membership, and its part of a checkpoint."""

import json
from dataclasses import dataclass, field

from offbeat.checkpoint.plain_values import restore, values_of
from offbeat.strategies.base import common, local, transient


@dataclass
class Inner:
    shared: float = common(default=0.0)
    own: int = local(default=0)
    restarts: int = 0
    measured: float = transient(default=0.0)


@dataclass
class Controller:
    threshold: float = 0.3
    steps: int = 0


@dataclass
class State:
    """Marks at the outer level, inside a nested dataclass, and on a dataclass as a whole."""

    gain: float = common(default=1.0)
    history: list[float] = local(default_factory=list)
    window: int = 2
    clock: float = transient(default=0.0)
    inner: Inner = field(default_factory=Inner)
    controller: Controller | None = common(default=None)
    change: Controller = local(default_factory=Controller)


def used(value: int) -> State:
    return State(
        gain=1.5 * value,
        history=[float(value)],
        window=10 * value,
        clock=7.0,
        inner=Inner(2.5 * value, value, value, 7.0),
        controller=Controller(0.5 * value, value),
        change=Controller(0.25 * value, value),
    )


def fresh() -> State:
    return State(controller=Controller())


def test_common_values_are_those_that_are_marked() -> None:
    """They are sent as JSON."""
    values = json.loads(json.dumps(values_of(used(3), "common")))
    assert values == {
        "gain": 4.5,
        "inner": {"shared": 7.5},
        "controller": {"threshold": 1.5, "steps": 3},
    }


def test_local_values_stay_with_their_worker() -> None:
    """Common values are those of the most advanced worker. All others have their initial values."""
    state = fresh()
    restore(state, values_of(used(3), "common"), "common")
    restore(state, values_of(used(2), "local"), "local")
    assert state == State(
        gain=4.5,
        history=[2.0],
        inner=Inner(shared=7.5, own=2),
        controller=Controller(1.5, 3),
        change=Controller(0.5, 2),
    )


def test_a_checkpoint_holds_all_but_transient_fields() -> None:
    saved = values_of(used(1))
    assert saved.keys() == {"gain", "history", "window", "inner", "controller", "change"}
    assert saved["inner"].keys() == {"shared", "own", "restarts"}
