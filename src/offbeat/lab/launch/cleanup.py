"""Cleanup that runs to its end despite Ctrl-C."""

from collections.abc import Callable


def run_cleanup(clean: Callable[[], object]) -> None:
    """Call ``clean``. If Ctrl-C or another exception interrupts it, call it again and re-raise.

    Two calls are enough, because a second signal ends the command line immediately.
    """
    try:
        clean()
    except BaseException:
        clean()
        raise
