"""The variables ``OFFBEAT_STORE`` and ``OFFBEAT_WORKERS``."""

import os
import re
from dataclasses import dataclass

PATIENCE_SECONDS = 30.0
"""Time after which training begins with fewer workers, if ``OFFBEAT_WORKERS`` allows it."""


def parse_address(text: str) -> tuple[str, int] | str:
    """Return host and port of ``host:port`` or ``[IPv6]:port``, or the path of ``file:///path``.

    Raises:
        ValueError: ``text`` has another form.
    """
    path = text.removeprefix("file://")
    if path != text and os.path.isabs(path):
        return path
    host, _, port = text.rpartition(":")
    if path != text or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            "the address of a store is host:port, as in 10.0.0.1:29500, or file:///path, got "
            f"{text!r}"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(frozen=True)
class WorkerCount:
    """The number of workers with which training begins.

    Attributes:
        most: Training begins when this many workers have come (≥ 1).
        least: Training begins with at least this many workers after ``PATIENCE_SECONDS``.
        min_workers: Least number of workers with which training continues.
    """

    most: int
    least: int
    min_workers: int

    @classmethod
    def parse(cls, text: str) -> "WorkerCount":
        """Return the numbers of ``"4"`` or ``"2:4"``.

        Raises:
            ValueError: ``text`` has another form.
        """
        match = re.fullmatch(r"(?:([0-9]+):)?([0-9]+)", text.strip())
        most = int(match[2]) if match else 0
        least = int(match[1]) if match and match[1] else most
        if not 1 <= least <= most:
            raise ValueError(
                "give a number of workers such as 4, or 2:4 to begin with 4, or with 2 after "
                f"{PATIENCE_SECONDS:g} s; got {text!r}"
            )
        return cls(most, least, least if match and match[1] else 1)
