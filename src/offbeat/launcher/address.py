"""Addresses of stores, as in ``OFFBEAT_STORE``."""

import os


def parse_address(text: str) -> tuple[str, int] | None:
    """Return host and port of ``host:port``, or None for ``file:///path``.

    Raises:
        ValueError: ``text`` has another form, or the directory of the file does not exist.
    """
    path = text.removeprefix("file://")
    if path != text:
        if not os.path.isabs(path):
            raise ValueError(f"the path in {text!r} must be absolute, as in file:///shared/store")
        if not os.path.isdir(os.path.dirname(path)):
            raise ValueError(f"{text}: the directory {os.path.dirname(path)} does not exist")
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            "the address of a store is host:port, as in 10.0.0.1:29500, or file:///path, got "
            f"{text!r}"
        )
    return host, int(port)
