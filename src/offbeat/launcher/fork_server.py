"""The server process that forks workers. ``forking.py`` describes the protocol.

``python -m offbeat.launcher.fork_server FD SCRIPT MODULE…`` runs the server. ``FD`` is the file
descriptor of its end of the socket pair. It imports each ``MODULE``, and the packages that
``SCRIPT`` imports, unless that is empty.
"""

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from offbeat.launcher.forking import INTEGER, prepare_worker, server_command
from offbeat.launcher.script_imports import import_packages_of


def serve(channel: socket.socket) -> None:
    """Fork a worker for each request and report its exit status, until the client has ended.

    In a forked process it raises what ends the worker: SystemExit, or the error of its function.
    """
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
            head, files, *_ = socket.recv_fds(channel, INTEGER.size, 3, socket.MSG_CMSG_CLOEXEC)
            if not head:
                break
            request = json.loads(_receive(channel, INTEGER.unpack(head)[0]))
            status, out, errors = files
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                selector.close()
                for file in (channel.detach(), woken, wake, status, *running.values()):
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
        os.write(status, INTEGER.pack(number))


def _report_ended(running: dict[int, int]) -> None:
    """Report and remove all workers that have ended."""
    for pid in [*running]:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            pipe = running.pop(pid)
            _write(pipe, os.waitstatus_to_exitcode(status))
            os.close(pipe)


def _run_worker(request: dict[str, Any], out: int, errors: int) -> NoReturn:
    """Call the function of a request in the forked process. Never returns into the server."""
    prepare_worker()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(out, 1)
    os.dup2(errors, 2)
    os.close(out)
    os.close(errors)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    module, _, name = request["function"].partition(":")
    imported = importlib.import_module(module)
    sys.argv = [imported.__file__ or module, *request["arguments"]]
    getattr(imported, name)()
    raise SystemExit(0)


def _import_modules(channel: int, script: str, modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports many more modules
    if not sys.flags.safe_path:
        del sys.path[0]  # the server's start directory; a worker inserts its own
    if script:
        import_packages_of(script)
        # A fork of a process with threads, or that uses a GPU, may not work. Start without them.
        if threading.active_count() > 1 or torch.cuda.is_initialized():
            command = server_command(channel, "", modules)
            os.execv(command[0], command)


if __name__ == "__main__":
    _import_modules(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        serve(channel)
