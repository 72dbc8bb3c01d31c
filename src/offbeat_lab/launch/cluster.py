"""Slow networks on one Linux machine: network namespaces connected by rate-limited links."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Self

from offbeat import OffbeatError
from offbeat.extend import show_bandwidth

_PREFIX = "offbeat"
_SWITCH_ADDRESS = "10.111.0.254"
_CLONE_NEWNET = 0x40000000
_PACKET_BYTES = 1514
_MOST_OFFLOADED_BYTES = 8192
"""Largest packet that TCP passes to the link (64 kB by default). The filter splits packets that are
larger than its burst, which limited a link of 1 Gbit/s to 0.6 Gbit/s on a busy machine."""


class Cluster:
    """An emulated cluster on this machine, whose links have a limited rate.

    Each node is a network namespace for one worker. A bridge in a further namespace connects the
    nodes. A token bucket filter (``tc … tbf``) limits the rate at both ends of each link. Requires
    root and iproute2.

    A context manager: entering creates the namespaces, leaving removes them.

    Args:
        workers: Number of nodes (1 to 200).
        bits_per_second: Rate of each link in each direction (1e3 to 1e12).
    """

    interface = "link0"
    """Network interface inside each node, for ``GLOO_SOCKET_IFNAME``."""

    def __init__(self, workers: int, bits_per_second: float) -> None:
        if not 1 <= workers <= 200:
            raise ValueError(f"workers must be between 1 and 200, got {workers}")
        require_shapable(bits_per_second)
        self.workers, self.bits_per_second = workers, bits_per_second
        self._name = f"{_PREFIX}-{os.getpid()}"

    @staticmethod
    def why_not() -> str | None:
        """Return why rate-limited links are impossible here, or None if they are possible."""
        if sys.platform != "linux":
            return "network namespaces need Linux"
        if os.geteuid() != 0:
            return "network namespaces need root"
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            return f"{' and '.join(missing)} not found: install iproute2"
        probe = f"{_PREFIX}-{os.getpid()}-probe"
        try:
            _run("ip", "netns", "add", probe)
        except OffbeatError as error:  # e.g. in a container that may not create namespaces
            return str(error)
        finally:
            run_cleanup(lambda: _run("ip", "netns", "delete", probe, check=False))
        return None

    def node(self, rank: int) -> str:
        """Return the name of a node's network namespace."""
        return f"{self._name}-{rank}"

    @property
    def _switch(self) -> str:
        return f"{self._name}-switch"

    def __str__(self) -> str:
        return f"{show_bandwidth(self.bits_per_second)} shaped links"

    def __enter__(self) -> Self:
        reason = self.why_not()
        if reason is not None:
            raise OffbeatError(
                f"no shaped links here: {reason}; simulate them with --simulate, or leave out "
                "--bandwidth"
            )
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _build(self) -> None:
        switch = self._switch
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "address", "add", f"{_SWITCH_ADDRESS}/24", "dev", "bridge0")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        _run("ip", "-n", switch, "link", "set", "lo", "up")
        for rank in range(self.workers):
            node, port = self.node(rank), f"port{rank}"
            _run("ip", "netns", "add", node)
            _run(
                *("ip", "link", "add", self.interface, "netns", node, "type", "veth"),
                *("peer", "name", port, "netns", switch),
            )
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
            _run(
                "ip", "-n", node, "address", "add", f"10.111.0.{rank + 1}/24", "dev", self.interface
            )
            _run("ip", "-n", node, "link", "set", self.interface, "up")
            _run("ip", "-n", node, "link", "set", "lo", "up")
            for namespace, device in ((node, self.interface), (switch, port)):
                size = ("gso_max_size", str(_MOST_OFFLOADED_BYTES))
                _run("ip", "-n", namespace, "link", "set", device, *size)
                self._shape(namespace, device, self.bits_per_second)

    def reshape(self, bits_per_second: float, ranks: Sequence[int] | None = None) -> None:
        """Change the rate of all links, or of those of ``ranks``, even while they are in use."""
        for rank in range(self.workers) if ranks is None else ranks:
            self._shape(self.node(rank), self.interface, bits_per_second, "change")
            self._shape(self._switch, f"port{rank}", bits_per_second, "change")

    def _shape(
        self, namespace: str, device: str, bits_per_second: float, verb: str = "add"
    ) -> None:
        # After an idle time the burst passes at once, so it must be small: four packets or, if that
        # is more, what the link sends in 0.13 ms. A queue of 100 ms is typical of a small switch.
        burst = max(4 * _PACKET_BYTES, int(bits_per_second / 8 * 0.00013))
        _run(
            *("tc", "-n", namespace, "qdisc", verb, "dev", device, "root", "tbf"),
            *("rate", f"{int(bits_per_second)}bit", "burst", str(burst), "latency", "100ms"),
        )

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on node ``rank``."""
        return ["ip", "netns", "exec", self.node(rank), *argv]

    def close(self) -> None:
        """Remove the namespaces and their links. May be called repeatedly."""
        run_cleanup(lambda: _remove(rf"{self._name}-\w+"))


def enter_namespace(name: str) -> None:
    """Move this thread into a network namespace, with the sockets and threads that it will open.

    Raises OffbeatError if that fails.
    """
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OffbeatError(f"cannot enter the network namespace {name}")


def run_cleanup(clean: Callable[[], object]) -> None:
    """Call ``clean``. If Ctrl-C or another exception interrupts it, call it again and re-raise.

    Two calls are enough, because a second Ctrl-C ends the program at once.
    """
    try:
        clean()
    except BaseException:
        clean()
        raise


def require_shapable(bits_per_second: float) -> None:
    """Raise ValueError unless a link can have this rate."""
    if not 1e3 <= bits_per_second <= 1e12:
        raise ValueError(
            "links can be shaped to between 1 kbit/s and 1 Tbit/s, got "
            f"{show_bandwidth(bits_per_second)}"
        )


def remove_leftovers() -> None:
    """Remove the namespaces of clusters whose process ended without removing them."""
    _remove(rf"{_PREFIX}-(\d+)-\w+", lambda match: not os.path.exists(f"/proc/{match[1]}"))


def _remove(pattern: str, condition: Callable[[re.Match[str]], bool] = lambda match: True) -> None:
    for name in _namespaces():
        match = re.fullmatch(pattern, name)
        if match and condition(match):
            _run("ip", "netns", "delete", name, check=False)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _run(*argv: str, check: bool = True) -> str:
    result = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    if check and result.returncode:
        message = " ".join(result.stderr.split())
        raise OffbeatError(f"{' '.join(argv)} failed: {message or result.returncode}")
    return result.stdout


if __name__ == "__main__":
    # For `make demo`: print the option that limits the links to the given rate, if possible.
    reason = Cluster.why_not()
    if reason is not None:
        sys.stderr.write(f"no shaped links here ({reason}): running over loopback\n")
    sys.stdout.write(f"--bandwidth {sys.argv[1]}\n" if reason is None else "")
