"""The store of a training: where the workers of all machines find each other.

It is a ``TCPStore`` of torch. It runs in the process of ``offbeat store``, or in a child process of
``offbeat run``. Only this process imports torch, so the launcher starts without it.
"""

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import time
from datetime import timedelta
from typing import Any

from offbeat.elastic.address import parse_address
from offbeat.errors import OffbeatError
from offbeat.launcher.output import report

_WAIT_SECONDS = 30.0  # longest wait for a store that is being started


def listen(host: str | None, port: int) -> socket.socket:
    """Return a socket that listens for connections to a store.

    Args:
        host: Address or name of this machine. The store listens only on it. None: the store
            listens on all interfaces.
        port: Port. 0 chooses a free one.

    Raises:
        OffbeatError: The address is not one of this machine, or the port is in use.
    """
    try:
        if host is None and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        return socket.create_server(address, family=family)
    except OSError as error:
        reason, advice = error.strerror or str(error), "name an address of this machine"
        if error.errno == errno.EADDRINUSE:
            reason, advice = "the port is in use", "name another port"
        raise OffbeatError(
            f"cannot keep a store at {host or ''}:{port}: {reason}; {advice}"
        ) from None


def serve(listener: socket.socket) -> Any:
    """Return a store that accepts the connections to ``listener``. It lives as long as the result.

    Connections from before this call are accepted, too. Torch's store on libuv never waits for one
    client, and closes connections that do not follow its protocol.
    """
    import torch.distributed as dist

    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows, and restricted systems
        import resource

        # Each connection needs a descriptor. The usual limit is 1024.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    host, port = listener.getsockname()[:2]
    return dist.TCPStore(  # type: ignore[attr-defined]
        "localhost" if host in ("::", "0.0.0.0") else host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_WAIT_SECONDS),
        master_listen_fd=listener.detach(),
    )


def serve_in_process(listener: socket.socket) -> None:
    """Run a store in this child process until the parent process ends."""
    os.setpgid(0, 0)  # Ctrl-C must not end the store: the workers use it while they end
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    kept = serve(listener)
    launcher.join()
    del kept


def store(port: int, host: str | None) -> None:
    """Run a store until SIGINT or SIGTERM; see the command of this name."""
    listener = listen(host, port)
    name = host or socket.gethostname()
    address = f"{f'[{name}]' if ':' in name else name}:{listener.getsockname()[1]}"
    report(f"the store is at {address}")
    report(f"on each machine: offbeat run --store {address} --workers 4 --here 2 train.py")
    ends = {signal.SIGTERM, signal.SIGINT}
    # A background job of a shell script ignores SIGINT, and must continue to ignore it.
    ends = {number for number in ends if signal.getsignal(number) is not signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before the store starts its threads
    kept = serve(listener)
    report(f"{signal.Signals(signal.sigwait(ends)).name}: the store ends")
    del kept


def await_store(address: str) -> None:
    """Wait for the store of another process, at most 30 s. A store in a file needs no process.

    Raises:
        OffbeatError: No store answers.
        ValueError: ``address`` has another form than ``host:port`` or ``file:///path``, or that
            file cannot be created.
    """
    where = parse_address(address)
    if isinstance(where, str):
        if os.path.isdir(where):
            raise ValueError(
                f"{address} is a directory; name a file in it, which may not exist yet"
            )
        if not os.path.isdir(folder := os.path.dirname(where)):
            raise ValueError(f"{address}: the directory {folder} does not exist")
        return
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            return socket.create_connection(where, _WAIT_SECONDS).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise OffbeatError(
                    f"no store answers at {address} within {_WAIT_SECONDS:g} s "
                    f"({error.strerror or error}); start one there with offbeat store"
                ) from None
        time.sleep(0.2)
