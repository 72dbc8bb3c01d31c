"""One worker of a launcher: a process that is started again when it has failed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from offbeat.launcher.forking import AVAILABLE, ForkedProcess, ForkServer, prepare_worker
from offbeat.launcher.script import FINAL
from offbeat.launcher.signals import signal_name

_PAUSES_SECONDS = 0.1, 0.5, 2.0, 8.0, 30.0  # before each restart; the last one from then on
_FORGET_SECONDS = 60.0  # a worker that has lived this long has recovered from its last failure
_SCRIPT = "offbeat.launcher.script"
PRELOADED = "offbeat.launcher.preloaded"
"""Module that imports what almost every script needs."""
Process: TypeAlias = "ForkedProcess | subprocess.Popen[bytes]"


@dataclass(frozen=True)
class Program:
    """What each worker runs.

    Attributes:
        target: Path of a script, or name of a module.
        arguments: Its arguments.
        is_module: True if ``target`` is the name of a module.
        preloaded: Names of modules that the fork server imports for it.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    preloaded: tuple[str, ...] = (PRELOADED,)

    def argv(self) -> list[str]:
        """Return the arguments of ``offbeat.launcher.script``."""
        return ["module" if self.is_module else "script", self.target, *self.arguments]


class Starter:
    """Starts processes of workers: forks of one warm server, or new interpreters.

    Args:
        program: What the processes run.
        environment: Environment that all workers share. Variables that libraries read when they are
            imported must be in it.
        fresh: True for a new interpreter for each process. Only Linux offers forks.
    """

    def __init__(self, program: Program, environment: Mapping[str, str], *, fresh: bool) -> None:
        self._program, self._environment = program, environment
        self._warm = AVAILABLE and not fresh
        self._server: ForkServer | None = None
        if self._warm:
            self._open_server()  # it imports torch while the launcher does

    def start(self, variables: Mapping[str, str], out: int, errors: int) -> Process:
        """Start a process with some more environment variables.

        ``out`` and ``errors`` are the descriptors for standard output and error.
        """
        environment = {**self._environment, **variables}
        argv = self._program.argv()
        if self._warm:
            server = self._open_server()
            return server.fork(f"{_SCRIPT}:main", argv, environment, out, errors)
        return subprocess.Popen(
            [sys.executable, "-m", _SCRIPT, *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env=environment,
            preexec_fn=prepare_worker,
        )

    def _open_server(self) -> ForkServer:
        if self._server is None or not self._server.usable:
            self.close()
            script = "" if self._program.is_module else self._program.target
            self._server = ForkServer(self._program.preloaded, self._environment, script)
        return self._server

    def close(self) -> None:
        """End the server, and with it all processes that it has forked."""
        if self._server is not None:
            self._server.close()
            self._server = None


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
    """

    def __init__(self, number: int, most_restarts: int) -> None:
        self.number = number
        self.starts = 0
        self.process: Process | None = None
        self.due: float | None = time.monotonic()
        self.code = 0
        self.process_key = ""
        self.trains = False
        self._most_restarts = most_restarts
        self._restarts = 0  # since the last process that has lived for a minute
        self._started_at = 0.0

    @property
    def pid(self) -> int | None:
        """Id of the running process. None if there is none."""
        return None if self.process is None else self.process.pid

    @property
    def is_active(self) -> bool:
        """True while a process runs or is planned."""
        return self.process is not None or self.due is not None

    def start(self, starter: Starter, variables: Mapping[str, str], out: int, errors: int) -> None:
        """Start a process."""
        self.process_key, self.trains = f"offbeat/launch/process/{uuid.uuid4().hex}", False
        own = {
            "LOCAL_RANK": str(self.number),
            "OFFBEAT_RESTARTS": str(self.starts),
            "OFFBEAT_REPORT": self.process_key,
        }
        self.due = None
        self.process = starter.start({**variables, **own}, out, errors)
        self.starts += 1
        self._started_at = time.monotonic()

    def poll(self) -> str | None:
        """Return how the process has ended, such as "was ended by SIGKILL". None if it has not."""
        status = None if self.process is None else self.process.poll()
        if status is None:
            return None
        self.process = None
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
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill the process, if one runs, and those that it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill the process, if one runs, and wait until it has ended."""
        self.kill()
        if self.process is not None:
            self.process.wait()
            self.process = None
