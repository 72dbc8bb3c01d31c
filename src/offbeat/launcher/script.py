"""Runs a user's script in a worker process, as ``python`` would, and returns its exit code.

This module does not import torch, so the script may still set variables that torch reads.
"""

import contextlib
import ctypes
import io
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

from offbeat.elastic import reports
from offbeat.errors import CommunicationError, EndedError, MismatchError

FINAL = 78
"""Exit code after an error that a restart cannot mend (EX_CONFIG of sysexits.h)."""
TEMPORARY = 75
"""Exit code after an error of communication, such as a lost worker (EX_TEMPFAIL)."""


def run_worker(
    argv: Sequence[str], is_module: bool, variables: Mapping[str, str], *pipes: Connection
) -> None:
    """Run a script in this new process, which ends with its exit code. Never returns.

    Args:
        argv: Path of the script, or name of the module, and the arguments.
        is_module: True if it is the name of a module.
        variables: Variables to add to the environment.
        *pipes: Pipes for standard output, standard error and reports to the launcher.
    """
    # In its own process group, the worker does not receive the terminal's Ctrl-C. A new session
    # would do the same. But Linux divides processor time between sessions first, so that one of two
    # sessions that share a core may get no time for seconds.
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_launcher, name="launcher", daemon=True).start()
    for pipe, number in zip(pipes, (1, 2), strict=False):
        os.dup2(pipe.fileno(), number)
        pipe.close()

    def tell(text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(pipes[2].fileno(), f"{text}\n".encode())

    reports.tell = tell
    # The launcher blocks these signals while it starts the fork server.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    # Otherwise the processes of a DataLoader would be started as this one was, and not as usual.
    multiprocessing.set_start_method(None, force=True)
    os.environ.update(variables)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # otherwise a pipe would delay lines by kilobytes
            stream.reconfigure(line_buffering=True)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # forks of one server would draw the same numbers
    code = run_script(argv, is_module)
    # A process of multiprocessing ends without the functions of ``atexit``, and without closing the
    # files of the script. This ends it as any Python program.
    ctypes.pythonapi.Py_Exit(code)


def _end_with_launcher() -> None:
    """Wait until the launcher has ended, and kill this worker and the processes it has started."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os.killpg(0, signal.SIGKILL)


def run_script(argv: Sequence[str], is_module: bool) -> int:
    """Run ``python PATH …`` or ``python -m NAME …`` in this process.

    Replaces the first entry of ``sys.path``.

    Returns:
        Exit code: that of the script. If an exception ends the script: 0 for ``EndedError``,
        because nothing is left to do; 78 for ``MismatchError``; 75 for ``CommunicationError``;
        130 for ``KeyboardInterrupt``; otherwise 1.
    """
    sys.argv = [*argv]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(argv[0]))
    try:
        if is_module:
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except EndedError as error:
        sys.stderr.write(f"{error}\n")
    except BaseException as error:
        _print_traceback(error)
        codes = {MismatchError: FINAL, CommunicationError: TEMPORARY, KeyboardInterrupt: 130}
        return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)
    return 0


def _print_traceback(error: BaseException) -> None:
    """Print an error and the part of its traceback that begins in the user's script."""
    traceback, own = error.__traceback__, {__file__, runpy.__file__, "<frozen runpy>"}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in own:
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    sys.last_value = error  # as Python does, for functions that run at the exit
    sys.excepthook(type(error), error, traceback)
