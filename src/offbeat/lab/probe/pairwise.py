"""Latency and bandwidth of the link between two workers: the measuring side and the answering side.

Both figures follow the simulator's model, in which a message takes latency + bytes / bandwidth, so
that they can be used there directly.

Protocol: the measuring side sends an 8-byte request with the size of the payload that follows (0: a
ping; −1: end). The other side answers each request and each payload with 8 bytes. Each receive is
posted before the peer sends: otherwise the sender would first wait for gloo's notification that the
receiver is ready, which would add to the measured time.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from offbeat.lab.probe.result import Pair
from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Handle
from offbeat.units import show_bytes

PINGS = (5, 100)
"""Minimum and maximum number of messages for a latency, after some warm-up messages."""
PING_SHARE = 0.15
"""Share of the available time for them."""
END = -1
"""Request that ends a measurement."""

_FIRST_BYTES = 16384
_GROWTH = 4  # factor between two sizes
_MOST_TRANSFERS = 20  # of the final size
_REQUEST, _ANSWER, _PAYLOAD = 1, 2, 3  # tags


class Link:
    """The measuring side of a link. The other side runs ``serve``.

    Args:
        communicator: Communicator of both workers.
        peer: Rank of the other worker.
        payload: Bytes to send. A message is a prefix of them.
    """

    def __init__(self, communicator: Communicator, peer: int, payload: Tensor) -> None:
        self._communicator, self._peer, self._payload = communicator, peer, payload
        self._request, self._answer = torch.zeros(2, 1, dtype=torch.int64)

    def _round_trip(self, tensor: Tensor, tag: int, what: str) -> float:
        """Send ``tensor`` and return the seconds until its answer."""
        text = f"{what} rank {self._peer}"
        answer = self._communicator.receive(
            self._answer, source=self._peer, tag=_ANSWER, what=f"answer to {text}"
        )
        start = time.perf_counter()
        sent = self._communicator.send(tensor, destination=self._peer, tag=tag, what=text)
        answer.wait()
        seconds = time.perf_counter() - start
        sent.wait()
        return seconds

    def _ping(self, payload_bytes: int = 0) -> float:
        return self._round_trip(self._request.fill_(payload_bytes), _REQUEST, "ping to")

    def _transfer(self, size: int) -> float:
        self._ping(size)  # afterwards the receiver has posted its receive
        return self._round_trip(self._payload[:size], _PAYLOAD, f"{show_bytes(size)} to")

    def measure(self, seconds: float) -> Pair:
        """Measure latency and bandwidth in about ``seconds``."""
        self._ping()
        deadline = time.perf_counter() + PING_SHARE * seconds
        trips: list[float] = []
        least, most = PINGS
        while len(trips) < least or (len(trips) < most and time.perf_counter() < deadline):
            trips.append(self._ping())
        size, times = repeat(self._transfer, self._payload.numel(), (1 - PING_SHARE) * seconds)
        median = statistics.median(times)
        self._communicator.send(
            self._request.fill_(END), destination=self._peer, tag=_REQUEST, what="end of the pings"
        ).wait()
        return Pair(
            source=self._communicator.rank,
            destination=self._peer,
            latency_seconds=statistics.median(trips) / 2,
            # The shortest trip is subtracted: on a busy host the median trip is mostly the wait for
            # a processor, which overlaps with a long message. The lower bound covers messages that
            # take hardly longer than a ping.
            bytes_per_second=size / max(median - min(trips), median / 2),
            message_bytes=size,
            repetitions=len(times),
        )


def serve(communicator: Communicator, source: int, scratch: Tensor) -> None:
    """Answer the requests and payloads of rank ``source`` until it sends ``END``."""
    request, answer = torch.zeros(2, 1, dtype=torch.int64)

    def listen() -> Handle[Tensor]:
        what = f"ping of rank {source}"
        return communicator.receive(request, source=source, tag=_REQUEST, what=what)

    def reply() -> None:
        what = f"answer to rank {source}"
        communicator.send(answer, destination=source, tag=_ANSWER, what=what).wait()

    handle = listen()
    while True:
        handle.wait()
        size = int(request.item())
        if size == END:
            return
        payload = None
        if size:
            what = f"{show_bytes(size)} of rank {source}"
            payload = communicator.receive(scratch[:size], source=source, tag=_PAYLOAD, what=what)
        handle = listen()
        reply()
        if payload is not None:
            payload.wait()
            reply()


def repeat(
    transfer: Callable[[int], float], most_bytes: int, seconds: float
) -> tuple[int, list[float]]:
    """Transfer growing messages as long as three of the next size fit in ``seconds``, then repeat.

    Args:
        transfer: Function that transfers a number of bytes and returns the seconds.
        most_bytes: Maximum size.
        seconds: Available time.

    Returns:
        The final size in bytes, and the seconds of each message of that size except the first,
        which warmed up the connection.
    """
    deadline = time.perf_counter() + seconds
    size = min(_FIRST_BYTES, most_bytes)
    taken = transfer(size)
    while size < most_bytes and time.perf_counter() + 3 * _GROWTH * taken <= deadline:
        size = min(_GROWTH * size, most_bytes)
        taken = transfer(size)
    times = [transfer(size)]
    while len(times) < _MOST_TRANSFERS and time.perf_counter() + times[-1] <= deadline:
        times.append(transfer(size))
    return size, times
