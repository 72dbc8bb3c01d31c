"""Proxies in front of the store and of each worker, which delay, halve, swallow or cut traffic.

A worker reaches the store through a port of its own. The proxy behind that port replaces the
addresses of other workers that the worker reads, those of gloo and of heartbeats, by the addresses
of proxies. So the proxies see all connections between workers. Of two workers, gloo lets the one
with the larger address connect to the other. So only that one receives the address of a proxy,
which is smaller than all real ones.
"""

import asyncio
import contextlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self

from offbeat.launcher import store

Kind = Literal["delay", "halve", "swallow", "cut", "refuse"]
KINDS: tuple[Kind, ...] = ("delay", "halve", "swallow", "cut", "refuse")
TARGETS = ("store", "peers", "both")
DELAY_SECONDS = 0.01
# The length of gloo's address and its first part, a sockaddr_in. The rest is uninitialised memory.
_IN_GLOO = re.compile(rb"(\x88\x00{7}\x02\x00)(..)(\x7f\x00\x00\x01)", re.DOTALL)
_IN_TEXT = re.compile(rb"127\.0\.0\.1:(\d+)")
_LOW_PORTS = range(10000, 32768)  # below those that the kernel chooses


@dataclass(frozen=True)
class Fault:
    """What happens to the traffic of one worker, from some time on.

    Attributes:
        kind: "delay": each piece of data arrives ``DELAY_SECONDS`` later. "halve": half of the next
            piece arrives on each connection, and nothing more. "swallow": nothing arrives, also not
            the end of a connection. "cut": all connections are reset once. "refuse": they are
            reset, and new ones, too.
        worker: Index of the worker.
        target: "store", "peers" (connections of gloo and heartbeats) or "both".
        after: Number of pieces that pass unharmed before the fault begins.
    """

    kind: Kind
    worker: int
    target: str
    after: int = 0


