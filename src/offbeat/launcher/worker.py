"""One worker of a launcher: a process that is started again when it has failed."""

import contextlib
import os
import signal
import sys
import time
import types
import uuid
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Protocol, TypeAlias

from offbeat.launcher.script import FINAL, TEMPORARY, Program, run_worker
from offbeat.launcher.signals import signal_name

_PAUSES_SECONDS = 0.1, 0.5, 2.0, 8.0, 30.0  # before each restart; the last one from then on
_FORGET_SECONDS = 60.0  # a worker that has lived this long has recovered from its last failure
_END_SECONDS = 10.0  # limit for a killed process to end
_SERVER_LOST = 255  # exit code of a process whose fork server has ended, in multiprocessing


class Process(Protocol):
    """The part of a ``multiprocessing`` process that a worker uses."""

    @property
    def pid(self) -> int | None:
        """Process id."""

    @property
    def exitcode(self) -> int | None:
        """Exit code, −n after the signal n. None while the process runs."""


StartProcess: TypeAlias = Callable[[Mapping[str, str], Connection, Connection], Process]
"""Starts a process with additional environment variables and pipes for its two outputs."""


def starter(context: ForkServerContext | SpawnContext, program: Program) -> StartProcess:
    """Return a function that starts processes which run ``program``."""

    def start(variables: Mapping[str, str], out: Connection, errors: Connection) -> Process:
        # Scripts may compare the name with that of a process without multiprocessing.
        process = context.Process(
            target=run_worker, args=(program, variables, out, errors), name="MainProcess"
        )
        with _without_main_module():
            process.start()
        return process

    return start


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Hide the main module, which new processes of multiprocessing would import."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Worker:
    """One worker: its current process, and when to start the next one.

    Args:
        number: Number of the worker on this machine (``LOCAL_RANK``).
        most_restarts: Number of restarts after which the worker is given up. A process that has
            lived for a minute resets the count.

    Attributes:
        number: See above.
        starts: Number of processes started so far.
        process: The running process. None if there is none.
        due: Time (``time.monotonic``) of the next start. None if none is planned.
        code: Exit code of the last process that has ended: 128 + n after the signal n.
        process_key: Key to which the current process writes its place in the training.
        trains: True once it was reported that the current process trains.
        script_failed: True if the last process has ended with an error of its script.
    """

    def __init__(self, number: int, most_restarts: int) -> None:
        self.number = number
        self.starts = 0
        self.process: Process | None = None
        self.due: float | None = time.monotonic()
        self.code = 0
        self.process_key = ""
        self.trains = False
        self.script_failed = False
        self._most_restarts = most_restarts
        self._restarts = 0  # since the last process that has lived for a minute
        self._started_at = 0.0
        self._group: int | None = None  # process group of the last process

    @property
    def pid(self) -> int | None:
        """Id of the running process. None if there is none."""
        return None if self.process is None else self.process.pid

    @property
    def is_active(self) -> bool:
        """True while a process runs or is planned."""
        return self.process is not None or self.due is not None

    def start(
        self,
        start: StartProcess,
        variables: Mapping[str, str],
        out: Connection,
        errors: Connection,
    ) -> None:
        """Start a process."""
        self._reap()
        self.process_key, self.trains = f"offbeat/launch/process/{uuid.uuid4().hex}", False
        own = {
            "LOCAL_RANK": str(self.number),
            "OFFBEAT_RESTARTS": str(self.starts),
            "OFFBEAT_REPORT": self.process_key,
        }
        self.due, self._started_at = None, time.monotonic()
        self.process = start({**variables, **own}, out, errors)
        self._group = self.process.pid
        self.starts += 1

    def start_failed(self) -> None:
        """Note that a process could not be started, which counts as a failure of the worker."""
        self.due, self._started_at = None, time.monotonic()
        self.code, self.script_failed = TEMPORARY, False

    def poll(self) -> str | None:
        """Return how the process has ended, such as "was ended by SIGKILL". None if it has not."""
        status = None if self.process is None else _exit_status(self.process)
        if status is None:
            return None
        self.process = None
        if status:
            self._kill_group()
        self.script_failed = status > 0 and status != TEMPORARY
        if status >= 0:
            self.code = status
            return "ended" if status == 0 else f"ended with exit code {status}"
        self.code = 128 - status
        return f"was ended by {signal_name(-status)}"

    def plan_restart(self) -> str:
        """Plan the next start if there may be one, and return what happens, for the report."""
        if self.code == FINAL:
            return "not again: a restart would not mend this error"
        if time.monotonic() - self._started_at >= _FORGET_SECONDS:
            self._restarts = 0
        if self._restarts >= self._most_restarts:
            return f"not again (--max-restarts {self._most_restarts})"
        pause = _PAUSES_SECONDS[min(self._restarts, len(_PAUSES_SECONDS) - 1)]
        self._restarts += 1
        self.due = time.monotonic() + pause
        return f"again in {pause:g} s ({self._restarts} of {self._most_restarts})"

    def send(self, number: int) -> None:
        """Send a signal to the process, if one runs."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, if one runs, and those that it has started."""
        self._kill_group()
        self.send(signal.SIGKILL)  # a new process may not be in its group yet

    def wait(self) -> None:
        """Wait until the process, if one runs, has ended, for at most 10 s."""
        deadline = time.monotonic() + _END_SECONDS
        while self.process is not None and self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def _kill_group(self) -> None:
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)

    def _reap(self) -> None:
        """Wait for the ended processes of the last group, which this process may have inherited."""
        if self._group is not None:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-self._group, os.WNOHANG)[0]:
                    pass


def _exit_status(process: Process) -> int | None:
    """Return the exit status (negative after a signal), or None while the process runs.

    If the fork server was lost, for example because it could not fork, its workers continue. This
    process inherits them, because ``launch`` has made it a subreaper.
    """
    status = process.exitcode
    if status != _SERVER_LOST or process.pid is None:
        return status
    try:
        ended, inherited = os.waitpid(process.pid, os.WNOHANG)
    except ChildProcessError:  # not inherited: it has ended with this status, or is still orphaned
        return None if _exists(process.pid) else status
    return os.waitstatus_to_exitcode(inherited) if ended else None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
