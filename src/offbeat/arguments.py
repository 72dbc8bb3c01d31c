"""What arguments may be: each requirement written once, so that every error reads alike.

A function checks with ``require_…``; a dataclass of settings declares them with ``setting`` and is
checked by ``check_settings``, so that a command line can print the ranges, too.
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
"""How numbers travel; ``offbeat.quantization.wire`` is where they do."""

_LARGEST = 3.4e38  # of float32
_LARGEST_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class Range:
    """An interval of numbers; a bound that is None is no bound.

    Attributes:
        least: ≥ this.
        above: > this.
        most: ≤ this.
        below: < this.
        finite: Whether infinity is out of it, and what is infinite in float32. NaN always is.
        hint: What the message adds in parentheses.
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
        """As in ``≥ 1``, ``> 0``, ``(0, 1]``."""
        low = self.above if self.least is None else self.least
        high = self.below if self.most is None else self.most
        if low is None or high is None:
            return "" if low is None else f"{'>' if self.least is None else '≥'} {low:g}"
        opening = "(" if self.least is None else "["
        return f"{opening}{low:g}, {high:g}{')' if self.most is None else ']'}"

    def requirement(self) -> str:
        """What a value must be, as a sentence goes on after "must be"."""
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
        TypeError: it is not an int.
        ValueError: it is smaller.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        at_least = "" if least is None else f" of at least {least}"
        raise TypeError(f"{name} must be an integer{at_least}, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if abs(value) > _LARGEST_INTEGER:
        raise ValueError(f"{name} must be an integer of 64 bits, got {value}")


def require_number(name: str, value: object, within: Range | None = None) -> None:
    """Raise unless ``value`` is a real number, and in the range ``within`` if that is given.

    Raises:
        TypeError: it is no number.
        ValueError: it is out of the range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if within is not None and value not in within:
        raise ValueError(f"{name} must be {within.requirement()}, got {value}")


POSITIVE = Range(above=0)


def require_mapping(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a mapping, from ranks to something."""
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
    """A field of a dataclass of settings with the range of its number; see ``Range``.

    The annotation says the rest: ``int``, ``float``, ``bool``, ``Literal[…]``, each perhaps with
    ``| None``. Settings of other types are their owner's to check. ``metadata`` is added to that of
    the field; its ``"label"`` is what errors call the setting, instead of the field's name.
    """
    within = Range(least, above, most, below, finite, hint)
    return field(default=default, metadata={**(metadata or {}), "range": within})


def range_of(one: "dataclasses.Field[Any]") -> Range:
    """The declared range of a setting; one without bounds if none was declared."""
    found: Range = one.metadata.get("range", Range(finite=False))
    return found


@cache
def types_of(kind: type) -> dict[str, Any]:
    """The annotated type of every field of a dataclass."""
    return typing.get_type_hints(kind)


def check_settings(settings: Any) -> None:
    """Raise unless every field of a dataclass of settings has its type and is in its range.

    Raises:
        TypeError: a value of another type.
        ValueError: a value out of its range, or none of the choices.
    """
    kind: type = type(settings)
    hints = types_of(kind)
    for one in dataclasses.fields(settings):
        label = one.metadata.get("label", one.name)
        _check(label, getattr(settings, one.name), hints[one.name], range_of(one))


def _check(name: str, value: object, kind: Any, within: Range) -> None:
    optional: tuple[None, ...] = ()
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kinds = typing.get_args(kind)
        if value is None and type(None) in kinds:
            return
        optional = (None,) if type(None) in kinds else ()
        others = [k for k in kinds if k is not type(None)]
        words = [k for k in others if typing.get_origin(k) is typing.Literal]
        if len(words) < len(others) and words and isinstance(value, str):  # a word or a number
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
