"""Workers that gather at the store of ``workers.run(…, newcomers=n)``, and die at a given place."""

import os
import signal
import time
from typing import Any, NoReturn

import torch.distributed as dist

from offbeat.elastic import agreement, gathering, membership
from offbeat.elastic.store import SharedStore
from offbeat.training import assembly
from offbeat.transport.torch_backend import process_groups


def store() -> Any:
    """Return a new connection to the store of the test."""
    default = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    host, port = os.environ.setdefault("TEST_STORE", default).split(":")
    return dist.TCPStore(host, int(port), None, False)


def meet(name: str, rank: int, ranks: range) -> None:
    """Wait until all of ``ranks`` have called this."""
    kept = store()
    kept.set(f"{name}{rank}", "")
    kept.wait([f"{name}{other}" for other in ranks])


def die(key: str = "died") -> NoReturn:
    """Kill this process, after setting ``key`` in the store."""
    store().set(key, "")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


PLACES: dict[str, tuple[Any, str]] = {
    "having a number": (SharedStore, "put"),
    "before it gathers": (gathering.Gathering, "_attempt"),
    "having asked": (agreement.Agreement, "request"),
    "before it is here": (agreement.Agreement, "decide"),
    "before it proposes": (agreement.Agreement, "_propose"),
    "before it opens": (membership.StoreMembership, "enter"),
    "while all connect": (process_groups.GroupFactory, "_make"),
    "while the model is copied": (assembly, "copy_rank_0"),
}
"""The functions in which a worker may die."""


def kill_at(place: str, key: str = "died", *, after_seconds: float = 0.0) -> None:
    """Let this process die after it next comes to ``place``; see ``die``."""
    home, name = PLACES[place]
    real = getattr(home, name)

    def die_here(*args: Any, **named: Any) -> Any:
        if name != "put" or args[1].startswith("address/"):
            time.sleep(after_seconds)
            die(key)
        return real(*args, **named)

    setattr(home, name, die_here)


def gather_in_order(rank: int, size: int, *, silence_seconds: float = 30.0) -> None:
    """Let this process gather with those of the other ranks. Its identity is its rank.

    A rank from ``size`` on joins once the others have begun. This changes the process for good.
    """
    membership._STORE_SECONDS = 0.1  # between two looks at the store
    os.environ |= {
        "OFFBEAT_KERNELS": "0",  # numba is slow to import
        "OFFBEAT_STORE": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        "OFFBEAT_WORKERS": str(size),
    }
    make = gathering.Agreement

    def in_order(*args: Any, **options: Any) -> Any:
        kept = store()
        if rank:
            kept.wait([f"number {rank - 1}"])
        if rank >= size:
            kept.wait([f"{kept.get('offbeat/elastic').decode()[1:-1]}/generation/0/decided"])
        agreement = make(*args, **options)
        agreement.limits.usual = min(agreement.limits.usual, silence_seconds)
        assert agreement.worker == rank
        kept.set(f"number {rank}", "")
        gathering.Agreement = make  # type: ignore[misc] # this process may attach again
        return agreement

    gathering.Agreement = in_order  # type: ignore[misc, assignment]
