"""Joining: a new process becomes a worker of an elastic training that is already running.

A *view* is one composition of the workers, its *members*. The members communicate through the
store of their ``torch.distributed`` process group. The new process connects to this store, writes
its address, and waits until the members have decided on a view that contains it.
"""

import os
import time
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from offbeat.elastic.agreement import SILENCE_SECONDS, Agreement, Decision
from offbeat.elastic.heartbeats import HeartbeatConnections
from offbeat.elastic.membership import Participant
from offbeat.elastic.store import SharedStore
from offbeat.errors import AttachError, CommunicationError, CommunicationTimeout
from offbeat.transport.communicator import Communicator, Transport
from offbeat.transport.membership import View
from offbeat.transport.torch_backend.store_access import call_within

LATEST_TRAINING = "offbeat/elastic"
"""Key in the store. Its value is the key prefix of the training that began last."""
_POLL_SECONDS = 0.05  # time between two reads of the store
_CONNECT_SECONDS = 30.0  # longest wait for a connection to the store
_MARGIN_SECONDS = 1.0  # delay with which torch may raise its time-out error
_ATTEMPTS = 2  # attempts to join; each failed attempt costs the members one view change


def join(address: str | None = None) -> Transport:
    """Return the ``group`` argument of ``attach`` with which a new worker joins a running training.

    The workers of the running training must have passed ``min_workers`` to ``attach``. The new
    process does not call ``init_process_group``. Its ``attach`` blocks until the other workers
    admit the process, usually at the beginning of their next optimizer step. It raises
    ``CommunicationTimeout`` if this takes longer than ``timeout_seconds``. If several trainings use
    the store, the new worker joins the training that began last.

    Args:
        address: Address of the store of the running training's process group, as ``host:port`` or
            ``file://path``. None uses the environment variables ``MASTER_ADDR`` and
            ``MASTER_PORT``.

    Raises:
        ValueError: ``address`` has another form, or is None and a variable is not set.
    """
    if address is None:
        variables = "MASTER_ADDR", "MASTER_PORT"
        if missing := [name for name in variables if not os.environ.get(name)]:
            raise ValueError(
                f"join() needs the address of the store, as in join('10.0.0.1:29500'), or "
                f"{' and '.join(missing)} in the environment"
            )
        address = ":".join(os.environ[name] for name in variables)
    host, _, port = address.rpartition(":")
    if not address.startswith("file://") and not (host and port.isdecimal()):
        raise ValueError(f"the address of a store is host:port or file://path, got {address!r}")
    return Newcomer(address)


class Newcomer(Transport):
    """Transport (factory of communicators) of a worker that joins a running training.

    ``address`` is that of the store, as in ``join``.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        """Ask to join, and return a communicator once the members have admitted this worker.

        Raises:
            AttachError: The training has ended.
            CommunicationError: The store cannot be reached, the members cannot connect to this
                process, or the view could not be opened.
            CommunicationTimeout: Within ``timeout_seconds`` no training began at the store, or its
                members did not admit this worker.
        """
        deadline = time.monotonic() + timeout_seconds
        root = SharedStore(self._open_store(timeout_seconds), self._address)
        for _ in range(_ATTEMPTS):
            store = root.within(self._await_training(root, deadline, timeout_seconds))
            heartbeats = HeartbeatConnections()
            try:
                worker = store.call(partial(_take_identity, store, heartbeats), "joining failed")
                agreement = Agreement(
                    worker,
                    store,
                    heartbeats,
                    timeout_seconds=timeout_seconds,
                    silence_seconds=SILENCE_SECONDS,
                )
                view = self._await_admission(agreement, deadline)
            except BaseException:
                heartbeats.close()
                raise
            if view is not None:
                return view.communicator
            heartbeats.close()
        raise CommunicationError(
            f"joining failed: the members cannot reach this process at {heartbeats.address}. Name "
            "the network interface that joins you to them in GLOO_SOCKET_IFNAME"
        )

    def _await_admission(self, agreement: Agreement, deadline: float) -> View | None:
        """Request a view change, and return the view that admits this worker.

        Returns None if the members read the request but could not connect to this worker.
        """
        store, worker = agreement.store, agreement.worker
        what = f"rank {worker}: joining failed"
        number = store.call(lambda: store.get("latest") or 0, what)
        requested = False
        while time.monotonic() < deadline:
            next_view = store.within(f"view/{number + 1}")
            ended = store.call(partial(store.get, "ended"), what)
            decided = store.call(partial(next_view.get, "decided"), what)
            if ended is not None:
                raise AttachError(f"rank {worker}: the training at {store.location} has ended")
            if decided is not None:
                number, requested = number + 1, False
                decision = Decision(**decided)
                if worker in decision.members:
                    return Participant(agreement).enter_as_newcomer(number, decision)
                if (
                    decision.next_identity > worker
                ):  # the members have read the request and refused it
                    return None
            elif not requested:
                requested = True
                store.call(partial(next_view.put, "wanted", True), what)
            else:
                time.sleep(_POLL_SECONDS)
        raise CommunicationTimeout(
            f"{what}: the members at {store.location} have not begun another view within "
            f"timeout_seconds={agreement.timeout_seconds:g}: raise it in "
            "attach(..., timeout_seconds=...) if their steps may take that long"
        )

    def _open_store(self, timeout_seconds: float) -> Any:
        path = self._address.removeprefix("file://")
        if path != self._address:
            if not os.path.exists(path):
                raise CommunicationError(f"joining failed: there is no store at {self._address}")
            return dist.FileStore(path)  # type: ignore[attr-defined]
        host, _, port = self._address.rpartition(":")
        seconds = min(timeout_seconds, _CONNECT_SECONDS)

        def connect() -> Any:
            return dist.TCPStore(  # type: ignore[attr-defined]
                *(host, int(port)),
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
            )

        # TCPStore waits forever if the server process accepts the connection but never answers, for
        # example because a signal has stopped it.
        try:
            return call_within(seconds + _MARGIN_SECONDS, connect)
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:200]
        raise CommunicationError(
            f"joining failed: no store answers at {self._address} within {seconds:g} s: {reason}"
        )

    def _await_training(self, root: SharedStore, deadline: float, timeout_seconds: float) -> str:
        """Wait until a training uses the store. Return the key prefix of the latest training."""
        while time.monotonic() < deadline:
            value = root.call(lambda: root.get(LATEST_TRAINING), "joining failed")
            if value is not None:
                return str(value)
            time.sleep(_POLL_SECONDS)
        raise CommunicationTimeout(
            f"joining failed: no training with min_workers has begun at "
            f"{self._address} within timeout_seconds={timeout_seconds:g}"
        )


def _take_identity(store: SharedStore, heartbeats: HeartbeatConnections) -> int:
    """Reserve the lowest unused identity (number of a worker) for this worker, and return it.

    The worker writes its address under this identity. This is also its request to join.
    """
    worker = int(store.get("size"))
    while store.put_if_absent(f"address/{worker}", heartbeats.address) != heartbeats.address:
        worker += 1
    return worker
