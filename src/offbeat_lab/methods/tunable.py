"""The settings that tuning changes, declared by each method.

The baselines declare theirs in their class, as ``tunable``. A custom strategy may do so, too. The
table here has the strategies of Offbeat, which do not import this package.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from offbeat import BSP, AsyncAveraging, DiLoCo, LocalSGD, SelSync, StreamingAveraging


@dataclass(frozen=True)
class Axis:
    """A setting with its possible values in order. Without ``values`` only the method limits it.

    Attributes:
        name: Field of ``Job`` or of the strategy.
        values: All possible values. Empty: the next value is twice or half the current one.
        unit: Half of a whole number is rounded up to a multiple of it, and half of ``unit`` is 0.
        below_one: True for values in [0, 1). The next value up has half the distance to 1, and the
            next value down twice this distance, but it is at least 0.
    """

    name: str
    values: tuple[Any, ...] = ()
    unit: int = 1
    below_one: bool = False

    def next(self, value: Any, *, up: bool) -> Any:
        """Return the next value; None if ``value`` is the last one or not in ``values``."""
        if self.values:
            neighbours = dict(pairwise(self.values if up else self.values[::-1]))
            return neighbours.get(value)
        if self.below_one:
            following = round((1 + value) / 2 if up else max(0.0, 2 * value - 1), 4)
        elif up:
            following = 2 * value
        elif isinstance(value, int):
            units = value / self.unit
            following = self.unit * math.ceil(units / 2) if units > 1 else 0
        else:
            following = value / 2
        return None if following == value else following


@dataclass(frozen=True)
class Tunable:
    """The axes and the first trials of a method.

    Attributes:
        axes: Settings of the strategy, in the order in which the search changes them. It changes
            the wire before, and the learning rate after them.
        known: Settings that were best in earlier comparisons, each by name. The first ones complete
            a text that omits them. ``TAU`` stands for τ = 2·⌈t / step⌉, where t is the time from
            launch to landing in the trial before. A value of ``lr_scale`` multiplies the ideal's
            best factor on the learning rate. The first settings can have neither.
    """

    axes: tuple[Axis, ...] = ()
    known: tuple[Mapping[str, Any], ...] = ({},)


TAU = "tau"


def _diloco(
    period: int,
    outer_lr: float,
    outer_momentum: float,
    fragments: int = 4,
    overlap: int = 1,
    **others: Any,
) -> Mapping[str, Any]:
    """Return settings of DiLoCo, in the order of its text, so that equal jobs have equal texts."""
    return {
        "period": period,
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
        "fragments": fragments,
        "overlap": overlap,
        "wire": "int2",
        **others,
    }


_OFFBEAT: Mapping[Any, Tunable] = {
    BSP: Tunable(known=({"wire": "int4"},)),
    LocalSGD: Tunable((Axis("period"),), ({"period": 2, "wire": "int4"},)),
    SelSync: Tunable(
        (Axis("target_lssr", (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99)),),
        ({"target_lssr": 0.6, "wire": "int4"}, {"target_lssr": 0.4, "wire": "int2"}),
    ),
    AsyncAveraging: Tunable(
        (
            *(Axis("schedule", ("cyclic", "eager")), Axis("staleness", unit=2)),
            *(Axis("outer_lr"), Axis("outer_momentum", below_one=True)),
        ),
        (
            {"schedule": "eager", "wire": "int2"},
            {"staleness": TAU, "wire": "int2"},
            {"staleness": 2, "wire": "int2"},
            {"schedule": "eager", "outer_lr": 0.5, "wire": "int4", "lr_scale": 2.0},
        ),
    ),
    StreamingAveraging: Tunable(
        (Axis("outer_gain", ("auto", 1)), Axis("staleness", (2, 3, 4, 6, 8, 16, 64))),
        ({}, {"staleness": 3}),
    ),
    DiLoCo: Tunable(
        (
            *(Axis("period"), Axis("overlap"), Axis("outer_lr")),
            Axis("outer_momentum", below_one=True),
        ),
        (
            _diloco(4, 0.5, 0.5),
            _diloco(2, 0.5, 0.5, fragments=2),
            _diloco(8, 0.5, 0.75, overlap=2),
            _diloco(4, 0.5, 0.0, wire="int4", lr_scale=2.0),
            _diloco(2, 0.5, 0.0, fragments=2, wire="int4", lr_scale=2.0),
            _diloco(2, 0.5, 0.0, fragments=2, lr_scale=2.0),
            _diloco(3, 0.5, 0.5, fragments=3),
        ),
    ),
}


def tunable_of(kind: object) -> Tunable:
    """Return what a class of strategies declares; by default no axes and one empty setting."""
    return getattr(kind, "tunable", None) or _OFFBEAT.get(kind, Tunable())
