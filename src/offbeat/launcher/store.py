"""The store of a launch: where the workers of all machines find each other.

It runs in the launcher of a training on one machine, or in ``offbeat store``, or it is a file.
Launchers use these keys:

- ``offbeat/launch/workers``: the first launcher's ``--workers``, such as ``"2:4"``;
- ``offbeat/launch/process/<name>``: key prefix of the training, and rank, of a process, and whether
  it trains yet.
"""

import errno
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from offbeat.elastic.address import parse_address
from offbeat.elastic.gathering import training_has_ended
from offbeat.elastic.store import SharedStore, connect_to_store
from offbeat.errors import CommunicationTimeout, OffbeatError
from offbeat.launcher.output import report
from offbeat.transport.torch_backend.store_access import call_within

T = TypeVar("T")
_WORKERS = "offbeat/launch/workers"
_START_SECONDS = 300.0  # longest wait for the store
_QUERY_SECONDS = 3.0  # longest wait for an answer while workers are running
_POLL_SECONDS = 0.2  # time between two reads of a key


def keep_store(host: str | None, port: int) -> Any:
    """Start a store in this process, and return it. It lives as long as the returned object.

    Args:
        host: Address or name of this machine, on which alone the store listens. None: the store
            listens on all interfaces.
        port: Port. 0 chooses a free one.

    Raises:
        OffbeatError: The address is not one of this machine, or the port is in use.
    """
    try:
        listener = _listen(host, port)
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "name an address of this machine"
        if error.errno == errno.EADDRINUSE:
            reason, advice = "the port is in use", "name another port"
        where = f"{'' if host is None else host}:{port}"
        raise OffbeatError(f"cannot keep a store at {where}: {reason}; {advice}") from None
    return dist.TCPStore(  # type: ignore[attr-defined]
        host or "localhost",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_QUERY_SECONDS),
        master_listen_fd=listener.detach(),
        use_libuv=False,  # the other implementation does not take a socket
    )


def _listen(host: str | None, port: int) -> socket.socket:
    if host is None and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    family, _, _, _, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[
        0
    ]
    return socket.create_server(address, family=family)


class LaunchStore:
    """A launcher's access to the store.

    No method but ``agree_on_workers`` blocks for more than a few seconds, because workers run
    meanwhile. If the store does not answer, the next call connects again.

    Args:
        address: Address of the store, as in ``OFFBEAT_STORE``.
        kept: The store (``torch.distributed``), if this process keeps it.

    Attributes:
        address: See above.
    """

    def __init__(self, address: str, kept: Any = None) -> None:
        self.address = address
        self._kept = None if kept is None else SharedStore(kept, address)
        self._connection = self._kept
        self._training_ended = False

    def agree_on_workers(self, workers: str, interrupted: Callable[[], bool]) -> bool:
        """Wait for the store, and require that all its launchers have the same ``--workers``.

        Args:
            workers: Number given to this launcher, such as ``"4"`` or ``"2:4"``.
            interrupted: Function that returns True to end the wait.

        Returns:
            False if the wait was interrupted.

        Raises:
            ValueError: Another launcher has another number.
            CommunicationTimeout: The store does not answer within 5 minutes.
        """
        deadline = time.monotonic() + _START_SECONDS
        reported = False
        while (found := self._query(partial(_put_workers, workers=workers))) is None:
            if interrupted():
                return False
            missing = f"no store answers at {self.address}"
            if time.monotonic() > deadline:
                raise CommunicationTimeout(f"{missing} within {_START_SECONDS:g} s")
            if not reported:
                report(f"waiting: {missing}; start one there with offbeat store")
                reported = True
            time.sleep(_POLL_SECONDS)
        if workers != found:
            raise ValueError(
                f"--workers {workers}: the store at {self.address} was begun with --workers "
                f"{found}; give the same number on all machines, or name another store"
            )
        return True

    def training_has_ended(self) -> bool:
        """Return True if the training at this store has ended. False also if that is unknown."""
        if not self._training_ended:
            self._training_ended = bool(self._query(lambda store: training_has_ended(store.store)))
        return self._training_ended

    def rank_of(self, process: str) -> int | None:
        """Return the rank with which a process trains. None if it does not, or that is unknown.

        ``process`` is the value of its ``OFFBEAT_REPORT``.
        """
        place = self._query(lambda store: store.get(process))
        return int(place[1]) if place is not None and place[2] else None

    def report_death(self, process: str) -> None:
        """Tell the others that a process has left the training, if it had come to it.

        They notice that its connections are closed. But workers that start after the death of all
        have no connection to it, and would wait for a while for an answer.
        """

        def write(store: SharedStore) -> None:
            if (place := store.get(process)) is not None:
                store.put(f"{place[0]}/left/{place[1]}", True)

        self._query(write)

    def has_finished(self, process: str) -> bool:
        """Return True if a process has finished the training.

        True also if that is unknown, so that no failure is hidden.
        """

        def find(store: SharedStore) -> bool:
            place = store.get(process)
            return place is not None and store.get(f"{place[0]}/finished/{place[1]}") is not None

        return self._query(find) is not False

    def _query(self, function: Callable[[SharedStore], T]) -> T | None:
        """Call ``function`` with the store. Returns None if the store does not answer in time."""
        try:
            if self._connection is None:
                self._connection = _connect(self.address)
            return call_within(_QUERY_SECONDS, partial(function, self._connection))
        except (RuntimeError, OSError):
            self._connection = self._kept
            return None


def open_store(address: str | None) -> LaunchStore:
    """Return access to the store at ``address``. None: this process keeps one on loopback."""
    if address is not None:
        return LaunchStore(address)
    kept = keep_store("127.0.0.1", 0)
    return LaunchStore(f"127.0.0.1:{kept.port}", kept)


def _put_workers(store: SharedStore, workers: str) -> str:
    return str(store.put_if_absent(_WORKERS, workers))


def _connect(address: str) -> SharedStore:
    """Connect to a store. Raises OSError or RuntimeError if that fails within 3 s."""
    where = parse_address(address)
    if not isinstance(where, str):
        # Without a store, TCPStore would write a warning for each of its attempts.
        socket.create_connection(where, _QUERY_SECONDS).close()
    return connect_to_store(address, _QUERY_SECONDS, what="launching failed")
