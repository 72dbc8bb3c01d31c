"""Heartbeat connections: sockets that stay open exactly as long as the process at the other end."""

import contextlib
import os
import select
import socket
import time
import weakref
from collections.abc import Mapping

from offbeat.transport.torch_backend.network_interface import gloo_address

_CONNECT_SECONDS = 2.0
_BACKLOG = 4096  # connections that are never accepted; the highest value that Linux takes


class HeartbeatConnections:
    """Detects that the process of another worker has ended.

    Each process listens on a port and never accepts. Its kernel completes the connections whether
    the process computes or is stopped, and closes them when the process ends. So no thread, no
    message and no computing time is needed. A host that loses power or network does not close its
    connections: its worker is silent, not dead.

    Attributes:
        address: Address on which this process listens, as ``host:port``.
    """

    def __init__(self) -> None:
        listener = socket.create_server((gloo_address(), 0), backlog=_BACKLOG)
        host, port = listener.getsockname()
        self.address = f"{host}:{port}"
        self._sockets: dict[int, socket.socket] = {}
        self._dead: set[int] = set()
        # Closes the sockets however the training ends, without a ResourceWarning.
        self.close = weakref.finalize(self, _close, listener, self._sockets)
        _instances.add(self)

    def connect(self, addresses: Mapping[int, str]) -> list[int]:
        """Connect to processes, given by worker, and return the workers that cannot be reached.

        Skips the workers that are already monitored. Blocks for at most 2 s.
        """
        attempts: dict[int, socket.socket] = {}
        unreachable = []
        for worker, address in addresses.items():
            if self.monitors(worker):
                continue
            host, _, port = address.rpartition(":")
            connection = socket.socket()
            connection.setblocking(False)
            with contextlib.suppress(OSError):  # the result is checked below
                connection.connect((host, int(port)))
            attempts[worker] = connection
        deadline = time.monotonic() + _CONNECT_SECONDS
        for worker, connection in attempts.items():
            if _connected(connection, deadline - time.monotonic()):
                self._sockets[worker] = connection
            else:
                connection.close()
                unreachable.append(worker)
        return unreachable

    def monitors(self, worker: int) -> bool:
        """Return True if the worker is monitored, or was until it died."""
        return worker in self._sockets or worker in self._dead

    def dead(self) -> frozenset[int]:
        """Return the workers whose process has ended. Takes microseconds."""
        poll = select.poll()
        by_descriptor = {one.fileno(): worker for worker, one in self._sockets.items()}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)  # readable only at its end: no data is sent
        for descriptor, _ in poll.poll(0):
            worker = by_descriptor[descriptor]
            self._sockets.pop(worker).close()
            self._dead.add(worker)
        return frozenset(self._dead)


_instances: "weakref.WeakSet[HeartbeatConnections]" = weakref.WeakSet()


def _close_all() -> None:
    for one in list(_instances):
        one.close()


# A forked child, such as a data loader's, would keep the sockets of a dead parent open.
os.register_at_fork(after_in_child=_close_all)


def _connected(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLOUT)
    poll.poll(max(0.0, 1000 * seconds))
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def _close(listener: socket.socket, connections: dict[int, socket.socket]) -> None:
    listener.close()
    for connection in connections.values():
        connection.close()
    connections.clear()
