"""Addresses of stores, as in ``OFFBEAT_STORE``."""

import os


def parse_address(text: str) -> tuple[str, int] | str:
    """Return host and port of ``host:port``, or the path of ``file:///path``.

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
    return host, int(port)
