"""Connections that end with the process they lead to, and not before."""

import contextlib
import os
import select
import socket
import time
import weakref
from collections.abc import Mapping

from offbeat.transport.network_interface import gloo_address

_CONNECT_SECONDS = 2.0
_BACKLOG = 4096  # connections that nobody accepts; Linux has as many at most


class Lifelines:
    """Whether the processes of other workers still exist.

    A process listens, and accepts nobody: its kernel completes the connections for it, whatever it
    does (computing, stopped), and ends them with it. So this takes no thread, no message and no
    time of anybody. A host that is switched off says nothing; it is silent, not lost.

    Attributes:
        address: Where this process listens, for the others.
    """

    def __init__(self) -> None:
        listener = socket.create_server((gloo_address(), 0), backlog=_BACKLOG)
        host, port = listener.getsockname()
        self.address = f"{host}:{port}"
        self._lines: dict[int, socket.socket] = {}
        self._lost: set[int] = set()
        # However a training ends, this must be given back, without a warning from Python.
        self.close = weakref.finalize(self, _close, listener, self._lines)
        _open.add(self)

    def watch(self, addresses: Mapping[int, str]) -> list[int]:
        """Connect to processes that are alive, by worker; those that cannot be reached.

        A worker that is watched already is left as it is. Takes up to 2 s.
        """
        begun: dict[int, socket.socket] = {}
        missed = []
        for worker, address in addresses.items():
            if self.leads_to(worker):
                continue
            host, _, port = address.rpartition(":")
            line = socket.socket()
            line.setblocking(False)
            with contextlib.suppress(OSError):  # it says so below
                line.connect((host, int(port)))
            begun[worker] = line
        deadline = time.monotonic() + _CONNECT_SECONDS
        for worker, line in begun.items():
            if _connected(line, deadline - time.monotonic()):
                self._lines[worker] = line
            else:
                line.close()
                missed.append(worker)
        return missed

    def leads_to(self, worker: int) -> bool:
        """Whether it is watched, or was until it was lost."""
        return worker in self._lines or worker in self._lost

    def lost(self) -> frozenset[int]:
        """Workers whose process has ended. Costs microseconds."""
        poll = select.poll()
        by_descriptor = {line.fileno(): worker for worker, line in self._lines.items()}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)  # nobody sends anything
        for descriptor, _ in poll.poll(0):
            worker = by_descriptor[descriptor]
            self._lines.pop(worker).close()
            self._lost.add(worker)
        return frozenset(self._lost)


_open: "weakref.WeakSet[Lifelines]" = weakref.WeakSet()


def _close_all() -> None:
    for one in list(_open):
        one.close()


# A child, such as one that loads data, would keep the connections to a process that has died.
os.register_at_fork(after_in_child=_close_all)


def _connected(line: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(line.fileno(), select.POLLOUT)
    poll.poll(max(0.0, 1000 * seconds))
    try:
        line.getpeername()
    except OSError:
        return False
    return True


def _close(listener: socket.socket, lines: dict[int, socket.socket]) -> None:
    listener.close()
    for line in lines.values():
        line.close()
    lines.clear()
