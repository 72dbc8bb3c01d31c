"""Gathering: workers that any launcher has started begin a training, or join the running one.

Environment variables tell a worker what to do. It needs neither a rank nor a restart count, so a
first start, a restart and a late start are the same:

    OFFBEAT_STORE      address of a store: ``host:port`` of a TCPStore, or ``file:///path`` of a
                       FileStore on a disk that all workers share
    OFFBEAT_WORKERS    number of workers with which training begins: ``4``, or a range. With ``2:4``
                       training begins with 4 workers, or after 30 s with 2 or 3

The store must outlive the workers, so a launcher keeps it in a process of its own. One store serves
one training. The keys in the store, besides those of ``elastic/agreement.py``:

    offbeat/elastic         key prefix of the latest training; replaced if that training is lost
    <prefix>/numbers        counter from which each worker takes its identity (``add``)
    <prefix>/generation/0/decided the members of generation 0
    <prefix>/ended          exists once the training has ended

Each worker runs the same protocol:

1. *Take an identity* in the latest training, or in a new one if there is none. Write its address.
2. *Gather.* Without a decision on generation 0, wait until enough workers live. Then the living
   worker with the lowest identity proposes these workers as generation 0. The store accepts only
   the first proposal (compare-and-set).
3. *Begin or join.* The members of generation 0 connect to each other. All other workers ask to
   join.
4. *Begin again.* If a member of generation 0 is lost before ``attach`` returns, the others leave
   and start again with step 1. They join the training if a member has continued with it. If all
   members of the last generation have ended or left, no one has the model. The waiting workers then
   replace the training by a new one (compare-and-set), and all gather again.
"""

import gc
import logging
import os
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from offbeat.elastic import silence
from offbeat.elastic.address import PATIENCE_SECONDS, WorkerCount, parse_address
from offbeat.elastic.agreement import POLL_SECONDS, Agreement, Decision
from offbeat.elastic.membership import StoreMembership, UnreachableError
from offbeat.elastic.store import SharedStore, StoreLostError, connect_to_store
from offbeat.errors import AttachError, CommunicationError, CommunicationTimeout, EndedError
from offbeat.transport.communicator import Communicator, Transport
from offbeat.transport.membership import Generation, ModelLostError
from offbeat.transport.torch_backend.network_interface import choose_interface
from offbeat.transport.torch_backend.process_groups import ranks_text
from offbeat.transport.torch_backend.store_access import polls

T = TypeVar("T")
logger = logging.getLogger("offbeat")
LATEST_TRAINING = "offbeat/elastic"
"""Key in the store. Its value is the key prefix of the training that began last."""
_STORE, _WORKERS = "OFFBEAT_STORE", "OFFBEAT_WORKERS"
_ATTEMPTS = 10  # attempts to begin or join a training; each ends with the loss of a worker


def gathering_from_environment() -> "Gathering | None":
    """Return the transport by which the workers of a launcher gather.

    Returns None if ``OFFBEAT_STORE`` is not set. Also returns None in a simulation, because the
    default process group connects its workers.

    Raises:
        AttachError: A variable has a wrong form, or ``OFFBEAT_WORKERS`` is missing.
    """
    address, workers = os.environ.get(_STORE), os.environ.get(_WORKERS)
    world = dist.group.WORLD  # None if there is no default process group
    if workers and not address and world is None:
        raise AttachError(f"{_WORKERS} is set and {_STORE} is not: set it to the store's address")
    if not address or hasattr(world, "make_communicator"):
        return None
    if not workers:
        raise AttachError(
            f"{_STORE} is set and {_WORKERS} is not: set it to the number of workers, such as 4"
        )
    try:
        where = _STORE
        parse_address(address)
        where = _WORKERS
        count = WorkerCount.parse(workers)
    except ValueError as error:
        raise AttachError(f"{where}: {error}") from None
    if world is not None and world.size() > 1:
        logger.warning(
            "%s is set, so attach() trains with the workers that gather there, and not with the %d "
            "workers of the default process group; unset it, or give attach() a group",
            *(_STORE, world.size()),
        )
    # Not isinstance(), to which a dead proxy answers with an error.
    samplers = [each for each in gc.get_objects() if type(each) is DistributedSampler]
    if any(sampler.num_replicas == 1 for sampler in samplers):
        logger.warning(
            "a DistributedSampler has num_replicas=1, so every worker would train on all data: use "
            "an offbeat.data.LeasedSampler, which divides the data among the workers"
        )
    return Gathering(address, count)


