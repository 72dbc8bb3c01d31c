"""Checks of arguments, with uniform error messages.

Functions check their arguments with ``require_…``. A dataclass of settings, such as a strategy,
declares the range of each number with ``setting`` and checks all fields with ``check_settings``.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

Precision = Literal["float32", "int8", "int4", "int2"]
"""Precision of the numbers that workers send."""

_LARGEST = 3.4e38  # largest float32
_LARGEST_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class Range:
    """An interval of numbers. NaN is never inside.

    Attributes:
        least: Lower bound, included.
        above: Lower bound, excluded.
        most: Upper bound, included.
        below: Upper bound, excluded.
        finite: False if ±∞ may be inside.
        hint: Explanation that error messages add in parentheses.
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
        """Return text such as ``≥ 1``, ``> 0`` or ``(0, 1]``."""
        low = self.above if self.least is None else self.least
        high = self.below if self.most is None else self.most
        if low is None or high is None:
            return "" if low is None else f"{'>' if self.least is None else '≥'} {low:g}"
        opening = "(" if self.least is None else "["
        return f"{opening}{low:g}, {high:g}{')' if self.most is None else ']'}"

    def requirement(self) -> str:
        """Return the text that follows "must be" in errors, for example "at least 1"."""
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
    """Raise TypeError unless ``value`` is an int, ValueError unless it is ≥ ``least``.

    The value must also fit in 64 bits.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        at_least = "" if least is None else f" of at least {least}"
        raise TypeError(f"{name} must be an integer{at_least}, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if abs(value) > _LARGEST_INTEGER:
        raise ValueError(f"{name} must be an integer of 64 bits, got {value}")


def require_number(name: str, value: object, within: Range | None = None) -> None:
    """Raise TypeError unless ``value`` is a real number, ValueError unless it is in ``within``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if within is not None and value not in within:
        raise ValueError(f"{name} must be {within.requirement()}, got {value}")


POSITIVE = Range(above=0)


def require_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        shown = [f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices]
        listed = " or ".join([", ".join(shown[:-1]), shown[-1]][len(shown) == 1 :])
        raise ValueError(f"{name} must be {listed}, got {value!r}{did_you_mean(value, choices)}")


def did_you_mean(given: object, names: Iterable[object]) -> str:
    """Return text such as `` (did you mean 'digits'?)`` for an error about an unknown name.

    The text has the name most similar to ``given``, in any case of letters. It is empty if no name
    is similar. Values that are no text are ignored.
    """
    if not isinstance(given, str):
        return ""
    texts = {name.lower(): name for name in names if isinstance(name, str)}
    similar = difflib.get_close_matches(given.lower(), texts, n=1)
    return f" (did you mean {texts[similar[0]]!r}?)" if similar else ""


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
    """Return a dataclass field for a number in a range, which ``check_settings`` checks.

    The arguments from ``least`` to ``hint`` are those of ``Range``. The entry ``"label"`` of
    ``metadata`` replaces the field's name in errors.
    """
    within = Range(least, above, most, below, finite, hint)
    return field(default=default, metadata={**(metadata or {}), "range": within})


def range_of(setting: "dataclasses.Field[Any]") -> Range:
    """Return the range that a field was declared with, or a range without bounds."""
    declared: Range = setting.metadata.get("range", Range(finite=False))
    return declared


@cache
def types_of(kind: type) -> dict[str, Any]:
    """Return the annotated type of every field of a dataclass."""
    return typing.get_type_hints(kind)


def check_settings(settings: Any) -> None:
    """Raise unless every field of a dataclass has its annotated type and is in its range.

    Checks fields of type ``int``, ``float``, ``bool`` and ``Literal[…]``, also together with
    ``| None``, and fields such as ``int | Literal["auto"]``. Other types are not checked.
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
        literals = [k for k in others if typing.get_origin(k) is typing.Literal]
        if len(literals) < len(others) and literals and isinstance(value, str):
            require_choice(name, value, typing.get_args(literals[0]))  # e.g. int | Literal["auto"]
            return
        others = [k for k in others if k not in literals] or literals
        if len(others) > 1:
            return
        kind = others[0]
    if typing.get_origin(kind) is typing.Literal:
        require_choice(name, value, (*optional, *typing.get_args(kind)))
    elif kind is int:
        require_integer(name, value, least=None if within.least is None else int(within.least))
        require_number(name, value, within)
    elif kind is float:
        require_number(name, value, within)
    elif kind is bool and not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {value!r}")
