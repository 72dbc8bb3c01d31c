"""Conversion of quantities with units, such as "50ms" and "1Gbit/s", to numbers and back.

The functions ``to_*`` read text, or accept a number in base units (seconds, bits per second). They
return positive finite numbers, and also 0 if ``allow_zero`` is set. For any other value, and for
text in another form, they raise a ValueError that shows the correct form. Text must be in the range
[1e-18, 1e18] base units, or [1e-13, 1e13] for a count. A value that is neither text nor a real
number raises a TypeError. The functions ``show_*`` return text.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real

# Decimal, so that "100us" is 1e-4 and not 9.999999999999999e-05.
_PREFIXES = {"": "1", "k": "1e3", "m": "1e6", "g": "1e9", "t": "1e12"}
_BANDWIDTHS = {
    prefix + unit: Decimal(size)
    for prefix, size in _PREFIXES.items()
    for unit in ("bit/s", "bits/s", "bit", "bps")
}
_SECONDS = {
    "ns": Decimal("1e-9"),
    **dict.fromkeys(("us", "\u00b5s", "\u03bcs"), Decimal("1e-6")),  # micro sign, Greek mu
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
}
_COUNTS = {"": Decimal(1), "k": Decimal("1e3"), "m": Decimal("1e6"), "b": Decimal("1e9")}
_COUNTS["t"] = Decimal("1e12")
_BYTES = {prefix + "b": Decimal(size) for prefix, size in _PREFIXES.items()}
_BYTES |= {prefix + "ib": Decimal(1024) ** i for i, prefix in enumerate(_PREFIXES) if prefix}

_QUANTITY = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9.]*)\s*")


@dataclass(frozen=True)
class _Quantity:
    """A kind of quantity and its units.

    Attributes:
        name: Name of the quantity in errors, for example "a duration".
        base: Name of the base unit, for example "seconds".
        units: Size of each unit in base units, by the unit's text.
        form: Description of the correct form of a text, for errors.
        most: Largest value of a text, in base units. The smallest positive one is 1/most.
    """

    name: str
    base: str
    units: Mapping[str, Decimal]
    form: str
    most: float = 1e18

    def read(self, value: object, fold: Callable[[str], str], allow_zero: bool) -> float:
        """Return a text or number in base units. ``fold`` maps a unit to the key in ``units``."""
        if isinstance(value, str):
            number = self._parse(value, fold)
            if not _allowed(number, allow_zero):
                raise ValueError(f"{value!r} is not {self.name}; write {self.form}")
            return number
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{value!r} is not {self.name}; give {self.base}, or {self.form}")
        try:
            number = float(value)
        except OverflowError:  # an int of more than 308 digits
            number = math.inf
        if not _allowed(number, allow_zero):
            least = "at least 0" if allow_zero else "positive"
            raise ValueError(
                f"{value} is not {self.name}; give {self.base}, finite and {least}, or {self.form}"
            )
        return number

    def _parse(self, text: str, fold: Callable[[str], str]) -> float:
        """Return the value of ``text`` in base units; NaN if it has another form."""
        match = _QUANTITY.fullmatch(text)
        if match is None or (unit := fold(match[2])) not in self.units:
            return math.nan
        try:
            value = float(Decimal(match[1]) * self.units[unit])
        except ArithmeticError:  # for example 1.2.3, or a number too large for a Decimal
            return math.nan
        return value if not value or 1 / self.most <= value <= self.most else math.nan


def _allowed(value: float, allow_zero: bool) -> bool:
    return math.isfinite(value) and (value > 0 or (allow_zero and value == 0))


_BANDWIDTH = _Quantity(
    "a bandwidth",
    "bits a second",
    _BANDWIDTHS,
    "a number and a unit, like 1Gbit/s or 200Mbit/s (bits, not bytes)",
)
_DURATION = _Quantity(
    "a duration", "seconds", _SECONDS, "a number and a unit, like 100us, 50ms, 1.5s or 2min"
)
_COUNT = _Quantity(
    "a count",
    "a number",
    _COUNTS,
    "a number with k, M, B, T or nothing behind it, like 25M or 1.2B",
    most=1e13,
)
_SIZE = _Quantity("a size", "bytes", _BYTES, "a number and a unit, like 80GB or 24GiB")


def to_bandwidth(value: str | float) -> float:
    """Return bits per second from ``"1Gbit/s"``, ``"200mbit"``, ``"25 Gbps"`` or a number."""
    # GBps is bytes, Gbps is bits
    return _BANDWIDTH.read(value, lambda u: u if re.search("B[pP/]", u) else u.lower(), False)


def to_seconds(value: str | float, *, allow_zero: bool = False) -> float:
    """Return seconds from text such as ``"100us"``, ``"50ms"``, ``"2min"``, or from a number.

    The units are ns, us (or µs), ms, s, min and h. They are case-sensitive: Ms is not ms.
    """
    return _DURATION.read(value, str, allow_zero)


def to_count(value: str | float) -> float:
    """Return a number of parameters from ``"25M"``, ``"1.2B"`` (billions), ``"7e6"``, 7e6."""
    return _COUNT.read(value, str.lower, False)


def to_bytes(value: str | float) -> float:
    """Return bytes from ``"80GB"`` (decimal), ``"24GiB"`` (binary), or a number."""
    return _SIZE.read(value, str.lower, False)


def show_bandwidth(bits_per_second: float) -> str:
    """Return ``"200 Mbit/s"`` for 2e8."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_second >= size:
            return f"{bits_per_second / size:g} {unit}"
    return f"{bits_per_second:g} bit/s"


def show_seconds(seconds: float) -> str:
    """Return ``"120 ms"`` for 0.12, with four significant digits."""
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns"


def show_bytes(count: float) -> str:
    """Return ``"1.3 MB"`` for 1.3e6 (decimal units)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
