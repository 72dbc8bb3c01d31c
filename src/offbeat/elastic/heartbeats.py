"""Heartbeat connections: sockets that are closed when the process at the other end ends.

When a process ends, the kernel of its machine closes its sockets, and the workers at the other ends
notice that. The kernels also exchange TCP keep-alive probes, which show that a machine or the
network is down. A *ping* is a byte on a separate connection, which the other process sends back.
It shows that data arrive in both directions.
"""

import contextlib
import errno
import os
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from offbeat.errors import AttachError
from offbeat.transport.torch_backend.network_interface import gloo_address

_CONNECT_SECONDS = 2.0  # time limit for opening a connection
_PING = b"?"
_POLL_SECONDS = 0.01  # interval between checks for returned pings
_PROBES = 3  # unanswered keep-alive probes after which a connection has failed
_BACKLOG = 4096  # number of connections that may wait to be accepted; the default maximum of Linux


class HeartbeatConnections:
    """Detects that the processes of other workers have ended.

    Each process listens on two ports. The kernel completes connections to them even while the
    process computes or is suspended, and closes them when the process ends, whether the process has
    accepted them or not. So neither threads nor messages are needed. A process lives if both ports
    accept connections: after its end another process may receive one of them, but hardly both.

    ``dead`` returns pings. It also accepts connections, because at most ``_BACKLOG`` of them can
    wait. A machine that loses power or its network closes no connections, so its workers are not
    dead but ``silent``.

    Args:
        timeout_seconds: A worker without power or network is ``silent`` after about 7/8 of this
            time, and after at least 4 s.

    Attributes:
        silent: Workers whose kernel has not answered. They are not monitored any more, but may live
            on the other side of a divided network.
        address: Addresses on which this process listens, as ``host:port, host:port``.
        refused: Workers with a port that refused a connection. Their processes have ended, unless
            the address leads elsewhere or a firewall has refused.
        close: Function that closes all sockets of this object. Also called when this object is
            garbage-collected, and at exit.

    Raises:
        AttachError: On Windows, which lacks ``select.poll``.
    """

    def __init__(self, timeout_seconds: float) -> None:
        if sys.platform == "win32":
            raise AttachError("elastic training needs Linux or macOS; unset OFFBEAT_STORE")
        self._timeout_seconds = timeout_seconds
        self._addresses: dict[int, str] = {}
        self._checking = threading.Lock()
        self._sockets: dict[int, socket.socket] = {}
        self._accepted: set[socket.socket] = set()  # connections of other workers to this one
        self._dead: set[int] = set()
        self.refused: set[int] = set()
        self.silent: set[int] = set()
        with _accepting:
            host = gloo_address()
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listeners = [
                socket.create_server((host, 0), family=family, backlog=_BACKLOG) for _ in range(2)
            ]
            self.close = weakref.finalize(
                self, _close, self._listeners, self._sockets, self._accepted
            )
            _instances.add(self)
        for listener in self._listeners:
            listener.setblocking(False)
        self.address = ", ".join(f"{host}:{one.getsockname()[1]}" for one in self._listeners)

    def connect(self, addresses: Mapping[int, str]) -> list[int]:
        """Connect to other workers, and return those that cannot be reached.

        Blocks for at most about 2 s.

        Args:
            addresses: ``address`` of each worker, by identity (number of the worker).
        """
        new = {w: address for w, address in addresses.items() if not self.monitors(w)}
        opened, refused = _open(new)
        for connection in opened.values():
            _probe(connection, self._timeout_seconds)
        self._addresses.update(new)
        self._sockets.update(opened)
        self.silent.difference_update(opened)
        self.refused |= refused
        return [worker for worker in new if worker not in opened]

    def monitors(self, worker: int) -> bool:
        """Return True if ``connect`` has reached the worker, even if that worker has died since."""
        return worker in self._sockets or worker in self._dead

    def dead(self) -> frozenset[int]:
        """Return the monitored workers that have ended or have called ``close``.

        If a connection was closed or reset, opens another one, and blocks meanwhile: a router may
        have reset it. A worker that has ended refuses the new connection.
        """
        self._accept()
        with self._checking:
            # Other threads may close sockets at the same time.
            sockets = list(self._sockets.items())
            readable = _readable([*self._accepted, *(socket_ for _, socket_ in sockets)])
            closed = {socket_ for socket_ in readable if not self._returns_ping(socket_)}
            lost = {worker: _error_of(socket_) for worker, socket_ in sockets if socket_ in closed}
            for worker in lost:
                self._sockets.pop(worker, None)
            for socket_ in closed:
                self._accepted.discard(socket_)
                socket_.close()
            ended = [worker for worker in lost if lost[worker] in (0, errno.ECONNRESET)]
            self.silent.update(lost.keys() - ended)
            for worker in ended:  # one by one: no thread can be started while Python exits
                self._dead.update(self.connect({worker: self._addresses[worker]}))
        return frozenset(self._dead)

    def ping(self, addresses: Mapping[int, str]) -> list[int]:
        """Return the workers that do not return a ping; see ``connect``. Blocks for at most 4 s.

        A worker returns pings while it waits for others, but not while it computes or is suspended.
        """
        opened, _ = _open(addresses)
        answered, deadline = set[int](), time.monotonic() + _CONNECT_SECONDS
        for connection in opened.values():
            connection.setblocking(False)
            with contextlib.suppress(OSError):  # the other end has closed it
                connection.send(_PING)
        while len(answered) < len(opened) and time.monotonic() < deadline:
            self.dead()  # returns the pings of the others
            answered.update(w for w, connection in opened.items() if _received(connection))
            time.sleep(_POLL_SECONDS)
        for connection in opened.values():
            connection.close()
        return [worker for worker in addresses if worker not in answered]

    def _returns_ping(self, connection: socket.socket) -> bool:
        """Return a ping that has arrived. False if the other end has closed the connection."""
        if connection not in self._accepted or not _received(connection):
            return False
        with contextlib.suppress(OSError):
            connection.send(_PING)
        return True

    def _accept(self) -> None:
        """Accept all connections that wait. Never blocks."""
        for listener in self._listeners:
            # accept() fails if no more wait, too many files are open, or the listener is closed.
            with _accepting, contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.setblocking(False)
                    self._accepted.add(connection)
                    if listener.fileno() < 0:  # another thread has called close() meanwhile
                        self._accepted.discard(connection)
                        connection.close()


