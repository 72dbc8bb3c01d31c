"""The strategies by name, and the parser of their text form.

Example of a text form: ``selsync:delta=0.3,max_interval=50``.
"""

import dataclasses
import importlib
from collections.abc import Mapping

from offbeat.arguments import did_you_mean
from offbeat.strategies import (
    BSP,
    AsyncAveraging,
    DiLoCo,
    LocalSGD,
    SelSync,
    Strategy,
    StreamingAveraging,
)

STRATEGIES: Mapping[str, type[Strategy]] = {
    s.name: s for s in (BSP, LocalSGD, SelSync, AsyncAveraging, StreamingAveraging, DiLoCo)
}
"""Strategy classes by name."""

LABORATORY = {
    "fedavg": "FedAvg",
    "ssp": "SSP",
    "downpour": "Downpour",
    "easgd": "EASGD",
    "sparseloco": "SparseLoCo",
    "powersgd": "PowerSGD",
    "selsync_gradients": "GradientSelSync",
}
"""Classes in ``offbeat_lab`` by name, only for an error message."""

_CONSTANTS: dict[str, bool | None] = {"none": None, "true": True, "false": False}


def parse_strategy(text: str, strategies: Mapping[str, type[Strategy]] = STRATEGIES) -> Strategy:
    """Return the strategy that a text names: ``name`` or ``name:setting=value,setting=value``.

    The settings are the arguments of the class: ``parse_strategy("local:period=8")`` returns
    ``LocalSGD(period=8)``. Numbers separated by slashes form a tuple: ``weights=600/300`` is
    ``weights=(600, 300)``, and ``600/`` is a tuple of one number.

    A custom strategy is named by its module and class, for example
    ``parse_strategy("growing_period:GrowingPeriod:most=8")``.

    Args:
        text: The text.
        strategies: Strategy classes by name. Default: the strategies of Offbeat.

    Raises:
        ValueError: the name or a setting is unknown, or a value is missing or out of its range.
        TypeError: a value has the wrong type.
    """
    name, _, settings = text.strip().partition(":")
    if name in strategies:
        kind = strategies[name]
    else:
        class_name, _, settings = settings.partition(":")
        if name in LABORATORY and not class_name.isidentifier():
            raise ValueError(
                f"{name!r} is a strategy of the laboratory: import {LABORATORY[name]} from "
                f"offbeat_lab, or write offbeat_lab:{LABORATORY[name]}"
            )
        if not class_name.isidentifier():
            raise ValueError(
                f"unknown strategy {name!r}{did_you_mean(name, strategies)}; there are "
                f"{', '.join(sorted(strategies))}, and your own as package.module:Class or "
                "package.module:Class:setting=value"
            )
        kind, name = _find(name, class_name), f"{name}:{class_name}"
    return kind(**read_settings(kind, name, settings, text))


def read_settings(
    kind: type, name: str, settings: str, text: str, *, separator: str = ":"
) -> dict[str, object]:
    """Return the arguments of a dataclass of settings from ``setting=value,setting=value``.

    Args:
        kind: The dataclass.
        name: Name of the dataclass in errors.
        settings: The text of the settings.
        text: The complete text that contains ``settings``, for errors.
        separator: Character between name and settings in an example that an error shows.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, object] = {}
    for setting in settings.split(",") if settings.strip() else ():
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or not value:
            raise ValueError(f"in {text!r}: {setting!r} is not of the form setting=value")
        if key not in fields:
            allowed = ", ".join(fields) or "no settings"
            raise ValueError(
                f"{name} has no setting {key!r}{did_you_mean(key, fields)}; it has {allowed}"
            )
        if key in values:
            raise ValueError(f"in {text!r}: {key} is given twice")
        values[key] = _value(value)
    for key, field in fields.items():
        if field.default is dataclasses.MISSING and key not in values:
            raise ValueError(f"{name} needs {key}, as in {name}{separator}{key}=8")
    return values


def _find(module: str, name: str) -> type[Strategy]:
    shown = " ".join(f"{module}:{name}".split())
    try:
        strategy = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ValueError(
            f"cannot import {module!r} for the strategy {shown}: {error}; it must lie in "
            "the current directory or be installed"
        ) from None
    except (Exception, SystemExit) as error:  # raised by the module's code
        text = " ".join(str(error).split())
        raise ValueError(
            f"importing {module!r} for the strategy {shown} failed: {type(error).__name__}: {text}"
        ) from error
    if not (isinstance(strategy, type) and issubclass(strategy, Strategy)):
        raise ValueError(f"{module} has no strategy class {name!r}; got {strategy!r}")
    return strategy


def _value(text: str) -> object:
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    number = _number(text)
    if number is not None:
        return number
    parts = text.split("/")
    if len(parts) > 1:
        numbers = tuple(map(_number, parts if parts[-1] else parts[:-1]))
        if None not in numbers:
            return numbers
    return text


def _number(text: str) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None
