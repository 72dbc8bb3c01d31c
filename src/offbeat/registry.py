"""Strategies by name, and their text form: ``selsync:delta=0.3,max_interval=50``."""

import dataclasses
import importlib

from offbeat.baselines import EASGD, SSP, Downpour, FedAvg
from offbeat.strategies import (
    BSP,
    AsyncAveraging,
    DiLoCo,
    LocalSGD,
    SelSync,
    Strategy,
    StreamingAveraging,
)

STRATEGIES: dict[str, type[Strategy]] = {
    s.name: s
    for s in (
        BSP,
        LocalSGD,
        SelSync,
        AsyncAveraging,
        StreamingAveraging,
        DiLoCo,
        FedAvg,
        SSP,
        Downpour,
        EASGD,
    )
}
"""By the name in the text form; strategies to train with first, then baselines."""

_CONSTANTS: dict[str, bool | None] = {"none": None, "true": True, "false": False}


def parse_strategy(text: str) -> Strategy:
    """A strategy from its short text form, ``name`` or ``name:setting=value,setting=value``.

    Names and settings are those of the classes: ``parse_strategy("local:period=8")`` is
    ``LocalSGD(period=8)``. Numbers with slashes are a tuple: ``fedavg:period=8,weights=600/300``
    is ``FedAvg(period=8, weights=(600, 300))``; ``600/`` is a tuple of one.

    A strategy of your own is named by the module and the class:
    ``parse_strategy("growing_period:GrowingPeriod:most=8")``.

    Raises:
        ValueError: unknown name or setting, a missing or an impossible value; the message lists
            what is allowed.
        TypeError: a value of the wrong type.
    """
    name, _, settings = text.strip().partition(":")
    if name in STRATEGIES:
        kind = STRATEGIES[name]
    else:
        of_class, _, settings = settings.partition(":")
        if not of_class.isidentifier():
            raise ValueError(
                f"unknown strategy {name!r}; there are {', '.join(sorted(STRATEGIES))}, and your "
                "own as package.module:Class or package.module:Class:setting=value"
            )
        kind, name = _find(name, of_class), f"{name}:{of_class}"
    return kind(**read_settings(kind, name, settings, text))


def read_settings(
    kind: type, name: str, settings: str, text: str, *, separator: str = ":"
) -> dict[str, object]:
    """The arguments of a dataclass of settings from ``setting=value,setting=value``.

    Args:
        kind: The dataclass.
        name: What errors call it.
        settings: The settings.
        text: What they are part of, for errors.
        separator: What stands between name and settings there.

    Raises:
        ValueError: an unknown setting, or a missing one.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    values: dict[str, object] = {}
    for setting in settings.split(",") if settings.strip() else ():
        key, equals, value = (part.strip() for part in setting.partition("="))
        if not equals or not value:
            raise ValueError(f"in {text!r}: {setting!r} is not of the form setting=value")
        if key not in fields:
            allowed = ", ".join(fields) or "no settings"
            raise ValueError(f"{name} has no setting {key!r}; it has {allowed}")
        if key in values:
            raise ValueError(f"in {text!r}: {key} is given twice")
        values[key] = _value(value)
    for key, field in fields.items():
        if field.default is dataclasses.MISSING and key not in values:
            raise ValueError(f"{name} needs {key}, as in {name}{separator}{key}=8")
    return values


def _find(module: str, name: str) -> type[Strategy]:
    """The strategy class ``name`` of an importable module."""
    shown = " ".join(f"{module}:{name}".split())
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ValueError(
            f"cannot import {module!r} for the strategy {shown}: {error}; it must lie in "
            "the current directory or be installed"
        ) from None
    except (Exception, SystemExit) as error:  # of the module's own code
        text = " ".join(str(error).split())
        raise ValueError(
            f"importing {module!r} for the strategy {shown} failed: {type(error).__name__}: {text}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise ValueError(f"{module} has no strategy class {name!r}; got {found!r}")
    return found


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
