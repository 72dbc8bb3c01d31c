"""A quick measurement of all links at once, before and after a training run."""

import statistics
import time

import torch
import torch.distributed as dist

from offbeat.errors import CommunicationError
from offbeat.lab.evaluation import gather
from offbeat.lab.events import LinkSpeed

_LEAST_SECONDS = 0.3  # least duration of a timed message: far above the burst of a limited link
_FIRST_BYTES, _MOST_BYTES = 2**18, 64 * 2**20
_PINGS = 12
_REPETITIONS = 3  # on a busy machine, a stall seldom affects more than one of them


def measure_links() -> LinkSpeed:
    """Measure the links while every worker sends to the next one in a ring. A collective.

    Requires gloo and at least 2 workers. Usually takes two to three seconds.

    The messages grow until one takes 0.3 s or has 64 MiB. Three messages of this size are timed
    until the slowest worker has finished; t is the median. The bandwidth is
    size / max(t − latency, t/2). The latency is the median time of a message of 4 bytes.

    Raises:
        CommunicationError: a worker failed, or did not answer within the group's time-out.
    """
    small = torch.zeros(1)
    trips = [_shift(small) + _shift(small) for _ in range(_PINGS)][2:]  # the first ones connect
    size = _FIRST_BYTES
    while True:
        seconds = _slowest(_shift(torch.zeros(size // 4)))
        if seconds >= _LEAST_SECONDS or size >= _MOST_BYTES:
            break
        size = min(_MOST_BYTES, size * max(2, min(16, int(1.5 * _LEAST_SECONDS / seconds))))
    repeated = [_slowest(_shift(torch.zeros(size // 4))) for _ in range(_REPETITIONS - 1)]
    seconds = statistics.median([seconds, *repeated])
    latency = statistics.median(_gather(statistics.median(trips) / 2))
    return LinkSpeed(size / max(seconds - latency, seconds / 2), latency)


def _shift(tensor: torch.Tensor) -> float:
    """Send ``tensor`` to the next worker, receive the previous one's, and return the seconds."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    start = time.perf_counter()
    try:
        # The receive is posted first, so that the previous worker's send can begin at once.
        receive = dist.irecv(received, (rank - 1) % size)
        for work in (dist.isend(tensor, (rank + 1) % size), receive):
            if work is not None:
                work.wait()
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {rank} was measuring its links, but another worker failed or took longer than "
            f"the time-out, which --timeout raises: {error}"
        ) from error
    return time.perf_counter() - start


def _gather(seconds: float) -> list[float]:
    return gather(seconds, torch.device("cpu"), "the times of all links")


def _slowest(seconds: float) -> float:
    return max(_gather(seconds))
