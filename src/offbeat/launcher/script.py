"""Runs a user's script in a worker process, and turns its errors into exit codes.

``python -m offbeat.launcher.script script PATH ARGUMENT…`` is like ``python PATH ARGUMENT…``, and
``… module NAME ARGUMENT…`` is like ``python -m NAME ARGUMENT…``. This module does not import torch,
so the script may still set variables that torch reads.
"""

import io
import os
import runpy
import sys
from types import TracebackType

from offbeat.errors import CommunicationError, EndedError, MismatchError

FINAL = 78
"""Exit code after an error that a restart cannot mend (EX_CONFIG of sysexits.h)."""
TEMPORARY = 75
"""Exit code after an error of communication, such as a lost worker (EX_TEMPFAIL)."""


def main() -> None:
    """Run the script that ``sys.argv`` names. Raises SystemExit, or what ends Python otherwise.

    Exit code: that of the script. If an exception ends the script: 0 for ``EndedError``, because
    nothing is left to do; 78 for ``MismatchError``; 75 for ``CommunicationError``; otherwise 1.
    """
    kind, target, *arguments = sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # otherwise a pipe would delay lines by kilobytes
            stream.reconfigure(line_buffering=True)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # forks of one server would draw the same numbers
    sys.argv = [target, *arguments]
    folder = os.getcwd() if kind == "module" else os.path.dirname(os.path.realpath(target))
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)
    try:
        if kind == "module":
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except EndedError as error:
        sys.stderr.write(f"{error}\n")
    except Exception as error:
        error.__traceback__ = _of_the_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(_exit_code(error)) from None


def _exit_code(error: Exception) -> int:
    if isinstance(error, MismatchError):
        return FINAL
    return TEMPORARY if isinstance(error, CommunicationError) else 1


def _of_the_script(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the user's script."""
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in own:
        traceback = traceback.tb_next
    return traceback


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current directory, which -m has added
    main()
