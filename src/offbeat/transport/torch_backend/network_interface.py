"""Finds the network interface and the address over which gloo communicates.

They are shown to the user, because a wrong interface is a frequent reason for slow communication.
"""

import contextlib
import os
import socket
import struct
import sys
from types import ModuleType

from offbeat.errors import AttachError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # on Windows, where this module does not find addresses of interfaces
    fcntl = None

# Number of the request for the IPv4 address of an interface: on Linux, and on macOS and BSD.
_SIOCGIFADDR = 0x8915 if sys.platform == "linux" else 0xC0206921


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of a network interface; None if it has none, or on Windows."""
    if fcntl is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:  # an interface without an IPv4 address
            return None


def gloo_address() -> str:
    """Return the address to which gloo binds.

    Without ``GLOO_SOCKET_IFNAME`` it is the first address of this machine to which the host's name
    resolves, or 127.0.0.1 if there is none.

    Raises:
        AttachError: ``GLOO_SOCKET_IFNAME`` names an interface without an IPv4 address.
    """
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not named:
        return _address_of_name() or "127.0.0.1"
    if address := address_of(named):
        return address
    usable = [name for _, name in socket.if_nameindex() if address_of(name)]
    raise AttachError(
        f"GLOO_SOCKET_IFNAME names the network interface {named!r}, which does not exist or has "
        f"no IPv4 address: name an interface with one (here: {', '.join(usable) or 'none found'})"
    )


def _address_of_name() -> str | None:
    """Return the first address of the host's name to which a socket can be bound; None if none."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM)
        for family, kind, _, _, address in found:
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(address)
                return str(address[0])
    return None


def choose_interface(host: str) -> None:
    """Set ``GLOO_SOCKET_IFNAME`` to the interface that leads to ``host``, if it is needed.

    Debian's /etc/hosts has 127.0.1.1 for the host's name, which other machines cannot reach. Does
    nothing if the variable is set, if the name has another address, or with IPv6.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME") or not gloo_address().startswith("127."):
        return
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if address_of(name) == address and not address.startswith("127."):
                os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_in_use() -> str:
    """Return a text for logs: the interface of gloo, its address, and what selected it.

    For example ``eth0 (10.0.0.1; from GLOO_SOCKET_IFNAME)``. The environment variable
    ``GLOO_SOCKET_IFNAME`` selects the interface. Without it, gloo uses the address to which this
    host's name resolves.
    """
    variable = "GLOO_SOCKET_IFNAME"
    named = os.environ.get(variable)
    if named:
        where = "unknown address" if fcntl is None else address_of(named) or "no IPv4 address"
        return f"{named} ({where}; from {variable})"
    if (address := _address_of_name()) is None:
        return f"unknown: this host's name does not resolve to its address (set {variable})"
    owner = next((n for _, n in socket.if_nameindex() if address_of(n) == address), "?")
    return f"{owner} ({address}; from the host's name, {variable} is not set)"
