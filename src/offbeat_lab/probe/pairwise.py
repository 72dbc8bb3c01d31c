"""Measurement of the latency and bandwidth of the link between two workers.

Latency and bandwidth are defined as in the simulator, where a message takes
latency + bytes / bandwidth. The measured values can therefore be passed to the simulator.

Protocol:

1. The measuring worker sends a request of 8 bytes: the size of the payload that follows. The size
   is 0 for a *ping*, which has no payload, and −1 to end the measurement.
2. The other worker answers with 8 bytes, except to −1.
3. If there is a payload, the measuring worker sends it, and the other worker answers it, too.

Each worker posts its receive before the other one sends. Otherwise the sender would first wait for
gloo's notification that the receiver is ready, and the measured time would include this wait.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Handle
from offbeat.units import show_bytes
from offbeat_lab.probe.result import Pair

_PINGS = (5, 100)  # least and largest number of small messages for the latency
_PING_SHARE = 0.15  # share of the available time for these messages
_END = -1  # request that ends a measurement
_FIRST_BYTES = 16384
_GROWTH = 4  # factor from one message size to the next
_MOST_TRANSFERS = 20  # largest number of timed messages of the final size
_REQUEST, _ANSWER, _PAYLOAD = 1, 2, 3  # tags of the messages


class Link:
    """Measures the link to rank ``peer``, which runs ``serve`` meanwhile.

    Each message is a prefix of ``payload``.
    """

    def __init__(self, communicator: Communicator, peer: int, payload: Tensor) -> None:
        self._communicator, self._peer, self._payload = communicator, peer, payload
        self._request, self._answer = torch.zeros(2, 1, dtype=torch.int64)

    def _round_trip(self, tensor: Tensor, tag: int, what: str) -> float:
        """Send ``tensor`` and return the seconds until the answer."""
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
        self._ping(size)  # when it is answered, the receiver has posted its receive
        return self._round_trip(self._payload[:size], _PAYLOAD, f"{show_bytes(size)} to")

    def measure(self, seconds: float) -> Pair:
        """Measure latency and bandwidth in about ``seconds``."""
        self._ping()
        deadline = time.perf_counter() + _PING_SHARE * seconds
        trips: list[float] = []
        least, most = _PINGS
        while len(trips) < least or (len(trips) < most and time.perf_counter() < deadline):
            trips.append(self._ping())
        size, times = _repeat(self._transfer, self._payload.numel(), (1 - _PING_SHARE) * seconds)
        median = statistics.median(times)
        self._communicator.send(
            self._request.fill_(_END), destination=self._peer, tag=_REQUEST, what="end of the pings"
        ).wait()
        return Pair(
            source=self._communicator.rank,
            destination=self._peer,
            latency_seconds=statistics.median(trips) / 2,
            # Subtract the shortest ping, not the median one. On a busy host the median ping is
            # mostly a wait for a processor, which overlaps with a long transfer. The lower bound
            # median / 2 is for messages that take hardly longer than a ping.
            bytes_per_second=size / max(median - min(trips), median / 2),
            message_bytes=size,
            repetitions=len(times),
        )


def serve(communicator: Communicator, source: int, scratch: Tensor) -> None:
    """Answer the requests and payloads of rank ``source`` until it sends the end."""
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
        if size == _END:
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


def _repeat(
    transfer: Callable[[int], float], most_bytes: int, seconds: float
) -> tuple[int, list[float]]:
    """Find a message size that suits the available time, and measure messages of that size.

    The size starts at 16 KiB. It grows by a factor of 4, up to ``most_bytes``, as long as three
    messages of the next size are expected to fit into the remaining time.

    ``transfer`` transfers a given number of bytes and returns the seconds.

    Returns:
        The final size in bytes, and the seconds of each message of that size except the first,
        which warms up the connection.
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
