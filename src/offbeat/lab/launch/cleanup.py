"""Cleanup that runs to its end despite Ctrl-C."""

from collections.abc import Callable


def run_cleanup(clean: Callable[[], object]) -> None:
    """Call ``clean``, and call it once more if Ctrl-C or another exception interrupts it.

    Two calls are enough, because a second signal ends the command line immediately.
    """
    try:
        clean()
    except BaseException:
        clean()
        raise
