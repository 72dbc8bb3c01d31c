"""Quantities with units, as people write them.

``parse_*`` read text, ``to_*`` also take a number in base units (seconds, bits a second, bytes),
``show_*`` write text.
"""

import math
import re
from collections.abc import Mapping
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
_BYTES = {
    **{p + "B": Decimal(s) for p, s in zip(("", *"kMGT"), _PREFIXES.values(), strict=True)},
    **{p + "iB": Decimal(1024**i) for i, p in enumerate("KMGT", start=1)},
    "KB": Decimal(1000),
    "kiB": Decimal(1024),
}
_COUNTS = {"": Decimal(1), "k": Decimal("1e3"), "m": Decimal("1e6"), "b": Decimal("1e9")}
_COUNTS["t"] = Decimal("1e12")

_MOST = 1e18  # of a text's bits a second, seconds, bytes; and one over it the least
_MOST_COUNT = 1e13

_BANDWIDTH_FORM = "a number and a unit, like 1Gbit/s or 200Mbit/s (bits, not bytes)"
_SECONDS_FORM = "a number and a unit, like 100us, 50ms, 1.5s or 2min"
_BYTES_FORM = "a number and a unit, like 25MB or 64KiB (B is bytes)"
_COUNT_FORM = "a number with k, M, B, T or nothing behind it, like 25M or 1.2B"


def parse_bandwidth(text: str) -> float:
    """Bits a second from ``"1Gbit/s"``, ``"200mbit"``, ``"25 Gbps"``.

    Raises:
        ValueError: another form, another unit (bytes a second, as in 1GB/s or 1GBps), or nothing
            positive.
    """
    unit = _unit(text)
    bits = unit if re.search("B[pP/]", unit) else unit.lower()  # GBps is bytes, Gbps is bits
    return _parse(text, bits, _BANDWIDTHS, "a bandwidth", _BANDWIDTH_FORM)


def parse_seconds(text: str, *, allow_zero: bool = False) -> float:
    """Seconds from ``"100us"`` (or µs), ``"50ms"``, ``"1.5 s"``, ``"2min"``; also ns and h.

    Raises:
        ValueError: another form, another unit (case counts: Ms is not ms), or nothing positive;
            with ``allow_zero``, zero is a duration too.
    """
    return _parse(text, _unit(text), _SECONDS, "a duration", _SECONDS_FORM, allow_zero)


def parse_bytes(text: str) -> float:
    """Bytes from ``"25MB"``, ``"1.5 GB"`` (decimal) or ``"64 KiB"`` (binary).

    Raises:
        ValueError: another form, another unit (case counts: Mb would be bits), or nothing positive.
    """
    return _parse(text, _unit(text), _BYTES, "a number of bytes", _BYTES_FORM)


def parse_count(text: str) -> float:
    """A number of parameters from ``"25M"``, ``"1.2B"`` (billions), ``"7e6"``.

    Raises:
        ValueError: another form, or nothing positive.
    """
    return _parse(text, _unit(text).lower(), _COUNTS, "a count", _COUNT_FORM, most=_MOST_COUNT)


def to_bandwidth(value: str | float) -> float:
    """Bits a second from text, as ``parse_bandwidth``, or from a number of them.

    Raises:
        TypeError: neither text nor a number.
        ValueError: text of another form, or a number that is not positive and finite.
    """
    if isinstance(value, str):
        return parse_bandwidth(value)
    return _number(value, "a bandwidth", "bits a second", _BANDWIDTH_FORM)


def to_seconds(value: str | float, *, allow_zero: bool = False) -> float:
    """Seconds from text, as ``parse_seconds``, or from a number of them.

    Raises:
        TypeError: neither text nor a number.
        ValueError: text of another form, or a number that is not positive and finite; with
            ``allow_zero``, zero is a duration too.
    """
    if isinstance(value, str):
        return parse_seconds(value, allow_zero=allow_zero)
    return _number(value, "a duration", "seconds", _SECONDS_FORM, allow_zero)


def to_bytes(value: str | float) -> float:
    """Bytes from text, as ``parse_bytes``, or from a number of them.

    Raises:
        TypeError: neither text nor a number.
        ValueError: text of another form, or a number that is not positive and finite.
    """
    if isinstance(value, str):
        return parse_bytes(value)
    return _number(value, "a number of bytes", "bytes", _BYTES_FORM)


def show_bandwidth(bits_per_second: float) -> str:
    """``"200 Mbit/s"`` from 2e8."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_second >= size:
            return f"{bits_per_second / size:g} {unit}"
    return f"{bits_per_second:g} bit/s"


def show_seconds(seconds: float, *, digits: int = 4) -> str:
    """``"120 ms"`` from 0.12, to so many digits; ``parse_seconds`` reads it."""
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.{digits}g} {unit}"
    return f"{seconds / 1e-9:.{digits}g} ns"


def show_bytes(count: float) -> str:
    """``"1.3 MB"`` from 1.3e6 (decimal units, as on the wire)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


_QUANTITY = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9.]*)\s*")


def _unit(text: str) -> str:
    match = _QUANTITY.fullmatch(text)
    return match[2] if match else ""


def _parse(
    text: str,
    unit: str,
    units: Mapping[str, Decimal],
    kind: str,
    form: str,
    allow_zero: bool = False,
    most: float = _MOST,
) -> float:
    """The number in ``text`` times the size of ``unit``, which is the text's unit, normalised."""
    match = _QUANTITY.fullmatch(text)
    value = math.nan
    if match and unit in units:
        try:
            value = float(Decimal(match[1]) * units[unit])
            if value and not 1 / most <= value <= most:
                value = math.nan
        except ArithmeticError:  # 1.2.3, or more than even a Decimal holds
            value = math.nan
    if not _allowed(value, allow_zero):
        raise ValueError(f"{text!r} is not {kind}; write {form}")
    return value


def _number(value: object, kind: str, base: str, form: str, allow_zero: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{value!r} is not {kind}; give {base}, or {form}")
    try:
        number = float(value)
    except OverflowError:  # an int of more than 308 digits
        number = math.inf
    if not _allowed(number, allow_zero):
        least = "at least 0" if allow_zero else "positive"
        raise ValueError(f"{value} is not {kind}; give {base}, finite and {least}, or {form}")
    return number


def _allowed(value: float, allow_zero: bool) -> bool:
    return math.isfinite(value) and (value > 0 or (allow_zero and value == 0))
