"""Heartbeat connections: how they are accepted and closed."""

import contextlib
import errno
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from typing_extensions import override

from offbeat.elastic import heartbeats
from offbeat.elastic.heartbeats import HeartbeatConnections

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Keep the garbage collector from closing descriptors of other tests meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def there() -> Iterator[HeartbeatConnections]:
    """Return the heartbeat connections of a worker to which others connect."""
    made = HeartbeatConnections(100)
    yield made
    made.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def await_dead(here: HeartbeatConnections) -> frozenset[int]:
    """Return the workers that ``here`` finds dead within 10 s."""
    deadline = time.monotonic() + 10
    while not (dead := here.dead()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return dead


def test_any_number_of_connections_can_be_opened_and_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel keeps only a few connections that were not accepted, even if they are closed."""
    monkeypatch.setattr(heartbeats, "_BACKLOG", 2)
    there = HeartbeatConnections(100)
    before = descriptors()
    for _ in range(12):
        here = HeartbeatConnections(100)
        assert here.connect({1: there.address}) == []
        assert there.dead() == set()
        here.close()
    assert there.dead() == set()
    assert descriptors() == before
    there.close()
    assert descriptors() == before - 2  # its listeners


@pytest.mark.parametrize("accepted", [True, False])
def test_connections_end_with_the_worker(there: HeartbeatConnections, accepted: bool) -> None:
    before, here = descriptors(), HeartbeatConnections(100)
    assert here.connect({1: there.address}) == []
    if accepted:
        there.dead()
        there.dead()  # closes what the second port has accepted
        assert descriptors() == before + 4  # the listeners of ``here``, and one socket at each end
    assert here.dead() == set()
    there.close()
    assert await_dead(here) == {1}
    here.close()
    assert descriptors() == before - 2


def test_a_connection_that_was_reset_is_opened_again(there: HeartbeatConnections) -> None:
    """A router may reset it. The end of the worker is noticed nevertheless."""
    here = HeartbeatConnections(100)
    assert here.connect({1: there.address}) == []
    for _ in range(3):
        while len(there._accepted) != 1:  # without that of the second port
            assert there.dead() == set()
        (connection,) = there._accepted
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        there._accepted.clear()
        before = here._sockets[1]
        connection.close()
        del connection
        deadline = time.monotonic() + 10
        while here._sockets[1] is before and time.monotonic() < deadline:
            assert here.dead() == set()
            time.sleep(0.001)
        assert here._sockets[1] is not before
    there.close()
    assert await_dead(here) == {1}
    here.close()


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_port_of_another_process_hides_no_death(
    there: HeartbeatConnections, index: int, data: bytes
) -> None:
    """Whether that one answers or not, and whether this worker has been connected before or not."""
    here, late = HeartbeatConnections(100), HeartbeatConnections(100)
    assert here.connect({1: there.address}) == []
    host, port = there.address.split(", ")[index].split(":")
    there.close()
    with socket.create_server((host, int(port))) as foreign, contextlib.ExitStack() as accepted:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted.enter_context(foreign.accept()[0]).sendall(data)

        answering = threading.Thread(target=answer)
        answering.start()
        assert await_dead(here) == {1}
        assert late.connect({1: there.address}) == [1]
        assert late.refused == {1}
        foreign.shutdown(socket.SHUT_RDWR)
        answering.join()
    here.close()
    late.close()


def test_only_workers_that_return_a_ping_are_reachable(there: HeartbeatConnections) -> None:
    """One waits and returns it, one computes, and one has ended."""
    ended, here, busy = (
        HeartbeatConnections(100),
        HeartbeatConnections(100),
        socket.create_server(("127.0.0.1", 0)),
    )
    ended.close()
    before, done = descriptors(), threading.Event()

    def wait() -> None:
        while not done.is_set():
            assert there.dead() == set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    silent = f"127.0.0.1:{busy.getsockname()[1]}"
    addresses = {1: there.address, 2: silent, 3: ended.address}
    assert here.ping(addresses) == [2, 3]
    done.set()
    waiting.join()
    there.dead()
    assert descriptors() == before
    busy.close()
    here.close()


def test_two_workers_return_their_pings_at_the_same_time(there: HeartbeatConnections) -> None:
    here, found = HeartbeatConnections(100), dict[int, list[int]]()
    deadline = time.monotonic() + 10

    def ping(rank: int, one: HeartbeatConnections, other: HeartbeatConnections) -> None:
        found[rank] = one.ping({1 - rank: other.address})
        while len(found) < 2 and time.monotonic() < deadline:
            one.dead()  # returns the other's ping, which may arrive later

    thread = threading.Thread(target=ping, args=(1, there, here))
    thread.start()
    ping(0, here, there)
    thread.join()
    assert found == {0: [], 1: []}
    here.close()


@pytest.mark.parametrize("seconds", [8, 300, 1e9])
def test_a_silent_machine_is_noticed_within_the_time_limit(
    there: HeartbeatConnections, seconds: float
) -> None:
    """The kernel's limits, and what follows from its error. The worker may come back."""
    here = HeartbeatConnections(seconds)
    assert here.connect({1: there.address}) == []
    (connection,) = here._sockets.values()
    names = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
    idle, interval, count = (connection.getsockopt(socket.IPPROTO_TCP, name) for name in names)
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert min(seconds / 2, 100) <= idle + interval * count <= seconds

    class Failed(socket.socket):
        @override
        def getsockopt(self, *args: Any) -> Any:
            return errno.ETIMEDOUT

    here._sockets[1] = Failed(fileno=connection.detach())
    here._sockets[1].shutdown(socket.SHUT_RDWR)  # so that it is readable
    assert here.dead() == set()
    assert here.silent == {1}
    assert not here.monitors(1)
    assert here.connect({1: there.address}) == []
    assert here.silent == set()
    here.close()
