"""Cleanup that a single Ctrl-C cannot interrupt."""

from collections.abc import Callable


def run_cleanup(clean: Callable[[], object]) -> None:
    """Call ``clean``. If Ctrl-C or another exception interrupts it, call it again and re-raise.

    Two calls are enough, because a second Ctrl-C ends the program at once.
    """
    try:
        clean()
    except BaseException:
        clean()
        raise