class Gathering(Transport):
    """Transport (factory of communicators) of a worker that begins or joins a training.

    Args:
        address: Address of the store.
        workers: Number of workers with which training begins.
    """

    def __init__(self, address: str, workers: WorkerCount) -> None:
        self._address, self.workers = address, workers

    def retry_after_losses(self, begin: Callable[[], T]) -> T:
        """Return the result of ``begin``, which calls ``make_communicator`` and uses the result.

        Call it again if it fails because another worker is lost. After a failure ``begin`` has left
        the generation. Time-outs, a store or members that cannot be reached, and the end of
        training are final.
        """
        for _ in range(_ATTEMPTS - 1):
            try:
                return begin()
            except (CommunicationTimeout, StoreLostError, UnreachableError, EndedError):
                raise
            except (CommunicationError, ModelLostError) as error:
                logger.warning("%s. This worker gathers with the others again", error)
        return begin()

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        """Begin a training with other workers, or join the running one. Blocks.

        Raises:
            EndedError: The training has ended.
            CommunicationTimeout: Within ``timeout_seconds`` too few workers came, or the members of
                the running training did not admit this worker.
            CommunicationError: The store cannot be reached, a member of generation 0 was lost, or
                the members cannot connect to this process.
        """
        what = "gathering failed"
        where = parse_address(self._address)
        if not isinstance(where, str):
            choose_interface(where[0])
        root = connect_to_store(self._address, timeout_seconds, what=what)
        while True:
            name = root.call(partial(_latest_training, root), what)
            agreement = Agreement(root.within(name), timeout_seconds)
            try:
                generation = self._attempt(root, name, agreement)
            except BaseException:
                agreement.leave(0, ended=False)
                raise
            if generation is not None:
                members = ranks_text(generation.members)
                rank, number = agreement.worker, generation.number
                logger.info("rank %d begins in generation %d: %s", rank, number, members)
                return generation.communicator
            agreement.heartbeats.close()
            logger.info("rank %d: no member of %s is left", agreement.worker, name)
            root.call(partial(root.replace, LATEST_TRAINING, name, _new_training()), what)

    def _attempt(self, root: SharedStore, name: str, agreement: Agreement) -> Generation | None:
        """Open the first generation that contains this worker. Blocks.

        Returns None if another training has replaced this one, or all members have ended, so that
        no one can admit this worker.
        """
        store, heartbeats, worker = agreement.store, agreement.heartbeats, agreement.worker
        what, started = f"rank {worker}: joining failed", time.monotonic()
        latest = agreement.call(lambda: store.get("latest"))
        number, before = -1 if latest is None else latest - 1, Decision([], 0)
        gone: set[int] = set()  # workers that have ended or left
        unreachable: set[int] = set()
        requested = started  # time of the request for the next generation

        def read() -> tuple[Any, bool, Any]:
            gone.update(store.present("left/{}", set(before.members) - gone))
            replaced = root.get(LATEST_TRAINING) != name
            return store.get("ended"), replaced, store.get(f"generation/{number + 1}/decided")

        for _ in polls(*POLL_SECONDS):
            # Read ``dead`` before the decision. If all members of the generation ``before`` have
            # ended and there is no decision on the next one, no decision can follow.
            gone |= heartbeats.dead()
            ended, replaced, decided = agreement.call(read)
            if ended is not None:
                raise EndedError(
                    f"{what}: the training at {store.location} has ended. For another one use a "
                    "new store"
                )
            waited = time.monotonic() - started
            if decided is None and replaced:
                return None
            if decided is None and number < 0:
                decided = self._propose(agreement, waited)
            if decided is not None:
                number, before = number + 1, Decision(**decided)
                if worker in before.members:
                    return StoreMembership(agreement).enter_first(number, before)
                if before.considers(worker):
                    raise UnreachableError(
                        f"{what}: the members cannot reach this process at {heartbeats.address}. "
                        "Name the network interface that joins you to them in GLOO_SOCKET_IFNAME"
                    )
                agreement.request(number + 1)
                unreachable = set(agreement.connect_heartbeats(before.members))
                requested = time.monotonic()
                continue
            # A member whose process lives answers the request when it next steps. So members that
            # this worker cannot reach count as dead if they have not answered for a while.
            unanswered, lost = time.monotonic() - requested, set(gone)
            if unanswered > silence.REFUSED_SECONDS:
                lost |= heartbeats.refused
            if unanswered > agreement.limits.usual:
                lost |= unreachable
            if before.members and lost.issuperset(before.members):
                return None
            if waited > agreement.timeout_seconds:
                raise CommunicationTimeout(
                    f"{what}: the members at {store.location} have not begun another generation "
                    f"within timeout_seconds={agreement.timeout_seconds:g}: raise it in "
                    "attach(..., timeout_seconds=...) if their steps may take that long"
                )
        raise AssertionError

    def _propose(self, agreement: Agreement, waited: float) -> Any:
        """Propose generation 0 and return the decision, if enough workers live.

        Only the living worker with the lowest identity proposes. Returns None if this
        worker cannot propose. Raises CommunicationTimeout after ``timeout_seconds``.
        """
        decision, heartbeats = agreement.find_newcomers(Decision([], 0)), agreement.heartbeats
        least = self.workers.least if waited >= PATIENCE_SECONDS else self.workers.most
        if len(decision.members) >= least and decision.members[0] == agreement.worker:
            write = agreement.store.put_if_absent
            return agreement.call(partial(write, "generation/0/decided", vars(decision)))
        if waited > agreement.timeout_seconds:
            members, limit = decision.members, f"timeout_seconds={agreement.timeout_seconds:g}"
            if len(members) >= least:
                raise CommunicationTimeout(
                    f"gathering failed: {len(members)} workers have come to {self._address}, but "
                    f"rank {members[0]} has not begun the training with them within {limit}: it is "
                    "suspended, or it cannot connect to the others; end that process, or name the "
                    "network interface that joins the workers in GLOO_SOCKET_IFNAME"
                )
            text = (
                f"gathering failed: {len(members)} of {self.workers.most} workers have come to "
                f"{self._address} within {limit}"
            )
            silent = {*range(decision.next_identity)}.difference(
                members, decision.unannounced, heartbeats.refused, heartbeats.dead()
            )
            if silent:
                text += (
                    f". {len(silent)} more do not answer at their addresses: name the network "
                    "interface that joins the workers in GLOO_SOCKET_IFNAME"
                )
            raise CommunicationTimeout(text)
        return None


def _latest_training(root: SharedStore) -> str:
    """Return the key prefix of the latest training. Begin a training if there is none."""
    name = root.get(LATEST_TRAINING)
    return str(name or root.put_if_absent(LATEST_TRAINING, _new_training()))


def _new_training() -> str:
    """Return the key prefix of a new training."""
    return f"{LATEST_TRAINING}/{uuid.uuid4().hex}"
