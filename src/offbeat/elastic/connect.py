"""Opens a communicator between the members of a process group, or from a custom transport.

If training is *elastic*, workers may be lost or join while the others continue. The communicator
then has a ``membership``: the interface through which the workers agree on who continues.
"""

import logging
import os
import uuid

import torch.distributed as dist

from offbeat.elastic.agreement import SILENCE_SECONDS, Agreement, Decision
from offbeat.elastic.heartbeats import HeartbeatConnections
from offbeat.elastic.joining import LATEST_TRAINING
from offbeat.elastic.membership import Participant
from offbeat.elastic.store import SharedStore, location_of, serves_store, without_prefixes
from offbeat.errors import AttachError
from offbeat.transport.communicator import Communicator, Transport
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.torch_backend.network_interface import interface_in_use
from offbeat.transport.torch_backend.process_groups import GroupFactory, backends_of
from offbeat.transport.torch_backend.torch_distributed import TorchCommunicator

logger = logging.getLogger("offbeat")


def open_communicator(
    group: dist.ProcessGroup | Transport | None,
    timeout_seconds: float,
    *,
    what: str,
    elastic: bool = False,
) -> Communicator:
    """Open a new communicator between the members of ``group``. A collective.

    Args:
        group: Process group of ``torch.distributed``, or a ``Transport`` that makes the
            communicator. None is the default process group. If there is none, and no launcher's
            environment variable says otherwise, this process is the only worker.
        timeout_seconds: Time limit of one operation.
        what: Name of the caller, for error messages.
        elastic: True if the communicator must have a ``membership``.

    Raises:
        AttachError: ``torch.distributed`` is not initialised in a process of several; this process
            is not a member of the group; or a ``membership`` is needed, and the group or transport
            cannot provide one.
        CommunicationError: A worker did not open its connections in time.
        TypeError: The transport did not return a communicator.
    """
    make = getattr(group, "make_communicator", None)
    if make is None and not (dist.is_available() and dist.is_initialized()):
        name, size = _launched_processes()
        if group is None and size == "1" and not elastic:
            logger.warning("%s without a process group: this process trains alone", what)
            return SingleCommunicator(timeout_seconds)
        raise AttachError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group() "
            f"before {what}, and start the script with torchrun (here: {name}={size})"
        )
    if group is None:  # in a simulation the default group is a transport
        make = getattr(dist.group.WORLD, "make_communicator", None)
    if make is not None:
        made = make(timeout_seconds)
        if not isinstance(made, Communicator):
            raise TypeError(f"make_communicator() must return a Communicator, got {made!r}")
        if elastic and made.membership is None:
            made.close()
            raise AttachError(
                f"{what} with min_workers: a {type(made).__name__} has no membership, so the "
                "workers cannot agree on who continues; leave min_workers out"
            )
        return made
    assert group is None or isinstance(group, dist.ProcessGroup)
    communicator: Communicator
    if elastic:
        communicator = open_elastic(group, timeout_seconds)
    elif dist.get_world_size(group) == 1:
        return SingleCommunicator(timeout_seconds)
    else:
        communicator = TorchCommunicator(group, timeout_seconds=timeout_seconds)
    if communicator.rank == 0:
        for backend in sorted({*backends_of(group).values()}):
            interface = interface_in_use(backend)
            logger.info("%d workers over %s on %s", communicator.size, backend, interface)
    return communicator


def _launched_processes() -> tuple[str, str]:
    """Return the first variable that says how many processes were launched together, and it.

    torchrun sets ``WORLD_SIZE``, and ``srun`` and ``mpirun`` set the others. Without any of them:
    ``WORLD_SIZE`` and "1".
    """
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if name in os.environ:
            return name, os.environ[name]
    return "WORLD_SIZE", "1"


def open_elastic(
    group: dist.ProcessGroup | None,
    timeout_seconds: float,
    *,
    silence_seconds: float = SILENCE_SECONDS,
) -> Communicator:
    """Open a communicator with a ``membership`` between the members of ``group``. A collective.

    When workers are lost or join, the others wait ``silence_seconds``, but at most
    ``timeout_seconds``, for members that do not answer.
    """
    if dist.get_rank(group) < 0:
        raise AttachError("this process is not a member of the group given to attach()")
    backends = {*backends_of(group).values()}
    if backends != {"gloo"}:
        raise AttachError(
            f"min_workers needs a process group of gloo, got {', '.join(sorted(backends))}, which "
            "cannot open groups without all workers of the first view (gloo takes tensors on a "
            "GPU, too)"
        )
    factory = GroupFactory.of(group)
    rank, size, keys = factory.rank, factory.size, factory.new_store()
    base = without_prefixes(keys)
    root, heartbeats = SharedStore(base, location_of(base)), HeartbeatConnections()
    first = Decision(list(range(size)), size)

    def begin() -> SharedStore:
        # The first member that calls this names the training. The others read the name.
        name = SharedStore(keys, root.location).put_if_absent("name", uuid.uuid4().hex)
        training = f"{LATEST_TRAINING}/{name}"
        store = root.within(training)
        store.put(f"address/{rank}", heartbeats.address)
        if rank == 0:
            store.put("size", size)
            store.put("view/0/decided", vars(first))
            root.put(LATEST_TRAINING, training)
        if serves_store(base):
            store.put("keeper", rank)
            logger.warning(
                "rank %d keeps the store of the process group: training cannot go on without it. "
                'Keep the store in a process of its own, see "When workers fail"',
                rank,
            )
        return store

    what = f"rank {rank}: attaching failed"
    store = root.call(begin, what)
    agreement = Agreement(
        rank,
        store,
        heartbeats,
        timeout_seconds=timeout_seconds,
        silence_seconds=silence_seconds,
    )
    view = Participant(agreement).enter(0, first, timeout_seconds)
    keeper = root.call(lambda: store.get("keeper"), what)
    if keeper is not None:
        store.location += f", which rank {keeper} kept,"
    return view.communicator