def _received(connection: socket.socket) -> bytes:
    """Return what a non-blocking connection has received; nothing if it is closed."""
    try:
        return connection.recv(len(_PING))
    except OSError:
        return b""


def _readable(sockets: Iterable[socket.socket]) -> set[socket.socket]:
    """Return those ``sockets`` that have received data or whose other end is closed."""
    poll = select.poll()
    by_descriptor = {socket_.fileno(): socket_ for socket_ in sockets}
    by_descriptor.pop(-1, None)  # another thread has closed this socket just now
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return {by_descriptor[descriptor] for descriptor, _ in poll.poll(0)}


def _error_of(connection: socket.socket) -> int:
    """Return the error number of a connection, 0 if the other end has closed it."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    except OSError:  # another thread has closed it just now
        return 0


def _probe(connection: socket.socket, seconds: float) -> None:
    """Let the kernel send probes, so that the connection fails if none is answered in time."""
    idle = getattr(socket, "TCP_KEEPIDLE", 0x10)  # macOS has another name for it
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, share in ((idle, 1 / 2), (socket.TCP_KEEPINTVL, 1 / 8)):
        connection.setsockopt(socket.IPPROTO_TCP, option, min(max(1, int(share * seconds)), 30000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


_instances: "weakref.WeakSet[HeartbeatConnections]" = weakref.WeakSet()
_accepting = threading.RLock()
"""Held to create or accept a socket, and during a fork, so that a child closes every socket."""


def _close_all() -> None:
    for instance in list(_instances):
        instance.close()
    _accepting.release()


# A forked child, such as a process of a DataLoader, inherits the sockets. Unless it closes them,
# they stay open after the death of its parent.
if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(
        before=_accepting.acquire, after_in_parent=_accepting.release, after_in_child=_close_all
    )


def _open(addresses: Mapping[int, str]) -> tuple[dict[int, socket.socket], set[int]]:
    """Return new connections to those workers that can be reached, and the workers that refused."""

    def connect_to(address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), _CONNECT_SECONDS)

    def connect(address: str) -> socket.socket | OSError:
        first, *others = address.split(", ")
        try:
            for other in others:
                connect_to(other).close()
            return connect_to(first)
        except OSError as error:
            return error

    if len(addresses) > 1:
        with ThreadPoolExecutor(len(addresses)) as pool:
            results = dict(zip(addresses, pool.map(connect, addresses.values()), strict=True))
    else:
        results = {worker: connect(address) for worker, address in addresses.items()}
    opened = {w: result for w, result in results.items() if isinstance(result, socket.socket)}
    return opened, {
        w for w, result in results.items() if isinstance(result, ConnectionRefusedError)
    }


def _close(
    listeners: Iterable[socket.socket],
    connections: dict[int, socket.socket],
    accepted: set[socket.socket],
) -> None:
    for one in [*listeners, *connections.values(), *accepted]:
        one.close()
    connections.clear()
    accepted.clear()
