"""Faults between the workers of a training and its store."""

import contextlib
import socket
import threading
import time

SLOW_BYTES_PER_SECOND = 125_000.0  # 1 Mbit/s


class StoreLink:
    """A proxy in front of a store, whose traffic can be held back or slowed.

    Attributes:
        port: Port of 127.0.0.1 on which the proxy listens.
        bytes_per_second: Rate of each direction of each connection; None: no limit.
    """

    def __init__(self, store_port: int) -> None:
        self._store_port = store_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.bytes_per_second: float | None = None
        self._passes = threading.Event()
        self._passes.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def swallow(self, seconds: float) -> None:
        """Deliver nothing for some seconds, as when packets are lost and sent again. Blocks."""
        self._passes.clear()
        time.sleep(seconds)
        self._passes.set()

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self._store_port))
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, destination: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                self._passes.wait()
                if self.bytes_per_second is not None:
                    time.sleep(len(data) / self.bytes_per_second)
                destination.sendall(data)
        for end in (source, destination):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Intruders:
    """Connections to a store that stay until ``close``, and follow no protocol.

    Args:
        port: Port of the store.
        count: Number of connections.
        data: What each of them sends. For example one zero byte begins a message and does not end
            it.
    """

    def __init__(self, port: int, count: int, data: bytes) -> None:
        self._connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        for connection in self._connections:
            connection.sendall(data)

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()
