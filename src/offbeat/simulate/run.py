"""The function ``offbeat.simulate``: run a training function on simulated workers."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from offbeat.arguments import require_integer
from offbeat.simulate.cluster import SimulatedCluster
from offbeat.simulate.communicator import SimulatedCommunicator
from offbeat.simulate.compute import Compute
from offbeat.simulate.faults import Fault, Join, schedule
from offbeat.simulate.kernel import Kernel
from offbeat.simulate.membership import MembershipService
from offbeat.simulate.network import Network
from offbeat.simulate.process_group import SimulatedGroup, installed
from offbeat.simulate.simulation import Simulation
from offbeat.simulate.workers import SimulatedWorker, Workers


def simulate(
    worker: Callable[[], Any],
    *,
    workers: int,
    network: Network | None = None,
    compute: Compute | None = None,
    seed: int = 0,
    shuffle_ties: int | None = None,
    faults: Sequence[Fault] = (),
) -> Simulation:
    """Run ``worker()`` once per simulated worker.

    The training is real; only time is simulated. *Virtual time*, the simulator's clock, passes when
    a worker waits and when it computes a step of an attached optimizer. ``compute`` sets the
    duration of a step. It does not depend on the speed of this machine. The workers take turns in
    one process. If ``worker`` is deterministic, two runs with the same arguments are bit-identical.

    ``torch.distributed`` is initialised inside ``worker()``. The simulated cluster supports
    ``get_rank``, ``get_world_size``, ``is_initialized``, ``barrier``, ``all_reduce``, ``broadcast``
    and ``all_gather``. ``offbeat.attach`` works as on a real cluster. If ``network`` has nodes of
    several workers, ``attach(..., node_group="auto")`` uses these nodes.

    Args:
        worker: Training function without arguments. Its return values are in
            ``Simulation.results``.
        workers: Number of workers (≥ 1).
        network: The links; None means ``Network("1Gbit/s", latency="100us")``.
        compute: Compute time of steps; None means ``Compute("50ms")``.
        seed: Seed of the initial random state of each worker and of the compute jitter.
        shuffle_ties: Seed of the random order of simultaneous events; None executes them first in,
            first out. Runs with several seeds show whether a result depends on that order.
        faults: Faults of the run, such as ``Kill(worker=2, at="3 s")``. Without faults,
            operations never time out; with faults, after the time given to ``attach``. ``results``
            and ``stats`` have an entry for every worker that joins, too. The result of a killed
            worker is None. Its ``stats`` end at its death.

    Returns:
        Duration, results, statistics and timeline of the run.

    Raises:
        TypeError: An element of ``faults`` is not a fault, or ``workers`` is not an int.
        ValueError: ``compute`` or ``faults`` name a worker that does not exist, or
            ``workers`` is below 1 or not a multiple of the workers per node.
        RuntimeError: The process already has a ``torch.distributed`` process group.
        DeadlockError: No worker can continue. The message names the operation in which each worker
            waits.
        Exception: A worker raised it. A note in the exception names the rank.
    """
    require_integer("workers", workers, least=1)
    network = Network("1Gbit/s") if network is None else network
    compute = Compute() if compute is None else compute
    count = workers + sum(isinstance(fault, Join) for fault in faults)
    slow = 0 if callable(compute.slowdown) else max(compute.slowdown, default=0)
    if slow >= count:
        raise ValueError(f"compute names worker {slow}, but there are {count}, counted from 0")
    if workers % network.workers_per_node:
        raise ValueError(
            f"workers={workers} do not fill nodes of workers_per_node={network.workers_per_node}"
        )
    if dist.is_initialized():
        raise RuntimeError("simulate() needs a process without a torch.distributed process group")
    simulated = Workers(Kernel(shuffle_ties), workers, seed)
    cluster = SimulatedCluster(simulated, network, compute, seed, faulty=bool(faults))
    connections = cluster.connections
    initial = connections.open(range(workers))
    trainings: Counter[int] = Counter()  # so far, by rank
    services: dict[int, MembershipService] = {}  # the key is the number of earlier trainings

    def lose(rank: int) -> None:
        for service in services.values():
            service.lose(rank)

    schedule(faults, cluster, count, lose)

    with installed() as use:

        def run_worker(current: SimulatedWorker) -> Any:
            rank = current.rank

            def make(timeout_seconds: float) -> SimulatedCommunicator:
                number = trainings[rank]
                if number not in services:
                    limit = timeout_seconds if faults else math.inf
                    services[number] = MembershipService(cluster, number, limit)
                communicator = services[number].start(rank)
                trainings[rank] += 1
                return communicator

            group = initial if rank < workers else connections.open([rank])
            context = 0 if rank < workers else -1_000_000 - rank
            use(SimulatedGroup(SimulatedCommunicator(cluster, rank, group, context), make))
            try:
                return worker()
            finally:
                if faults:  # the worker has ended: membership changes must not wait for it
                    connections.lose(rank)
                    lose(rank)

        try:
            simulated.run(run_worker)
            return Simulation.of(cluster)
        finally:
            # Break a reference cycle that contains the models of the workers. They would stay in
            # memory until the next run of the garbage collector.
            cluster.totals.clear()
