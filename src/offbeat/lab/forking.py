"""Worker processes that are forks of one process, which has imported what all of them need.

A new interpreter spends two to three seconds of processor on importing torch and what its
optimizers need; a fork has all of it, and shares its memory. The server starts with the first
worker that is asked for and lives as long as the process that asked, for the next runs. It must be
a process of its own: to fork one that has computed, and so has threads, is not safe.

``python -m offbeat.lab.forking FD`` is the server; ``FD`` is its end of a socket pair.
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

POSSIBLE = sys.platform == "linux"  # elsewhere, libraries of the system do not survive a fork

_PR_SET_PDEATHSIG = 1
_IMPORT_SECONDS = 120.0  # how long the server may take until it has forked a worker
_END_SECONDS = 10.0  # how long a process may take to be gone that was killed
_NUMBER = struct.Struct("q")
_LOST = -signal.SIGKILL  # the server has ended, and the kernel its workers with it


def prepare_worker() -> None:
    """In the new process, before its program: end as usual, and with the parent at the latest."""
    # The terminal's Ctrl-C shall reach us alone. Not in a session of its own: Linux shares the
    # processor between sessions, and lets one of two that share a core starve for seconds.
    os.setpgid(0, 0)
    # A script's background job ignores SIGINT, and what it starts would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":  # its kernel ends the process however the parent ended
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Forked:
    """A worker that the server has forked; what it can do is as of a ``subprocess.Popen``.

    Args:
        pipe: Tells the number of the process, and then its exit status; closed with that.

    Raises:
        OffbeatError: the server has ended, or has not answered in two minutes.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._code: int | None = None
        pid = self._told(_IMPORT_SECONDS)
        if pid is None or pid < 0:
            raise OffbeatError(
                "the process that starts workers "
                + (f"did not answer in {_IMPORT_SECONDS:g} s" if pid is None else "has ended")
            )
        self.pid = pid

    def poll(self) -> int | None:
        """The exit status, negative after a signal; None while the process runs."""
        if self._code is None:
            self._ended(self._told(0.0))
        return self._code

    def wait(self) -> int:
        """The exit status of a process that was killed, or is about to end."""
        if self._code is None:
            code = self._told(_END_SECONDS)
            self._ended(_LOST if code is None else code)
        assert self._code is not None
        return self._code

    def _ended(self, code: int | None) -> None:
        if code is not None:
            self._code = code
            os.close(self._pipe)

    def _told(self, seconds: float) -> int | None:
        """The next number; None if none comes in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        told = os.read(self._pipe, _NUMBER.size)
        return int(_NUMBER.unpack(told)[0]) if told else _LOST


class _Server:
    """The process that forks workers, as its parent sees it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._channel, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "offbeat.lab.forking", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                preexec_fn=prepare_worker,
            )

    @property
    def serves(self) -> bool:
        return self.owner == os.getpid() and self._process.poll() is None

    def fork(self, argument: str, environment: Mapping[str, str], out: int, errors: int) -> Forked:
        asked = {"argument": argument, "environment": dict(environment), "folder": os.getcwd()}
        request = json.dumps(asked).encode()
        pipe, status = os.pipe()
        try:
            try:
                socket.send_fds(self._channel, [_NUMBER.pack(len(request))], [status, out, errors])
                self._channel.sendall(request)
            finally:
                os.close(status)
            return Forked(pipe)
        except BaseException:  # a worker that nobody knows of must not stay
            os.close(pipe)
            self.end()
            raise

    def end(self) -> None:
        """End the server, and with it all workers."""
        self._channel.close()
        if self.owner != os.getpid():  # in a fork of the process that asked
            return
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_lock = threading.Lock()
_server: _Server | None = None


def fork(argument: str, environment: Mapping[str, str], out: int, errors: int) -> Forked:
    """Start ``python -m offbeat.lab.train ARGUMENT`` as a fork, in the current directory.

    Args:
        argument: See ``train.encode``.
        environment: Of the worker. What libraries read while they are imported, as they do
            ``OMP_NUM_THREADS``, is that of this process at its first worker.
        out: File descriptor of its standard output.
        errors: File descriptor of its standard error.

    Raises:
        OffbeatError: the server has ended, or has not answered in two minutes.
    """
    global _server
    with _lock:
        if _server is None or not _server.serves:
            end()
            _server = _Server()
        try:
            return _server.fork(argument, environment, out, errors)
        except BrokenPipeError:
            raise OffbeatError("the process that starts workers has ended") from None


@atexit.register
def end() -> None:
    """End the server, if there is one, and its workers. The next worker starts another."""
    global _server
    if _server is not None:
        _server.end()
    _server = None


# In the server


def serve(channel: socket.socket) -> None:
    """Fork a worker for each request, and tell how it ends, until the parent is gone."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports as much again as torch itself
    if not sys.flags.safe_path:
        del sys.path[0]  # where the server was started; a worker puts its own folder there
    # numpy's threads, which numpy itself takes care of in the child.
    warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
    gc.freeze()  # what is there now stays, and stays shared: no worker's collector looks at it
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    running: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if woken in ready:
                os.read(woken, 4096)
                _tell_ended(running)
            if channel.fileno() not in ready:
                continue
            head, files, *_ = socket.recv_fds(channel, _NUMBER.size, 3, socket.MSG_CMSG_CLOEXEC)
            if not head:
                break
            asked = json.loads(_receive(channel, _NUMBER.unpack(head)[0]))
            status, out, errors = files
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                selector.close()
                for file in (channel.fileno(), woken, wake, status, *running.values()):
                    os.close(file)
                _work(asked, out, errors)
            for file in (out, errors):
                os.close(file)
            running[pid] = status
            with contextlib.suppress(OSError):  # the parent may kill the group from now on
                os.setpgid(pid, pid)
            _tell(status, pid)
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in running:
        os.waitpid(pid, 0)


def _receive(channel: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size and (more := channel.recv(size - len(received))):
        received += more
    return received


def _tell(status: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        os.write(status, _NUMBER.pack(number))


def _tell_ended(running: dict[int, int]) -> None:
    """Tell how each worker ended that has, and forget it."""
    for pid in [*running]:
        ended, how = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = running.pop(pid)
            _tell(status, os.waitstatus_to_exitcode(how))
            os.close(status)


def _work(asked: dict[str, Any], out: int, errors: int) -> NoReturn:
    """In the fork: what ``python -m offbeat.lab.train`` does."""
    try:
        prepare_worker()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out, 1)
        os.dup2(errors, 2)
        os.close(out)
        os.close(errors)
        os.environ.clear()
        os.environ.update(asked["environment"])
        os.chdir(asked["folder"])
        sys.argv = [train.__file__, asked["argument"]]
        train.main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)  # `main` does not return


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        serve(ours)
