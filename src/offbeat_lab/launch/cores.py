"""The cores of this machine, divided among worker processes."""

import os

import torch


def share_cores(workers: int, rank: int | None = None) -> None:
    """Limit this process to its share of this machine's cores.

    Torch gets ⌊cores / workers⌋ threads, at least 1. On Linux, a process with a ``rank`` is also
    pinned to its cores: with 8 cores and 4 workers, rank 1 runs on cores 2 and 3. If there are more
    workers than cores, several share a core. Nothing is pinned if the cores cannot be divided
    evenly. Without pinning, the scheduler may let one busy process run twice as fast as another for
    seconds.

    ``workers`` is the number of worker processes on this machine, ``rank`` the rank of this process
    among them. Without a rank, nothing is pinned.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    torch.set_num_threads(max(1, (len(cores) or os.cpu_count() or 1) // workers))
    if rank is None or not cores or (workers % len(cores) and len(cores) % workers):
        return
    each = max(1, len(cores) // workers)
    first = rank * each % len(cores)
    os.sched_setaffinity(0, cores[first : first + each])
