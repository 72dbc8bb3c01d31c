"""Workers that gather at the store of ``workers.run(…, newcomers=n)``."""

import os
from typing import Any

import torch.distributed as dist

from offbeat.elastic import gathering, membership


def store() -> Any:
    """Return a new connection to the store."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)


def meet(name: str, rank: int, ranks: range) -> None:
    """Wait until all of ``ranks`` have called this."""
    kept = store()
    kept.set(f"{name}{rank}", "")
    kept.wait([f"{name}{other}" for other in ranks])


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
    new_identity = gathering.new_identity

    def in_order(*args: Any, **options: Any) -> Any:
        kept = store()
        if rank:
            kept.wait([f"number {rank - 1}"])
        if rank >= size:
            kept.wait([f"{kept.get('offbeat/elastic').decode()[1:-1]}/view/0/decided"])
        agreement = new_identity(*args, **options)
        agreement.silence_seconds = min(agreement.silence_seconds, silence_seconds)
        assert agreement.worker == rank
        kept.set(f"number {rank}", "")
        gathering.new_identity = new_identity  # this process may attach again
        return agreement

    gathering.new_identity = in_order
