"""What befalls simulated workers at given virtual times: losses, interruptions, and newcomers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from offbeat.arguments import require_integer
from offbeat.simulate.cluster import NOTICE_SECONDS, SimulatedCluster
from offbeat.simulate.kernel import Kernel
from offbeat.units import to_seconds


@dataclass(frozen=True)
class _Timed:
    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("at", "seconds"):
                zero = field.name == "at"
                object.__setattr__(self, field.name, to_seconds(value, allow_zero=zero))
            elif field.name == "worker":
                require_integer("worker", value, least=0)


@dataclass(frozen=True, kw_only=True)
class Kill(_Timed):
    """A worker's process ends, as by ``kill -9``: the others notice a little later.

    Args:
        worker: Which (≥ 0).
        at: Virtual time, such as "3 s".
        spared: Workers for whom a collective still ends that is under way and to which all had
            come; on the others it fails. So it can be in a real network.
    """

    worker: int
    at: str | float
    spared: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Pause(_Timed):
    """A worker stands still for a while, as by SIGSTOP.

    Args:
        worker: Which (≥ 0).
        at: Virtual time.
        seconds: For how long (> 0).
    """

    worker: int
    at: str | float
    seconds: str | float


@dataclass(frozen=True, kw_only=True)
class Cut(_Timed):
    """Nothing reaches a worker or leaves it for a while.

    Args:
        worker: Which (≥ 0).
        at: Virtual time.
        seconds: For how long (> 0).
    """

    worker: int
    at: str | float
    seconds: str | float


@dataclass(frozen=True, kw_only=True)
class Join(_Timed):
    """A new worker begins; its rank is the next number that nobody has had.

    It runs the same function as all others. It has no process group with them: ``attach`` is the
    first that it may do together with them.

    Args:
        at: Virtual time.
    """

    at: str | float


Fault = Kill | Pause | Cut | Join


def require_faults(faults: Sequence[Fault], workers: int) -> None:
    """Raise unless ``faults`` can befall so many workers, and those that join.

    Raises:
        TypeError: something else.
        ValueError: of a worker that there will not be.
    """
    count = workers + sum(isinstance(fault, Join) for fault in faults)
    for fault in faults:
        if not isinstance(fault, Fault):
            raise TypeError(f"faults must be Kill, Pause, Cut or Join, got {fault!r}")
        for worker in () if isinstance(fault, Join) else (fault.worker,):
            if worker >= count:
                raise ValueError(f"{fault!r}: there are {count} workers, counted from 0")


def schedule(
    faults: Sequence[Fault],
    kernel: Kernel,
    cluster: SimulatedCluster,
    *,
    lost: Callable[[int], None],
) -> None:
    """Let ``faults`` happen when it is time.

    Args:
        faults: They.
        kernel: The clock.
        cluster: To whom.
        lost: Called when the others have noticed that a worker is lost.
    """

    def happen(fault: Fault) -> None:
        workers = cluster.workers
        match fault:
            case Join():
                workers.join()
            case Pause(worker=worker, seconds=seconds):
                workers.pause(worker, float(seconds))
            case Cut(worker=worker, seconds=seconds):
                cluster.cut(worker, float(seconds))
            case Kill(worker=worker, spared=spared):
                if worker < len(workers.all) and workers.all[worker].finished_seconds is None:
                    cluster.lose(worker, spared)
                    workers.kill(worker)
                    end = kernel.now + NOTICE_SECONDS
                    kernel.at(end, lambda: lost(worker), f"rank {worker} is missed")

    for fault in faults:
        kernel.at(float(fault.at), lambda fault=fault: happen(fault), f"{fault!r}")  # type: ignore[misc]
