"""Gathering: workers that any launcher has started begin a training, or join the running one.

Environment variables tell a worker what to do. It needs neither a rank nor a restart count, so a
first start, a restart and a late start are the same:

    OFFBEAT_STORE      address of a store: ``host:port`` of a TCPStore, or ``file:///path`` of a
                       FileStore on a disk that all workers share
    OFFBEAT_WORKERS    number of workers with which training begins: ``4``, or ``2:4`` for 4, or for
                       2 to 3 if no more have come after 30 s
    OFFBEAT_LEFT       keys in the store of workers that are known to be dead, separated by spaces;
                       optional

The store must outlive the workers, so a launcher keeps it in a process of its own. One store serves
one training. The keys in the store, besides those of ``elastic/agreement.py``:

    offbeat/elastic         key prefix of the latest training; replaced if that training is lost
    <prefix>/numbers        counter from which each worker takes its identity (``add``)
    <prefix>/view/0/decided the members of view 0
    <prefix>/ended          exists once the training has ended; see ``training_has_ended``

Each worker runs the same protocol:

1. *Take an identity* in the latest training, or in a new one if there is none. Write its address.
2. *Gather.* Without a decision on view 0, wait until enough workers live. Then the living worker
   with the lowest identity proposes these workers as view 0. The store accepts only the first
   proposal (compare-and-set).
3. *Begin or join.* The members of view 0 connect to each other. All other workers ask to join.
4. *Begin again.* If a member of view 0 is lost before ``attach`` returns, the others leave and
   start again with step 1. They join the training if a member has continued with it. If all members
   of the last view have ended or left, no one has the model. The waiting workers then replace the
   training by a new one (compare-and-set), and all gather again.
"""

import itertools
import logging
import os
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from offbeat.elastic import reports
from offbeat.elastic.address import parse_address
from offbeat.elastic.agreement import Agreement, Decision
from offbeat.elastic.joining import POLL_SECONDS, Admission, UnreachableError, new_identity
from offbeat.elastic.membership import StoreMembership
from offbeat.elastic.store import SharedStore, StoreLostError, connect_to_store
from offbeat.errors import AttachError, CommunicationError, CommunicationTimeout, EndedError
from offbeat.transport.communicator import Communicator, Transport
from offbeat.transport.membership import ModelLostError, View
from offbeat.transport.torch_backend.process_groups import ranks_text

T = TypeVar("T")
logger = logging.getLogger("offbeat")
LATEST_TRAINING = "offbeat/elastic"
"""Key in the store. Its value is the key prefix of the training that began last."""
PATIENCE_SECONDS = 30.0
"""Time after which training begins with fewer workers, if ``OFFBEAT_WORKERS`` allows it."""
_STORE, _WORKERS, _LEFT = "OFFBEAT_STORE", "OFFBEAT_WORKERS", "OFFBEAT_LEFT"
_ATTEMPTS = 10  # attempts to begin or join a training; each ends with the loss of a worker


def training_has_ended(store: Any) -> bool:
    """Return True if the training that uses ``store`` has ended.

    ``store`` is a store of ``torch.distributed``. A launcher calls this function when a worker has
    failed. A worker of a training that has ended need not be started again.
    """
    root = SharedStore(store, _STORE)
    name = root.get(LATEST_TRAINING)
    return name is not None and root.within(name).get("ended") is not None


@dataclass(frozen=True)
class WorkerCount:
    """The number of workers with which training begins.

    Attributes:
        most: Training begins when this many workers have come (≥ 1).
        least: Training begins with at least this many workers after ``PATIENCE_SECONDS``.
        min_workers: Least number of workers with which training continues.
    """

    most: int
    least: int
    min_workers: int

    @classmethod
    def parse(cls, text: str) -> "WorkerCount":
        """Return the value of ``OFFBEAT_WORKERS``, for example "4" or "2:4".

        Raises AttachError if ``text`` has another form.
        """
        match = re.fullmatch(r"(?:([0-9]+):)?([0-9]+)", text.strip())
        most = int(match[2]) if match else 0
        least = int(match[1]) if match and match[1] else most
        if not 1 <= least <= most:
            raise AttachError(
                f"{_WORKERS} must be a number of workers such as 4, or 2:4 to begin with 4, or "
                f"with 2 after {PATIENCE_SECONDS:g} s; got {text!r}"
            )
        return cls(most, least, least if match and match[1] else 1)


def gathering_from_environment() -> "Gathering | None":
    """Return the transport by which the workers of a launcher gather.

    Returns None if ``OFFBEAT_STORE`` is not set, or in a simulation, whose default process group
    connects the workers.

    Raises:
        AttachError: A variable has a wrong form, or ``OFFBEAT_WORKERS`` is missing.
    """
    address, workers = os.environ.get(_STORE), os.environ.get(_WORKERS)
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if workers and not address and world is None:
        raise AttachError(f"{_WORKERS} is set and {_STORE} is not: set it to the store's address")
    if not address or hasattr(world, "make_communicator"):
        return None
    try:
        parse_address(address)
    except ValueError as error:
        raise AttachError(f"{_STORE}: {error}") from None
    if not workers:
        raise AttachError(
            f"{_STORE} is set and {_WORKERS} is not: set it to the number of workers, such as 4"
        )
    if world is not None and world.size() > 1:
        logger.warning(
            "%s is set, so attach() trains with the workers that gather there, and not with the %d "
            "workers of the default process group; unset it, or give attach() a group",
            *(_STORE, world.size()),
        )
    return Gathering(address, WorkerCount.parse(workers))


