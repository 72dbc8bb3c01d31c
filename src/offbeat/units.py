"""Quantities with units, as people write them."""

import re

_BITS_PER_SECOND = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_bandwidth(text: str) -> float:
    """Bits a second from ``"1Gbit/s"``, ``"200mbit"``, ``"25 Gbps"``.

    Raises:
        ValueError: another form, another unit, or nothing positive.
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?)(bit/s|bits/s|bit|bps)\s*", text, re.IGNORECASE)
    try:
        value = float(match[1]) * _BITS_PER_SECOND[match[2].lower()] if match else 0.0
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ValueError(
            f"{text!r} is not a bandwidth; write a number and a unit, like 1Gbit/s or 200Mbit/s"
        )
    return value


def show_bandwidth(bits_per_second: float) -> str:
    """``"200 Mbit/s"`` from 2e8."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_second >= size:
            return f"{bits_per_second / size:g} {unit}"
    return f"{bits_per_second:g} bit/s"


def show_bytes(count: float) -> str:
    """``"1.3 MB"`` from 1.3e6 (decimal units, as on the wire)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
