"""How fast the links between real workers are, all at once, from within a run."""

import statistics
import time

import torch
import torch.distributed as dist

from offbeat.errors import CommunicationError
from offbeat.lab.evaluation import gather
from offbeat.lab.events import Measured

ENOUGH_SECONDS = 0.3
"""Messages grow until one takes as long: well beyond what a shaped link lets pass at once."""
MOST_BYTES = 64 * 2**20
_FIRST_BYTES = 2**18
_PINGS = 12
_MESSAGES = 3
"""Of the largest size: a stall of a machine that others use lengthens one of them, seldom two."""


def measure_links() -> Measured:
    """Bandwidth and latency of the ring: all workers send to the next one, at the same time.

    A collective of at least 2 workers over gloo; it takes two to three seconds. The bandwidth is
    that of the slowest worker's largest messages, the median of three, their latency taken off; the
    latency half the median of a small message there and another back.

    Raises:
        CommunicationError: a worker failed, or did not answer within the group's time-out.
    """
    small = torch.zeros(1)
    pings = [_pass_on(small) + _pass_on(small) for _ in range(_PINGS)][2:]  # the first connect
    latency = statistics.median(pings) / 2
    size = _FIRST_BYTES
    while True:
        taken = _slowest(_pass_on(torch.zeros(size // 4)))
        if taken >= ENOUGH_SECONDS or size >= MOST_BYTES:
            break
        size = min(MOST_BYTES, size * max(2, min(16, int(1.5 * ENOUGH_SECONDS / taken))))
    again = [_slowest(_pass_on(torch.zeros(size // 4))) for _ in range(_MESSAGES - 1)]
    taken = statistics.median([taken, *again])
    usual = statistics.median(gather(latency, torch.device("cpu"), "the latencies of all links"))
    return Measured(size / max(taken - usual, taken / 2), usual)


def _pass_on(tensor: torch.Tensor) -> float:
    """Send ``tensor`` to the next worker, take that of the one before; the seconds of both."""
    rank, size = dist.get_rank(), dist.get_world_size()
    taken = torch.empty_like(tensor)
    began = time.perf_counter()
    try:
        # Posted first: of two workers that both send first, one waits for the other's to end.
        coming = dist.irecv(taken, (rank - 1) % size)
        for one in (dist.isend(tensor, (rank + 1) % size), coming):
            if one is not None:
                one.wait()
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {rank} was measuring its links, but another worker failed or took longer than "
            f"the time-out, which --timeout raises: {error}"
        ) from error
    return time.perf_counter() - began


def _slowest(seconds: float) -> float:
    return float(max(gather(seconds, torch.device("cpu"), "the times of all links")))
