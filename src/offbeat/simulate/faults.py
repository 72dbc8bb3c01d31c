"""Faults of a simulated run: killed workers, and newcomers.

Faults occur at *virtual times*: times of the simulator's clock, which starts at 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from offbeat.arguments import require_integer
from offbeat.simulate.cluster import SimulatedCluster
from offbeat.simulate.connections import NOTICE_SECONDS
from offbeat.units import to_seconds


@dataclass(frozen=True, kw_only=True)
class Kill:
    """End the process of a worker, as ``kill -9`` does.

    The other workers notice it 0.05 virtual seconds later. Pending operations with the killed
    worker then fail. Nothing happens if the worker has finished or does not exist yet.

    Args:
        worker: Rank of the worker (≥ 0).
        at: Virtual time, such as "3 s" (≥ 0).
        spared: Ranks of workers on which a pending collective still succeeds, if all of its workers
            have joined it. On a real network, too, a collective may succeed on only some workers.
    """

    worker: int
    at: str | float
    spared: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_integer("worker", self.worker, least=0)
        object.__setattr__(self, "at", to_seconds(self.at, allow_zero=True))


@dataclass(frozen=True, kw_only=True)
class Join:
    """Start a new worker during the run.

    With N initial workers, the first new worker has rank N, the next one N + 1. It runs the same
    function as the others but shares no process group with them. Its first collective call must
    therefore be ``attach``.

    Args:
        at: Virtual time of the start, such as "3 s" (≥ 0).
    """

    at: str | float

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", to_seconds(self.at, allow_zero=True))


Fault = Kill | Join


def schedule(
    faults: Sequence[Fault], cluster: SimulatedCluster, count: int, lost: Callable[[int], None]
) -> None:
    """Schedule ``faults`` in virtual time.

    Args:
        faults: The faults of the run.
        cluster: The simulated cluster.
        count: Number of workers, with those that join.
        lost: Function that is called with the rank of a killed worker when the other workers notice
            the loss.
    """
    workers, kernel = cluster.workers, cluster.workers.kernel

    def inject(fault: Fault) -> None:
        if isinstance(fault, Join):
            workers.add()
        elif fault.worker < len(workers.all):
            rank = fault.worker
            if workers.all[rank].finished_seconds is None:
                cluster.connections.lose(rank, fault.spared)
                workers.kill(rank)
                kernel.at(kernel.now + NOTICE_SECONDS, lambda: lost(rank), f"rank {rank} is missed")

    for fault in faults:
        if not isinstance(fault, Fault):
            raise TypeError(f"faults must be Kill or Join, got {fault!r}")
        if isinstance(fault, Kill) and fault.worker >= count:
            raise ValueError(f"{fault!r}: there are {count} workers, counted from 0")
        kernel.at(float(fault.at), partial(inject, fault), f"{fault!r}")
