"""Worker processes forked by a server, so that torch is imported once instead of once per worker.

A new interpreter needs two to three seconds of processor time to import torch and its optimizers. A
forked process inherits the imported modules and shares their memory. The *client*, the process that
needs workers, starts one server (``fork_server.py``) for all its workers. It does not fork workers
itself: it may have threads, and forking a process with threads is not safe.

Protocol over a socket pair: the client sends the length of a request, with three file descriptors
(status pipe, standard output, standard error) attached, then the request as JSON. The server writes
the worker's process id to the status pipe and, once the worker has ended, its exit status.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence

from offbeat.errors import OffbeatError

AVAILABLE = sys.platform == "linux"  # other systems' libraries may not work after a fork

_PR_SET_PDEATHSIG = 1
_START_SECONDS = 600.0  # limit for the server's answer; imports from a shared disk take minutes
_END_SECONDS = 10.0  # limit for a killed process to end
INTEGER = struct.Struct("q")
"""Format of the numbers that the protocol sends: lengths, process ids and exit statuses."""
# The kernel kills the workers together with the server. Windows has no SIGKILL.
_SERVER_ENDED = -getattr(signal, "SIGKILL", 9)


def prepare_worker() -> None:
    """Set up this new process: create a process group, and restore the default action of SIGINT.

    On Linux, the process also ends together with its parent.
    """
    # In a new process group, the worker does not receive the terminal's Ctrl-C. A new session would
    # do the same. But Linux divides processor time between sessions first, so that one of two
    # sessions that share a core may get no time for seconds.
    os.setpgid(0, 0)
    # Background jobs of a shell script ignore SIGINT, and their children inherit this.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":  # the kernel kills this process when its parent ends
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class ForkedProcess:
    """A forked worker, with ``pid``, ``poll`` and ``wait`` similar to ``subprocess.Popen``.

    Args:
        pipe: Read end of the status pipe. Closed once the exit status has arrived.

    Raises:
        OffbeatError: The server has ended or has not sent the process id within ten minutes.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._status: int | None = None
        pid = self._read(_START_SECONDS)
        if pid is None or pid < 0:
            raise OffbeatError(
                "the process that starts workers "
                + (f"did not answer in {_START_SECONDS:g} s" if pid is None else "has ended")
            )
        self.pid = pid

    def poll(self) -> int | None:
        """Return the exit status (negative after a signal), or None while the process runs."""
        if self._status is None:
            self._store(self._read(0.0))
        return self._status

    def wait(self) -> int:
        """Wait at most 10 s for a killed or ending process, and return its exit status.

        If no status arrives in time, returns that of a process killed by SIGKILL.
        """
        if self._status is None:
            status = self._read(_END_SECONDS)
            self._store(_SERVER_ENDED if status is None else status)
        assert self._status is not None
        return self._status

    def _store(self, status: int | None) -> None:
        if status is not None:
            self._status = status
            os.close(self._pipe)

    def _read(self, seconds: float) -> int | None:
        """Return the next integer from the status pipe, or None if none arrives in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        data = os.read(self._pipe, INTEGER.size)
        return int(INTEGER.unpack(data)[0]) if data else _SERVER_ENDED


def server_command(channel: int, script: str, modules: Sequence[str]) -> list[str]:
    """Return the command of a server. ``channel`` is the descriptor of its socket."""
    server = [sys.executable, "-m", "offbeat.launcher.fork_server"]
    return [*server, str(channel), script, *modules]


class ForkServer:
    """A server process that forks workers, and this process's connection to it.

    Starts the server and does not wait for it: the server imports modules while this process
    continues.

    Args:
        modules: Modules that the server imports before it forks the first worker.
        environment: Environment of the server. None: that of this process. Libraries read some
            variables, such as ``OMP_NUM_THREADS``, when the server imports them.
        script: Path of a script whose packages the server imports, too. Empty: none.
    """

    def __init__(
        self,
        modules: Sequence[str],
        environment: Mapping[str, str] | None = None,
        script: str = "",
    ) -> None:
        self._owner = os.getpid()  # a fork of this process inherits the object
        self._channel, other = socket.socketpair()
        with other:
            self._server = subprocess.Popen(
                server_command(other.fileno(), script, modules),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env=environment,
                preexec_fn=prepare_worker,
            )

    @property
    def usable(self) -> bool:
        """True while the server runs, in the process that started it."""
        return self._owner == os.getpid() and self._server.poll() is None

    def fork(
        self,
        function: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        out: int,
        errors: int,
    ) -> ForkedProcess:
        """Start a worker that calls a function in the current directory.

        Args:
            function: Function without arguments, as ``package.module:name``.
            arguments: ``sys.argv[1:]`` of the worker.
            environment: Environment of the worker. Variables that libraries read when they are
                imported have no effect.
            out: File descriptor for standard output.
            errors: File descriptor for standard error.

        Raises:
            OffbeatError: The server has ended or has not answered within ten minutes.
        """
        request = {
            "function": function,
            "arguments": [*arguments],
            "environment": dict(environment),
            "folder": os.getcwd(),
        }
        data = json.dumps(request).encode()
        pipe, status = os.pipe()
        try:
            try:
                socket.send_fds(self._channel, [INTEGER.pack(len(data))], [status, out, errors])
                self._channel.sendall(data)
            finally:
                os.close(status)
            return ForkedProcess(pipe)
        except BaseException as error:
            os.close(pipe)
            self.close()  # the server may have forked a worker whose id is not known here
            if isinstance(error, BrokenPipeError):
                raise OffbeatError("the process that starts workers has ended") from None
            raise

    def close(self) -> None:
        """End the server and thereby all its workers. May be called again."""
        self._channel.close()
        if self._owner != os.getpid():
            return
        try:
            self._server.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