class _Connection:
    """A connection through a proxy: two streams, and the workers whose traffic it is."""

    def __init__(self, workers: frozenset[int], target: str) -> None:
        self.workers, self.target = workers, target
        self.writers: list[asyncio.StreamWriter] = []

    def reset(self) -> None:
        for writer in self.writers:
            end = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Links:
    """The store and all proxies of one training, in a thread. A context manager.

    Attributes:
        ports: Port of the store for each worker.
        control: Port at which ``inject`` of another process asks for a fault.
        begun: Time at which the fault began, by ``time.monotonic``; None before.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._store_port = self._listener.getsockname()[1]
        self._store = store.serve(self._listener)
        self.ports: list[int] = []
        self.control = 0
        self.begun: float | None = None
        self._fault: Fault | None = None
        self._owners: dict[int, int] = {}  # port → worker
        self._gloo_port: dict[int, int] = {}  # of the newest group of each worker
        self._proxies: dict[tuple[int, int], int] = {}
        self._making = asyncio.Lock()
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(10)
        return self

    def __exit__(self, *exception: object) -> None:
        async def close() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for server in self._servers:
                server.close()
            for connection in [*self._connections]:
                connection.reset()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        self._servers: list[Any] = []
        control = await self._listen("127.0.0.1", 0, self._inject)
        self.control = control
        for worker in range(self._workers):

            async def accept(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, worker: int = worker
            ) -> None:
                connection = _Connection(frozenset({worker}), "store")
                await self._relay(connection, reader, writer, self._store_port, worker)

            self.ports.append(await self._listen("127.0.0.1", 0, accept))

    async def _listen(self, host: str, port: int, accept: Any) -> int:
        server = await asyncio.start_server(accept, host, port)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _inject(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault = Fault(**json.loads(await reader.readline()))
        self._fault, self._left = fault, fault.after
        if not fault.after:
            self._begin()
        writer.write(b"done\n")
        await writer.drain()
        writer.close()

    def _begin(self) -> None:
        fault = self._fault
        assert fault is not None
        self.begun = asyncio.get_running_loop().time()
        if fault.kind in ("cut", "refuse"):
            for connection in [*self._connections]:
                if self._hits(connection):
                    connection.reset()

    def _hits(self, connection: _Connection) -> bool:
        fault = self._fault
        return (
            fault is not None
            and fault.worker in connection.workers
            and fault.target in (connection.target, "both")
        )

    def _strikes(self, connection: _Connection) -> Kind | None:
        """Return what happens to a new piece of data, None if nothing does."""
        fault = self._fault
        if fault is None or not self._hits(connection):
            return None
        if self._left:
            self._left -= 1
            return None
        if self.begun is None:
            self._begin()
        return fault.kind

    async def _relay(
        self,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        port: int,
        worker: int,
    ) -> None:
        """Connect an accepted connection of ``worker`` to a port of 127.0.0.1."""
        connection.writers.append(writer)
        self._connections.add(connection)
        fault = self._fault
        try:
            if fault is not None and self.begun is not None and self._hits(connection):
                if fault.kind == "refuse":
                    connection.reset()
                    return
                if fault.kind == "swallow":
                    while await reader.read(2**16):
                        pass
                    await asyncio.Event().wait()
            try:
                there, back = await asyncio.open_connection("127.0.0.1", port)
            except OSError:  # the process behind the port has ended
                connection.reset()
                return
            connection.writers.append(back)
            for one in (writer, back):
                one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stores = connection.target == "store"
            await asyncio.gather(
                self._pump(connection, reader, back, self._up(worker) if stores else None),
                self._pump(connection, there, writer, self._down(worker) if stores else None),
            )
        except (asyncio.CancelledError, OSError):
            connection.reset()
        finally:
            self._connections.discard(connection)
            for one in connection.writers:
                one.transport.abort()

    async def _pump(
        self,
        connection: _Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        change: Any,
    ) -> None:
        """Forward what ``reader`` receives, as the fault has it, until the other end closes."""
        halved = False
        while data := await reader.read(2**20):
            if change is not None:
                data = await change(data)
            kind = self._strikes(connection)
            if kind == "swallow" or halved:
                continue
            if kind == "halve":
                data, halved = data[: len(data) // 2], True
            elif kind == "delay":
                await asyncio.sleep(DELAY_SECONDS)
            writer.write(data)
            await writer.drain()
        if halved or (self._hits(connection) and self._strikes(connection) == "swallow"):
            await asyncio.Event().wait()
        with contextlib.suppress(OSError):
            writer.write_eof()

    def _up(self, worker: int) -> Any:
        async def note(data: bytes) -> bytes:
            for match in _IN_GLOO.finditer(data):
                self._gloo_port[worker] = _port(match)
                self._owners.setdefault(_port(match), worker)
            for match in _IN_TEXT.finditer(data):
                self._owners.setdefault(int(match[1]), worker)
            return data

        return note

    def _down(self, worker: int) -> Any:
        async def replace(data: bytes) -> bytes:
            for match in _IN_GLOO.finditer(data):
                port = _port(match)
                own = _order(self._gloo_port.get(worker, 0))
                if self._owners.get(port) != worker and _order(port) < own:
                    smaller = (free for free in _LOW_PORTS if _order(free) < own)
                    seen = await self._proxy(worker, port, "127.0.0.1", smaller)
                    changed = match[1] + struct.pack("!H", seen) + match[3]
                    data = data.replace(match[0], changed)
            for match in _IN_TEXT.finditer(data):
                port = int(match[1])
                if self._owners.get(port) != worker:
                    host = f"127.0.0.{worker + 2}"  # as long as 127.0.0.1
                    await self._proxy(worker, port, host, [port])
                    data = data.replace(match[0], f"{host}:{port}".encode())
            return data

        return replace

    async def _proxy(self, worker: int, port: int, host: str, free: Iterable[int]) -> int:
        """Return the port on ``host``, one of ``free``, of the proxy that leads to ``port``."""
        async with self._making:
            for candidate in free if (worker, port) not in self._proxies else ():
                with contextlib.suppress(OSError):
                    await self._listen(host, candidate, self._accept_peer(worker, port))
                    self._proxies[worker, port] = candidate
                    break
        return self._proxies[worker, port]

    def _accept_peer(self, worker: int, port: int) -> Any:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = _Connection(frozenset({worker, self._owners[port]}), "peers")
            await self._relay(connection, reader, writer, port, worker)

        return accept


def _port(match: re.Match[bytes]) -> int:
    return int(struct.unpack("!H", match[2])[0])


def _order(port: int) -> int:
    """Return the number by which gloo compares ports: it does not convert their byte order."""
    return socket.ntohs(port)


def inject(control: int, fault: Fault) -> None:
    """Let the ``Links`` whose control port this is begin a fault, and wait until it has."""
    with socket.create_connection(("127.0.0.1", control), 10) as connection:
        connection.sendall(json.dumps(vars(fault)).encode() + b"\n")
        assert connection.recv(100) == b"done\n"
