"""The store of a training: its address, and where it listens."""

import socket
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from cli.commands import alive, until
from offbeat.elastic.address import parse_address
from offbeat.errors import OffbeatError
from offbeat.launcher import store as launch_store
from offbeat.launcher.store import await_store, listen, serve
from offbeat.transport.torch_backend.store_access import call_within


def test_addresses() -> None:
    expected = {
        "10.0.0.1:29500": ("10.0.0.1", 29500),
        "node-1:0": ("node-1", 0),
        "::1:29500": ("::1", 29500),
        "[fd99::1]:29500": ("fd99::1", 29500),
        "file:///tmp/store": "/tmp/store",
    }
    assert {text: parse_address(text) for text in expected} == expected


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
    kept = serve(listen("127.0.0.1", 0))
    assert reachable("127.0.0.1", kept.port)
    assert not reachable("127.0.0.2", kept.port)
    everywhere = serve(listen(None, 0))
    assert reachable("127.0.0.1", everywhere.port)
    assert reachable("127.0.0.2", everywhere.port)
    other = serve(listen("127.0.0.2", 0))
    assert not reachable("127.0.0.1", other.port)


def length(number: int) -> bytes:
    return number.to_bytes(8, "little")


@pytest.mark.parametrize("valid", [b"", b"\0\xce\xf7\x85\x3c"], ids=["strange", "valid start"])
def test_a_connection_that_breaks_the_protocol_delays_no_other_one(valid: bytes) -> None:
    """Idle connections, half messages, garbage and lengths that no memory holds."""
    kept = serve(listen("127.0.0.1", 0))
    limit = timedelta(seconds=20)
    client = dist.TCPStore("127.0.0.1", kept.port, None, False, limit)  # type: ignore[attr-defined]
    texts = [b"", b"\0", b"\1", b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01", b"\xff" * 1000]
    texts += [b"\1" + length(size) for size in (100, 3 << 30, 1 << 40, 1 << 63)]
    texts += [b"\1" + length(1) + b"a" + length(3 << 30) + b"half", b"\5" + length(1 << 50)]
    attackers = []
    for number, text in enumerate(texts, 1):
        attackers.append(socket.create_connection(("127.0.0.1", kept.port), 20))
        attackers[-1].sendall(valid + text)
        assert call_within(20, partial(client.add, "key", 1)) == number
    for attacker in attackers:
        attacker.close()
    assert client.get("key") == str(len(texts)).encode()


def test_a_store_that_cannot_be_kept_is_an_error() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OffbeatError, match=rf"at 127.0.0.1:{port}: the port is in use; name"):
            listen("127.0.0.1", port)
        with pytest.raises(OffbeatError, match=rf"at :{port}: the port is in use; name"):
            listen(None, port)
    with pytest.raises(OffbeatError, match=r"at 192.0.2.1:0: .*; name an address of this machine"):
        listen("192.0.2.1", 0)  # reserved for documentation


def test_a_store_is_awaited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The wait has an end."""
    await_store(f"file://{tmp_path}/store")
    with listen("127.0.0.1", 0) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        await_store(address)
    monkeypatch.setattr(launch_store, "_WAIT_SECONDS", 0.3)
    message = rf"no store answers at {address} within 0.3 s \(.* refused\); start one"
    with pytest.raises(OffbeatError, match=message):
        await_store(address)


@pytest.mark.skipif(sys.platform == "win32", reason="needs Linux or macOS")
def test_a_process_that_keeps_a_store_ends_with_its_launcher() -> None:
    """It has answered connections from before its start."""
    launcher = (
        "import multiprocessing, os, sys, time\n"
        "from offbeat.launcher.launch import start_process\n"
        "from offbeat.launcher.store import listen, serve_in_process\n"
        "listener = listen('127.0.0.1', 0)\n"
        "context = multiprocessing.get_context('spawn')\n"
        "process = start_process(context, serve_in_process, listener)\n"
        "print(process.pid, listener.getsockname()[1], flush=True)\n"
        "time.sleep(60)\n"
    )
    argv = [sys.executable, "-c", launcher]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, port = map(int, process.stdout.readline().split())
        client = dist.TCPStore("127.0.0.1", port, None, False)  # type: ignore[attr-defined]
        client.set("key", "value")
        assert client.get("key") == b"value"
        process.kill()
    until(lambda: not alive(pid), "the end of the store", 30)
