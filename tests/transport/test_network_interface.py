"""The line about the network interface in use."""

import pytest

from offbeat.transport.torch_backend import network_interface
from offbeat.transport.torch_backend.network_interface import interface_in_use


def test_the_address_of_a_named_interface_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert interface_in_use("gloo") == "lo (127.0.0.1; from GLOO_SOCKET_IFNAME)"


def test_where_addresses_cannot_be_asked_for_the_name_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Windows there is no fcntl."""
    monkeypatch.setattr(network_interface, "fcntl", None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert interface_in_use("gloo") == "lo (unknown address; from GLOO_SOCKET_IFNAME)"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr("socket.gethostbyname", lambda name: "10.1.2.3")
    assert interface_in_use("gloo").startswith("? (10.1.2.3; from the host's name")
