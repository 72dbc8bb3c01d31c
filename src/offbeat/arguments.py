"""Checks of arguments, with uniform error messages.

Functions call ``require_…``. Dataclasses of settings declare the range of each field with
``setting`` and call ``check_settings``; the command line prints the same ranges.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

Precision = Literal["float32", "bfloat16", "int8", "int4", "int2", "auto"]
"""Precision of the numbers that workers send; see ``offbeat.quantization.wire``."""

_LARGEST = 3.4e38  # largest float32
_LARGEST_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class Range:
    """An interval of numbers. A bound of None does not limit it. NaN is never inside.

    Attributes:
        least: Lower bound, included.
        above: Lower bound, excluded.
        most: Upper bound, included.
        below: Upper bound, excluded.
        finite: True if infinity, and numbers that are infinite in float32, are outside.
        hint: Text that errors add in parentheses.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    finite: bool = True
    hint: str = ""

    def __contains__(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
            and (_is_finite(value) or (not self.finite and value in (math.inf, -math.inf)))
        )

    def __str__(self) -> str:
        """Return for example ``≥ 1``, ``> 0``, ``(0, 1]``."""
        low = self.above if self.least is None else self.least
        high = self.below if self.most is None else self.most
        if low is None or high is None:
            return "" if low is None else f"{'>' if self.least is None else '≥'} {low:g}"
        opening = "(" if self.least is None else "["
        return f"{opening}{low:g}, {high:g}{')' if self.most is None else ']'}"

    def requirement(self) -> str:
        """Return the requirement as it continues a sentence after "must be"."""
        hint = f" ({self.hint})" if self.hint else ""
        if (self.above, self.below) == (0, 1):
            return f"between 0 and 1{hint}"
        if self.most is not None or self.below is not None:
            return f"in {self}{hint}"
        if self.above == 0:
            return f"positive{' and finite' if self.finite else ''}{hint}"
        finite = "finite" if self.finite else ""
        least = "" if self.least is None else f"at least {self.least:g}"
        return " and ".join(filter(None, [finite, least])) + hint


def _is_finite(value: float) -> bool:
    return -_LARGEST <= value <= _LARGEST


def require_integer(name: str, value: object, *, least: int | None) -> None:
    """Raise unless ``value`` is an int ≥ ``least``.

    Raises:
        TypeError: ``value`` is not an int.
        ValueError: ``value`` is smaller than ``least``, or does not fit in 64 bits.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        at_least = "" if least is None else f" of at least {least}"
        raise TypeError(f"{name} must be an integer{at_least}, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if abs(value) > _LARGEST_INTEGER:
        raise ValueError(f"{name} must be an integer of 64 bits, got {value}")


def require_number(name: str, value: object, within: Range | None = None) -> None:
    """Raise unless ``value`` is a real number in the range ``within``. None: any number.

    Raises:
        TypeError: ``value`` is not a number.
        ValueError: ``value`` is out of the range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if within is not None and value not in within:
        raise ValueError(f"{name} must be {within.requirement()}, got {value}")


POSITIVE = Range(above=0)


def require_mapping(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a mapping. Its keys are meant to be ranks."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dictionary by rank, got {value!r}")


def require_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        shown = [f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices]
        listed = " or ".join([", ".join(shown[:-1]), shown[-1]][len(shown) == 1 :])
        raise ValueError(f"{name} must be {listed}, got {value!r}")


def setting(
    default: Any = dataclasses.MISSING,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    finite: bool = True,
    hint: str = "",
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Return a field of a dataclass of settings, with the range of its number; see ``Range``.

    ``check_settings`` also checks the annotated type: ``int``, ``float``, ``bool`` or
    ``Literal[…]``, each optionally with ``| None``. It does not check fields of other types.
    ``metadata`` is added to that of the field; its ``"label"`` replaces the field's name in errors.
    """
    within = Range(least, above, most, below, finite, hint)
    return field(default=default, metadata={**(metadata or {}), "range": within})


def range_of(setting: "dataclasses.Field[Any]") -> Range:
    """Return the declared range of a setting, or a range without bounds."""
    declared: Range = setting.metadata.get("range", Range(finite=False))
    return declared


@cache
def types_of(kind: type) -> dict[str, Any]:
    """Return the annotated type of every field of a dataclass."""
    return typing.get_type_hints(kind)


def check_settings(settings: Any) -> None:
    """Raise unless every field of a dataclass of settings has its annotated type and its range.

    Raises:
        TypeError: a value has another type.
        ValueError: a value is out of its range, or is not one of the choices.
    """
    kind: type = type(settings)
    hints = types_of(kind)
    for each in dataclasses.fields(settings):
        label = each.metadata.get("label", each.name)
        _check(label, getattr(settings, each.name), hints[each.name], range_of(each))


def _check(name: str, value: object, kind: Any, within: Range) -> None:
    optional: tuple[None, ...] = ()
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = typing.get_args(kind)
        if value is None and type(None) in kinds:
            return
        optional = (None,) if type(None) in kinds else ()
        others = [k for k in kinds if k is not type(None)]
        words = [k for k in others if typing.get_origin(k) is typing.Literal]
        if len(words) < len(others) and words and isinstance(value, str):  # a choice or a number
            require_choice(name, value, typing.get_args(words[0]))
            return
        others = [k for k in others if k not in words] or words
        if len(others) > 1:
            return
        kind = others[0]
    if typing.get_origin(kind) is typing.Literal:
        require_choice(name, value, (*optional, *typing.get_args(kind)))
    elif kind is int:
        require_integer(name, value, least=None if within.least is None else int(within.least))
    elif kind is float:
        require_number(name, value, within)
    elif kind is bool and not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {value!r}")
