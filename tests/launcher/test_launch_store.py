"""The store of a launch: where it listens, and what launchers say in it."""

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from offbeat.elastic.address import parse_address
from offbeat.elastic.gathering import LATEST_TRAINING
from offbeat.elastic.store import SharedStore
from offbeat.errors import CommunicationTimeout, OffbeatError
from offbeat.launcher import store as launch_store
from offbeat.launcher.store import LaunchStore, keep_store, open_store


def never() -> bool:
    return False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.0.0.1:29500", ("10.0.0.1", 29500)),
        ("node-1:0", ("node-1", 0)),
        ("::1:29500", ("::1", 29500)),
        ("file:///tmp/store", "/tmp/store"),
    ],
)
def test_addresses(text: str, expected: object) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("29500", "is host:port, as in 10.0.0.1:29500, or file:///path, got '29500'"),
        (":29500", "got ':29500'"),
        ("node:port", "got 'node:port'"),
        ("node:65536", "got 'node:65536'"),
        ("file://store", "got 'file://store'"),
        ("file://node:1", "got 'file://node:1'"),
    ],
)
def test_wrong_addresses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_address(text)


def reachable(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 2).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_store_listens_on_the_named_address_alone() -> None:
    """127.0.0.2 stands for another interface of the machine."""
    kept = keep_store("127.0.0.1", 0)
    assert kept.port > 0
    assert reachable("127.0.0.1", kept.port)
    assert not reachable("127.0.0.2", kept.port)
    everywhere = keep_store(None, 0)
    assert reachable("127.0.0.1", everywhere.port)
    assert reachable("127.0.0.2", everywhere.port)


def test_a_store_that_cannot_be_kept_is_an_error() -> None:
    kept = keep_store("127.0.0.1", 0)
    with pytest.raises(OffbeatError, match=rf"at 127.0.0.1:{kept.port}: the port is in use; name"):
        keep_store("127.0.0.1", kept.port)
    with pytest.raises(OffbeatError, match=r"at 192.0.2.1:0: .*; name an address of this machine"):
        keep_store("192.0.2.1", 0)  # reserved for documentation


@pytest.fixture(params=["tcp", "file"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LaunchStore, LaunchStore]:
    """The stores of two launchers. The first keeps it, unless it is a file."""
    first = open_store(None if request.param == "tcp" else f"file://{tmp_path}/store")
    return first, open_store(first.address)


def test_launchers_share_the_number_of_workers(two: tuple[LaunchStore, LaunchStore]) -> None:
    first, second = two
    assert first.agree_on_workers("2:4", never)
    assert second.agree_on_workers("2:4", never)
    with pytest.raises(
        ValueError, match=r"--workers 4: the store at .* was begun with --work.* 2:4"
    ):
        second.agree_on_workers("4", never)


def test_the_training_ends_for_every_launcher(two: tuple[LaunchStore, LaunchStore]) -> None:
    """It is remembered when the store has gone."""
    first, second = two
    assert not second.training_has_ended()
    base = launch_store._connect(first.address)
    base.put(LATEST_TRAINING, "one")
    assert not second.training_has_ended()
    base.within("one").put("ended", True)
    assert second.training_has_ended()
    second._connection = None
    second.address = "127.0.0.1:1"
    assert second.training_has_ended()
    base.put(LATEST_TRAINING, "another")
    assert not first.training_has_ended()


def test_a_process_tells_that_it_trains_and_has_finished(
    two: tuple[LaunchStore, LaunchStore],
) -> None:
    """If the store does not answer, it may have finished."""
    first, second = two
    base = launch_store._connect(first.address)
    assert (second.rank_of("process"), second.has_finished("process")) == (None, False)
    base.put("process", ["one", 3, False])
    assert second.rank_of("process") is None
    base.put("process", ["one", 3, True])
    assert (second.rank_of("process"), second.has_finished("process")) == (3, False)
    base.within("one").put("finished/3", True)
    assert second.has_finished("process")
    second._connection = None
    second.address = "127.0.0.1:1"
    assert (second.rank_of("process"), second.has_finished("process")) == (None, True)


def test_a_missing_store_is_awaited(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The wait can be interrupted, has an end, and says what is missing."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    late = LaunchStore(address)
    assert not late.agree_on_workers("4", lambda: True)
    monkeypatch.setattr(launch_store, "_START_SECONDS", 0.3)
    with pytest.raises(CommunicationTimeout, match=rf"no store answers at {address} within 0.3 s"):
        late.agree_on_workers("4", never)
    told = f"offbeat: waiting: no store answers at {address}; start one there with offbeat store\n"
    assert capfd.readouterr().err == told
    kept: Any = keep_store("127.0.0.1", port)
    assert late.agree_on_workers("4", never)
    del kept


def test_a_store_that_hangs_delays_for_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts and does not answer. Workers that run meanwhile are not left alone for long."""
    monkeypatch.setattr(launch_store, "_QUERY_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        store = LaunchStore(f"127.0.0.1:{silent.getsockname()[1]}")
        assert not store.training_has_ended()
        assert time.monotonic() - began < 5


def test_a_lost_connection_is_opened_again() -> None:
    kept = keep_store("127.0.0.1", 0)
    address = f"127.0.0.1:{kept.port}"
    one = LaunchStore(address)
    port = kept.port
    del kept
    assert not one.training_has_ended()
    kept = keep_store("127.0.0.1", port)
    base = SharedStore(kept, "")
    base.put(LATEST_TRAINING, "one")
    base.within("one").put("ended", True)
    assert one.training_has_ended()
    assert isinstance(kept, dist.TCPStore)  # type: ignore[attr-defined]
