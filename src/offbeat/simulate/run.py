"""Run an ordinary training function on simulated workers."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch.distributed as dist

from offbeat.arguments import require_integer
from offbeat.simulate.cluster import SimulatedCluster
from offbeat.simulate.communicator import SimulatedCommunicator
from offbeat.simulate.compute import Compute
from offbeat.simulate.faults import Fault, Join, require_faults, schedule
from offbeat.simulate.kernel import Kernel
from offbeat.simulate.membership import Roster
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
    """Run ``worker()`` once per worker, really training, in virtual time.

    Inside, ``torch.distributed`` is initialised: ``get_rank``, ``get_world_size``,
    ``is_initialized``, ``barrier``, ``all_reduce``, ``broadcast`` and ``all_gather`` are answered
    by the simulated cluster, and ``offbeat.attach`` works as it does on a real one. Virtual time
    passes when a worker waits, and when an attached optimizer steps: then ``compute`` says how long
    the step took, whatever it took here. The workers take turns in one process, so two runs of one
    configuration are the same to the last bit. Where ``network`` has nodes of several workers,
    ``attach(..., node_group="auto")`` trains in these.

    Args:
        worker: The training function, without arguments. What it returns is in ``results``.
        workers: How many (≥ 1).
        network: The links; default ``Network("1Gbit/s", latency="100us")``.
        compute: The time of a step; default ``Compute("50ms")``.
        seed: Seed of the random state each worker starts with and of the compute jitter.
        shuffle_ties: Shuffle simultaneous events by this seed, to see whether a result depends on
            their order. None keeps them first in, first out.
        faults: What befalls the workers, such as ``Kill(worker=2, at="3 s")``. With any,
            operations have the time-out of ``attach``, and ``results`` and ``stats`` have a place
            for each worker that joins; those of a killed one are None, or as they were.

    Returns:
        What it took and what it gave.

    Raises:
        ValueError: ``network``, ``compute`` or ``faults`` name a worker that there is not, or
            ``workers`` do not fill the nodes of ``network``.
        DeadlockError: the workers wait for each other, with what each waits in.
        Exception: what a worker raised, with a note that names its rank.
    """
    require_integer("workers", workers, least=1)
    network = Network("1Gbit/s") if network is None else network
    compute = Compute() if compute is None else compute
    require_faults(faults, workers)
    count = workers + sum(isinstance(fault, Join) for fault in faults)
    for what, ranks in (("network", {*network.per_worker}), ("compute", compute.ranks())):
        if max(ranks, default=0) >= count:
            raise ValueError(
                f"{what} names worker {max(ranks)}, but there are {count}, counted from 0"
            )
    if workers % network.workers_per_node:
        raise ValueError(
            f"workers={workers} do not fill nodes of workers_per_node={network.workers_per_node}"
        )
    if dist.is_initialized():
        raise RuntimeError("simulate() needs a process without a torch.distributed process group")
    kernel = Kernel(shuffle_ties)
    crew = Workers(kernel, workers, seed)
    cluster = SimulatedCluster(crew, network, compute, seed, faulty=bool(faults))
    everybody = cluster.open(range(workers))
    attached: dict[int, list[SimulatedCommunicator]] = defaultdict(list)
    rosters: dict[int, Roster] = {}

    def lost(rank: int) -> None:
        for roster in rosters.values():
            roster.lose(rank)

    schedule(faults, kernel, cluster, lost=lost)

    with installed() as use:

        def live(one: SimulatedWorker) -> Any:
            mine = attached[one.rank]

            def make(timeout_seconds: float) -> SimulatedCommunicator:
                number = len(mine)
                if number not in rosters:
                    limit = timeout_seconds if faults else math.inf
                    rosters[number] = Roster(cluster, number, limit)
                mine.append(rosters[number].begin(one.rank))
                return mine[-1]

            line = everybody if one.rank < workers else cluster.open([one.rank])
            group = 0 if one.rank < workers else -1_000_000 - one.rank
            use(SimulatedGroup(SimulatedCommunicator(cluster, one.rank, line, group), make))
            try:
                return worker()
            finally:
                if faults:  # its process ends: nobody waits for it
                    cluster.lose(one.rank)
                    lost(one.rank)

        try:
            crew.run(live)
            return Simulation.of(cluster, [attached[one.rank] for one in crew.all])
        finally:
            # Else what a worker held, its model above all, would be in a cycle, and in memory until
            # the garbage collector comes, which counts objects and not bytes.
            for one in chain.from_iterable(attached.values()):
                one.host.totals.clear()
