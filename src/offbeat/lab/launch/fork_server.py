"""A server process that forks workers, so that torch is imported once instead of once per worker.

A new interpreter needs two to three seconds of processor time to import torch and its optimizers. A
forked process inherits the imported modules and shares their memory. The *client*, the process that
runs jobs, starts one server for all its workers. It does not fork workers itself: it may have
threads, and forking a process with threads is not safe.

Protocol over a socket pair: the client sends the length of a request, with three file descriptors
(status pipe, standard output, standard error) attached, then the request as JSON. The server writes
the worker's process id to the status pipe and, once the worker has ended, its exit status.

``python -m offbeat.lab.launch.fork_server FD`` runs the server. ``FD`` is the file descriptor of
its end of the socket pair.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from offbeat.errors import OffbeatError
from offbeat.lab import train

AVAILABLE = sys.platform == "linux"  # other systems' libraries may not work after a fork

_PR_SET_PDEATHSIG = 1
_START_SECONDS = 120.0  # limit for the server's answer, including its imports
_END_SECONDS = 10.0  # limit for a killed process to end
_INTEGER = struct.Struct("q")
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
        OffbeatError: The server has ended or has not sent the process id within two minutes.
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
        data = os.read(self._pipe, _INTEGER.size)
        return int(_INTEGER.unpack(data)[0]) if data else _SERVER_ENDED


class _Client:
    """The connection of this process to its server."""

    def __init__(self) -> None:
        self.owner = os.getpid()  # a fork of this process inherits the object but must not use it
        self._channel, other = socket.socketpair()
        with other:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "offbeat.lab.launch.fork_server", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                preexec_fn=prepare_worker,
            )

    @property
    def usable(self) -> bool:
        return self.owner == os.getpid() and self._server.poll() is None

    def fork(
        self, argument: str, environment: Mapping[str, str], out: int, errors: int
    ) -> ForkedProcess:
        request = {"argument": argument, "environment": dict(environment), "folder": os.getcwd()}
        data = json.dumps(request).encode()
        pipe, status = os.pipe()
        try:
            try:
                socket.send_fds(self._channel, [_INTEGER.pack(len(data))], [status, out, errors])
                self._channel.sendall(data)
            finally:
                os.close(status)
            return ForkedProcess(pipe)
        except BaseException:  # the server may have forked a worker whose id is not known here
            os.close(pipe)
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server and thereby all its workers."""
        self._channel.close()
        if self.owner != os.getpid():
            return
        try:
            self._server.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


_lock = threading.Lock()
_client: _Client | None = None


def fork_worker(
    argument: str, environment: Mapping[str, str], out: int, errors: int
) -> ForkedProcess:
    """Start the equivalent of ``python -m offbeat.lab.train ARGUMENT`` in the current directory.

    Args:
        argument: Result of ``train.encode``.
        environment: Environment of the worker. Variables that libraries read on import, such as
            ``OMP_NUM_THREADS``, have no effect, because the server has imported the libraries.
        out: File descriptor for standard output.
        errors: File descriptor for standard error.

    Raises:
        OffbeatError: The server has ended or has not answered within two minutes.
    """
    global _client
    with _lock:
        if _client is None or not _client.usable:
            stop()
            _client = _Client()
        try:
            return _client.fork(argument, environment, out, errors)
        except BrokenPipeError:
            raise OffbeatError("the process that starts workers has ended") from None


@atexit.register
def stop() -> None:
    """Stop the server, if it runs, and its workers. ``fork_worker`` can start a new one."""
    global _client
    if _client is not None:
        _client.stop()
    _client = None


# The server process


def serve(channel: socket.socket) -> None:
    """Fork a worker for each request and report its exit status, until the client has ended."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports many more modules
    if not sys.flags.safe_path:
        del sys.path[0]  # the server's start directory; a worker inserts its own
    # The warning is about numpy's threads, which numpy starts again in the child.
    warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
    gc.freeze()  # workers' garbage collectors skip these objects, so their memory stays shared
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, int] = {}  # process id -> status pipe
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if woken in ready:
                os.read(woken, 4096)
                _report_ended(running)
            if channel.fileno() not in ready:
                continue
            head, files, *_ = socket.recv_fds(channel, _INTEGER.size, 3, socket.MSG_CMSG_CLOEXEC)
            if not head:
                break
            request = json.loads(_receive(channel, _INTEGER.unpack(head)[0]))
            status, out, errors = files
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                selector.close()
                for file in (channel.fileno(), woken, wake, status, *running.values()):
                    os.close(file)
                _run_worker(request, out, errors)
            for file in (out, errors):
                os.close(file)
            running[pid] = status
            # The client may kill the group before the worker itself has called setpgid.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            _write(status, pid)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in running:
        os.waitpid(pid, 0)


def _receive(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := channel.recv(size - len(data))):
        data += more
    return data


def _write(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the client has closed its end
        os.write(status, _INTEGER.pack(number))


def _report_ended(running: dict[int, int]) -> None:
    """Report and remove all workers that have ended."""
    for pid in [*running]:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            pipe = running.pop(pid)
            _write(pipe, os.waitstatus_to_exitcode(status))
            os.close(pipe)


def _run_worker(request: dict[str, Any], out: int, errors: int) -> NoReturn:
    """Run ``python -m offbeat.lab.train`` in the forked process."""
    try:
        prepare_worker()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out, 1)
        os.dup2(errors, 2)
        os.close(out)
        os.close(errors)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.argv = [train.__file__, request["argument"]]
        train.main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)  # `main` does not return


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        serve(channel)
