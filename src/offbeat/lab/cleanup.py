"""Cleaning up although a signal may come in the middle of it."""

from collections.abc import Callable


def surely(clean: Callable[[], object]) -> None:
    """Call ``clean``, and again if something interrupts it, a Ctrl-C for example.

    Twice is enough: the command line ends at once at a second signal.
    """
    try:
        clean()
    except BaseException:
        clean()
        raise
