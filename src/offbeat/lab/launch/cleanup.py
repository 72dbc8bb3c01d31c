"""Cleanup that survives an interrupt."""

from collections.abc import Callable


def run_cleanup(clean: Callable[[], object]) -> None:
    """Call ``clean``, and call it again if an exception, such as Ctrl-C, interrupts it.

    Two calls are enough: the command line ends at once at the second signal.
    """
    try:
        clean()
    except BaseException:
        clean()
        raise
