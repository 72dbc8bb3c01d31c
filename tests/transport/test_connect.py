"""Opening a communicator: the network interface in use, and custom transports."""

import os
import socket
from typing import Any

import pytest
from typing_extensions import override

from offbeat.elastic.heartbeats import HeartbeatConnections
from offbeat.errors import AttachError
from offbeat.transport.connect import open_communicator
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.torch_backend import network_interface
from offbeat.transport.torch_backend.network_interface import (
    choose_interface,
    gloo_address,
    interface_in_use,
)


def name_resolves_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Let the name of this host have these addresses."""
    found = [
        (socket.AF_INET6 if ":" in each else socket.AF_INET, socket.SOCK_STREAM, 0, "", (each, 0))
        for each in addresses
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **named: found)


def test_the_interface_and_its_address_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows there is no fcntl, so the name alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert interface_in_use() == "lo (127.0.0.1; from GLOO_SOCKET_IFNAME)"
    monkeypatch.setattr(network_interface, "fcntl", None)
    assert interface_in_use() == "lo (unknown address; from GLOO_SOCKET_IFNAME)"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    name_resolves_to(monkeypatch, "127.0.3.1")
    assert interface_in_use().startswith("? (127.0.3.1; from the host's name")
    name_resolves_to(monkeypatch, "192.0.2.1")
    assert interface_in_use().startswith("unknown: this host's name does not resolve")


def test_the_address_of_a_worker_is_that_of_the_named_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    name_resolves_to(monkeypatch, "127.0.3.1")
    assert gloo_address() == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert gloo_address() == "127.0.3.1"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_a_name_may_have_addresses_of_other_machines_or_of_ipv6(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """192.0.2.1 is reserved for documentation. Gloo ignores such addresses, too."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    name_resolves_to(monkeypatch, "192.0.2.1")
    assert gloo_address() == "127.0.0.1"
    name_resolves_to(monkeypatch, "192.0.2.1", "::1")
    assert gloo_address() == "::1"
    here, there = HeartbeatConnections(100), HeartbeatConnections(100)
    monkeypatch.undo()
    assert here.connect({1: there.address}) == []
    here.close()
    there.close()


@pytest.mark.parametrize(
    ("name", "store", "expected"),
    [("127.0.1.1", "127.0.0.2", "eth9"), ("127.0.1.1", "127.0.0.1", ""), ("::1", "127.0.0.2", "")],
)
def test_a_name_of_loopback_does_not_select_the_interface(
    monkeypatch: pytest.MonkeyPatch, name: str, store: str, expected: str
) -> None:
    """As in Debian's /etc/hosts. The interface that leads to the store does, if it is another."""

    class Routed(socket.socket):
        @override
        def getsockname(self) -> Any:
            return ("10.1.2.3", 9) if self.getpeername()[0] == "127.0.0.2" else ("127.0.0.1", 9)

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    name_resolves_to(monkeypatch, name)
    monkeypatch.setattr(socket, "socket", Routed)
    addresses = {"lo": "127.0.0.1", "eth9": "10.1.2.3"}
    monkeypatch.setattr(network_interface, "address_of", addresses.get)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth9")])
    choose_interface(store)
    assert os.environ["GLOO_SOCKET_IFNAME"] == expected


@pytest.mark.parametrize("exists", [True, False])
def test_an_interface_without_an_address_is_an_error(
    monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    """Workers on two machines could not reach each other at 127.0.0.1."""
    if exists:
        addresses = {"lo": "127.0.0.1", "wg0": None}
        monkeypatch.setattr(network_interface, "address_of", addresses.get)
        monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "wg0")])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wg0")
    with pytest.raises(AttachError, match=r"GLOO_SOCKET_IFNAME names .* 'wg0', .*here: lo"):
        gloo_address()


class Custom:
    """A transport that returns the given object."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def make_communicator(self, timeout_seconds: float) -> Any:
        return self.made


def test_a_transport_must_return_a_communicator() -> None:
    with pytest.raises(TypeError, match="must return a Communicator, got 3"):
        open_communicator(Custom(3), 5.0, what="a test")


def test_elastic_training_needs_a_membership() -> None:
    with pytest.raises(AttachError, match="a test with min_workers: a SingleCommunicator has no"):
        open_communicator(Custom(SingleCommunicator()), 5.0, what="a test", elastic=True)
