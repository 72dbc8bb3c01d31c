"""Opening a communicator: the network interface in use, and custom transports."""

import socket
from typing import Any

import pytest

from offbeat.errors import AttachError
from offbeat.transport.connect import open_communicator
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.torch_backend import network_interface
from offbeat.transport.torch_backend.network_interface import gloo_address, interface_in_use


def test_the_interface_and_its_address_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows there is no fcntl, so the name alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert interface_in_use("gloo") == "lo (127.0.0.1; from GLOO_SOCKET_IFNAME)"
    monkeypatch.setattr(network_interface, "fcntl", None)
    assert interface_in_use("gloo") == "lo (unknown address; from GLOO_SOCKET_IFNAME)"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr("socket.gethostbyname", lambda name: "10.1.2.3")
    assert interface_in_use("gloo").startswith("? (10.1.2.3; from the host's name")


def test_the_address_of_a_worker_is_that_of_the_named_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    monkeypatch.setattr("socket.gethostbyname", lambda name: "10.1.2.3")
    assert gloo_address() == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert gloo_address() == "10.1.2.3"


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