class Gathering(Transport):
    """Transport (factory of communicators) of a worker that begins or joins a training.

    Args:
        address: Address of the store.
        workers: Number of workers with which training begins.
        patience_seconds: Time from the arrival of this worker after which ``workers.least``
            workers are enough.
    """

    def __init__(
        self, address: str, workers: WorkerCount, *, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self._address, self.workers = address, workers
        self._patience_seconds = patience_seconds

    def repeat(self, begin: Callable[[], T]) -> T:
        """Return the result of ``begin``, which calls ``make_communicator`` and uses the result.

        Call it again if it fails because another worker is lost. After a failure ``begin`` has left
        the view. Time-outs, a store or members that cannot be reached, and the end of training are
        final.
        """
        for attempt in itertools.count(1):
            try:
                return begin()
            except (CommunicationTimeout, StoreLostError, UnreachableError, EndedError):
                raise
            except (CommunicationError, ModelLostError) as error:
                if attempt == _ATTEMPTS:
                    raise
                logger.warning("%s. This worker gathers with the others again", error)
        raise AssertionError

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        """Begin a training with other workers, or join the running one. Blocks.

        Raises:
            EndedError: The training has ended.
            CommunicationTimeout: Within ``timeout_seconds`` too few workers came, or the members of
                the running training did not admit this worker.
            CommunicationError: The store cannot be reached, a member of view 0 was lost, or the
                members cannot connect to this process.
        """
        what = "gathering failed"
        root = connect_to_store(self._address, timeout_seconds, what=what)
        for key in os.environ.get(_LEFT, "").split():
            root.call(partial(root.put, key, True), what)
        while True:
            name = root.call(partial(_latest_training, root), what)
            agreement = new_identity(root.within(name), timeout_seconds, what=what)
            reports.tell(f"{reports.LEFT}{name}/left/{agreement.worker}")
            try:
                view = self._attempt(root, name, agreement)
            except BaseException:
                agreement.leave(0, ended=False)
                raise
            if view is not None:
                reports.tell(f"trains as rank {agreement.worker}")
                return view.communicator
            agreement.heartbeats.close()
            logger.info("rank %d: no member of %s is left", agreement.worker, name)
            root.call(partial(root.replace, LATEST_TRAINING, name, _new_training()), what)

    def _attempt(self, root: SharedStore, name: str, agreement: Agreement) -> View | None:
        deadline = time.monotonic() + agreement.timeout_seconds
        first = self._gather(agreement, deadline)
        if agreement.worker in first.members:
            view = StoreMembership(agreement).enter(0, first)
            logger.info(
                "rank %d begins training with %s", agreement.worker, ranks_text(first.members)
            )
            return view
        return Admission(agreement, lambda: root.get(LATEST_TRAINING) != name).wait(deadline)

    def _gather(self, agreement: Agreement, deadline: float) -> Decision:
        """Wait for the decision on view 0, and return it. Propose one if enough workers live."""
        store, heartbeats = agreement.store, agreement.heartbeats
        started, before = time.monotonic(), Decision([], 0)
        view, pause = store.within("view/0"), POLL_SECONDS[0]
        what = f"rank {agreement.worker}: gathering failed"
        while True:
            decided = store.call(partial(view.get, "decided"), what)
            if decided is not None:
                return Decision(**decided)
            requests = store.call(partial(agreement.join_requests, before), what)
            others = {*requests.addresses} - {agreement.worker} - heartbeats.refused
            silent = set(heartbeats.connect({w: requests.addresses[w] for w in others}))
            silent -= heartbeats.refused
            others -= heartbeats.refused | silent | heartbeats.dead()
            alive, waited = sorted({agreement.worker, *others}), time.monotonic() - started
            impatient = waited >= self._patience_seconds
            least = self.workers.least if impatient else self.workers.most
            if len(alive) >= least and alive[0] == agreement.worker:
                decision = Decision(alive, requests.next_identity, unannounced=requests.unannounced)
                store.call(partial(view.put_if_absent, "decided", vars(decision)), what)
            elif time.monotonic() > deadline:
                raise self._timeout(agreement, len(alive), len(silent))
            else:
                time.sleep(pause)
                pause = min(2 * pause, POLL_SECONDS[1])

    def _timeout(self, agreement: Agreement, alive: int, silent: int) -> CommunicationTimeout:
        text = (
            f"gathering failed: {alive} of {self.workers.most} workers have come to "
            f"{self._address} within timeout_seconds={agreement.timeout_seconds:g}"
        )
        if silent:
            text += (
                f". {silent} more do not answer at their addresses: name the network interface "
                "that joins the workers in GLOO_SOCKET_IFNAME"
            )
        return CommunicationTimeout(text)


def _latest_training(root: SharedStore) -> str:
    """Return the key prefix of the latest training. Begin a training if there is none."""
    name = root.get(LATEST_TRAINING)
    return str(name or root.put_if_absent(LATEST_TRAINING, _new_training()))


def _new_training() -> str:
    """Return the key prefix of a new training."""
    return f"{LATEST_TRAINING}/{uuid.uuid4().hex}"
