"""Runs a user's script in a worker process, as ``python`` would, and returns its exit code.

This module does not import torch, so the script may still set variables that torch reads.
"""

import ctypes
import io
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

from offbeat.errors import CommunicationError, EndedError, MismatchError

FINAL = 78
"""Exit code after an error that a restart cannot mend (EX_CONFIG of sysexits.h)."""
TEMPORARY = 75
"""Exit code after an error of communication, such as a lost worker (EX_TEMPFAIL)."""


@dataclass(frozen=True)
class Program:
    """A script or a module, and its arguments.

    Attributes:
        target: Path of a script, or name of a module.
        arguments: Its arguments.
        is_module: True if ``target`` is the name of a module.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def run(self) -> int:
        """Run it in this process like ``python PATH …`` or ``python -m NAME …``.

        Replaces the first entry of ``sys.path``.

        Returns:
            Exit code: that of the script. If an exception ends the script: 0 for ``EndedError``,
            because nothing is left to do; 78 for ``MismatchError``; 75 for ``CommunicationError``;
            130 for ``KeyboardInterrupt``; otherwise 1.
        """
        sys.argv = [self.target, *self.arguments]
        if not sys.flags.safe_path:
            folder = os.path.dirname(os.path.realpath(self.target))
            sys.path[0] = os.getcwd() if self.is_module else folder
        code: object = 0
        try:
            if self.is_module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.target, run_name="__main__")
        except SystemExit as end:
            code = end.code
        except EndedError as error:
            sys.stderr.write(f"{error}\n")
        except BaseException as error:
            error.__traceback__ = _of_the_script(error.__traceback__)
            sys.excepthook(type(error), error, error.__traceback__)
            code = _exit_code(error)
        if not isinstance(code, int | None):
            sys.stderr.write(f"{code}\n")
            code = 1
        return code or 0


def run_worker(
    program: Program, variables: Mapping[str, str], out: Connection, errors: Connection
) -> None:
    """Run a program in this new process, which ends with its exit code. Never returns.

    Args:
        program: The program.
        variables: Variables to add to the environment.
        out: Pipe for standard output.
        errors: Pipe for standard error.
    """
    # In its own process group, the worker does not receive the terminal's Ctrl-C. A new session
    # would do the same. But Linux divides processor time between sessions first, so that one of two
    # sessions that share a core may get no time for seconds.
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_launcher, name="launcher", daemon=True).start()
    for pipe, number in ((out, 1), (errors, 2)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    # The launcher may ignore SIGINT, as a background job of a shell script does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Otherwise the processes of a DataLoader would be started as this one was, and not as usual.
    multiprocessing.set_start_method(None, force=True)
    os.environ.update(variables)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # otherwise a pipe would delay lines by kilobytes
            stream.reconfigure(line_buffering=True)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # forks of one server would draw the same numbers
    code = program.run()
    # A process of multiprocessing ends without the functions of ``atexit``, and without closing the
    # files of the script. This ends it as any Python program.
    ctypes.pythonapi.Py_Exit(code)


def _end_with_launcher() -> None:
    """Wait until the launcher has ended, and kill this worker and the processes it has started."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os.killpg(0, signal.SIGKILL)


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, MismatchError):
        return FINAL
    return TEMPORARY if isinstance(error, CommunicationError) else 1


def _of_the_script(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the user's script."""
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in own:
        traceback = traceback.tb_next
    return traceback
