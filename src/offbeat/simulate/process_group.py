"""A ``torch.distributed`` process group whose operations run on the simulated cluster.

A training function may call ``torch.distributed`` itself. Each simulated worker is a thread with
its own default process group. torch keeps the default group in a private object of
``torch.distributed.distributed_c10d``. ``installed`` replaces this object by one that has a default
group for each thread. It relies on private names of torch 2.13.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from offbeat.simulate.communicator import SimulatedCommunicator
from offbeat.transport.communicator import Communicator
from offbeat.transport.future import Future
from offbeat.transport.team import Node

_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], object]] = {
    dist.ReduceOp.SUM: Tensor.add_,
    dist.ReduceOp.AVG: Tensor.add_,  # ``wait`` divides the sum, see ``allreduce``
    dist.ReduceOp.MAX: lambda total, other: torch.maximum(total, other, out=total),
    dist.ReduceOp.MIN: lambda total, other: torch.minimum(total, other, out=total),
    dist.ReduceOp.PRODUCT: Tensor.mul_,
}


class _Work(dist.Work):
    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()


class SimulatedGroup(dist.ProcessGroup):
    """A process group whose operations take virtual time, the time of the simulator's clock.

    Args:
        communicator: Communicator for the calls of ``torch.distributed`` in user code.
        make: Function that opens the communicator of each ``offbeat.attach``, given the time-out of
            operations in seconds. It becomes the attribute ``make_communicator``.

    Attributes:
        cluster: The simulated cluster.
    """

    def __init__(
        self, communicator: SimulatedCommunicator, make: Callable[[float], SimulatedCommunicator]
    ) -> None:
        # torch requires rank < size. A worker that joins a running training is alone in its
        # communicator, but its rank is not 0.
        size = max(communicator.size, communicator.member + 1)
        super().__init__(communicator.member, size)  # type: ignore[call-arg]
        self._communicator, self.make_communicator = communicator, make
        self.cluster = communicator.cluster

    def make_nodes(self, timeout_seconds: float) -> tuple[Communicator, Node]:
        """Open the communicators inside and across the nodes that the ``Network`` defines.

        ``offbeat.attach(..., node_group="auto")`` calls this method; see ``open_nodes``.
        """
        everyone = self.make_communicator(timeout_seconds)
        workers = everyone.cluster.network.workers_per_node
        node, local_rank = divmod(everyone.rank, workers)
        first = node * workers
        inside = everyone.subgroup(range(first, first + workers))
        across = everyone.subgroup(range(local_rank, everyone.size, workers), sharing=workers)
        return across, Node(everyone, inside)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that ``torch.distributed.get_backend`` shows."""
        return "simulated"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """Start ``dist.all_reduce``. For AVG, ``wait`` of the returned work divides the sum."""
        operation = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        combine = next((c for op, c in _REDUCTIONS.items() if operation == op), None)
        if combine is None:
            raise NotImplementedError(f"{operation} is not simulated")
        (tensor,) = tensors
        future = self._communicator.reduce(tensor, "dist.all_reduce", combine)
        if operation == dist.ReduceOp.AVG:
            return _Work(future.then(lambda total: total.div_(self._communicator.size)))
        return _Work(future)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        """Start ``dist.broadcast``."""
        (tensor,) = tensors
        future = self._communicator.broadcast(tensor, source=opts.rootRank, what="dist.broadcast")
        return _Work(future)

    def allgather(  # type: ignore[override]
        self, output_tensors: list[list[Tensor]], input_tensor: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Start ``dist.all_gather``. ``wait`` of the returned work fills ``output_tensors``."""

        def copy(tensors: Sequence[Tensor]) -> None:
            for target, value in zip(output_tensors[0], tensors, strict=True):
                target.copy_(value)

        gathered = self._communicator.gather(input_tensor[0], what="dist.all_gather")
        return _Work(gathered.then(copy))

    def barrier(self, opts: Any = None) -> dist.Work:
        """Start ``dist.barrier``."""
        return _Work(self._communicator.sum(torch.zeros(0, device="cpu"), what="dist.barrier"))


class _World(c10d._World):  # torch has no public way to set the default group of one thread
    """torch's registry of process groups, with one default group per thread."""

    def __init__(self) -> None:
        super().__init__()
        self.local = threading.local()

    @property
    def default_pg(self) -> Any:
        return getattr(self.local, "group", None)

    @default_pg.setter
    def default_pg(self, value: Any) -> None:
        self.local.group = value


@contextlib.contextmanager
def installed() -> Iterator[Callable[[SimulatedGroup], None]]:
    """Give every thread its own default process group inside the ``with`` block.

    Inside the block, ``dist.init_process_group`` and ``dist.destroy_process_group`` do nothing, so
    that a training function may call them. A module that imported these functions by name before
    keeps the original functions.

    Yields:
        A function that sets the default group of the calling thread.
    """
    world = _World()
    replacements: dict[tuple[Any, str], Any] = {
        (module, name): lambda *args, **kwargs: None
        for module in (dist, c10d)
        for name in ("init_process_group", "destroy_process_group")
    }
    replacements[c10d, "_world"] = world
    saved = {place: getattr(*place) for place in replacements}
    groups: list[SimulatedGroup] = []

    def use(group: SimulatedGroup) -> None:
        world.default_pg = group
        world.pg_map[group] = ("simulated", None)  # type: ignore[assignment]
        world.pg_names[group] = f"simulated {group.rank()}"  # type: ignore[assignment]
        world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
        groups.append(group)

    for (module, name), value in replacements.items():
        setattr(module, name, value)
    try:
        yield use
    finally:
        for group in groups:
            for record in (world.pg_map, world.pg_names, world.pg_group_ranks):
                record.pop(group, None)
        for (module, name), value in saved.items():
            setattr(module, name, value)
