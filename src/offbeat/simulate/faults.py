"""Faults of a simulated run: killed workers, pauses, interruptions, and newcomers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offbeat.arguments import require_integer
from offbeat.simulate.cluster import SimulatedCluster
from offbeat.simulate.connections import NOTICE_SECONDS
from offbeat.units import to_seconds


@dataclass(frozen=True)
class _Checked:
    """Checks the fields ``at``, ``seconds`` and ``worker``. Converts times to seconds."""

    def __post_init__(self) -> None:
        fields = vars(self)
        require_integer("worker", fields.get("worker", 0), least=0)
        object.__setattr__(self, "at", to_seconds(fields["at"], allow_zero=True))
        if "seconds" in fields:
            object.__setattr__(self, "seconds", to_seconds(fields["seconds"]))


@dataclass(frozen=True, kw_only=True)
class Kill(_Checked):
    """End the process of a worker, as ``kill -9`` does. The others notice it a little later.

    Args:
        worker: Rank of the worker (≥ 0).
        at: Virtual time, such as "3 s".
        spared: Ranks of workers for which a pending collective still succeeds, if every worker had
            joined it; on the others it fails. A real network can split the outcome in this way.
    """

    worker: int
    at: str | float
    spared: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Pause(_Checked):
    """Stop a worker for a while, as SIGSTOP does.

    Args:
        worker: Rank of the worker (≥ 0).
        at: Virtual time of the start.
        seconds: Duration (> 0).
    """

    worker: int
    at: str | float
    seconds: str | float


@dataclass(frozen=True, kw_only=True)
class Cut(_Checked):
    """Interrupt all traffic from and to a worker for a while.

    Args:
        worker: Rank of the worker (≥ 0).
        at: Virtual time of the start.
        seconds: Duration (> 0).
    """

    worker: int
    at: str | float
    seconds: str | float


@dataclass(frozen=True, kw_only=True)
class Join(_Checked):
    """Start a new worker. Its rank is the next number that no worker has had.

    The new worker runs the same function as the others. It shares no process group with them:
    ``attach`` must be the first call that it makes together with them.

    Args:
        at: Virtual time.
    """

    at: str | float


Fault = Kill | Pause | Cut | Join


def require_faults(faults: Sequence[Fault], workers: int) -> None:
    """Check that ``faults`` are possible with ``workers`` initial workers.

    Raises:
        TypeError: An element is not a fault.
        ValueError: A fault names a worker that will never exist.
    """
    count = workers + sum(isinstance(fault, Join) for fault in faults)
    for fault in faults:
        if not isinstance(fault, Fault):
            raise TypeError(f"faults must be Kill, Pause, Cut or Join, got {fault!r}")
        if not isinstance(fault, Join) and fault.worker >= count:
            raise ValueError(f"{fault!r}: there are {count} workers, counted from 0")


def schedule(
    faults: Sequence[Fault], cluster: SimulatedCluster, *, lost: Callable[[int], None]
) -> None:
    """Schedule ``faults`` in virtual time.

    Args:
        faults: The faults.
        cluster: The simulated cluster.
        lost: Called with the rank of a killed worker when the others notice.
    """
    workers, kernel = cluster.workers, cluster.workers.kernel

    def inject(fault: Fault) -> None:
        match fault:
            case Join():
                workers.add()
            case Pause(worker=worker, seconds=seconds):
                workers.pause(worker, float(seconds))
            case Cut(worker=worker, seconds=seconds):
                cluster.connections.cut(worker, float(seconds))
            case Kill(worker=worker, spared=spared):
                if worker < len(workers.all) and workers.all[worker].finished_seconds is None:
                    cluster.connections.lose(worker, spared)
                    workers.kill(worker)
                    end = kernel.now + NOTICE_SECONDS
                    kernel.at(end, lambda: lost(worker), f"rank {worker} is missed")

    for fault in faults:
        kernel.at(float(fault.at), lambda fault=fault: inject(fault), f"{fault!r}")  # type: ignore[misc]
