"""Measure the link between two workers: the side that sends, and the side that answers.

A message costs latency plus bytes / bandwidth, the formula of the simulator, so the figures can be
given to it as they are.
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
"""How many messages measure a latency, at least and at most, after some that warm up."""
PING_SHARE = 0.15
"""The share of the time that they may take."""
END = -1
"""What a side that directs says when it has done."""

_FIRST_BYTES = 16384  # of the messages, which then grow fourfold
_GROWTH = 4
_MOST_TRANSFERS = 20  # of one size
_ASK, _ANSWER, _PAYLOAD = 1, 2, 3  # tags


def _control() -> tuple[Tensor, Tensor]:
    """The messages of 8 bytes: how many bytes will follow, and the answer."""
    return torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


class Link:
    """The side that measures; ``serve`` runs on the other one.

    Args:
        communicator: Of both.
        peer: Rank of the other side.
        payload: What is sent, bytes; a message is a beginning of it.
    """

    def __init__(self, communicator: Communicator, peer: int, payload: Tensor) -> None:
        self._fabric, self._peer, self._payload = communicator, peer, payload
        self._count, self._answer = _control()

    def _round_trip(self, tensor: Tensor, tag: int, what: str) -> float:
        """Seconds from sending ``tensor`` to the answer."""
        text = f"{what} rank {self._peer}"
        # Posted first: gloo would add the trip in which the receiver says that it is ready.
        answer = self._fabric.receive(
            self._answer, source=self._peer, tag=_ANSWER, what=f"answer to {text}"
        )
        start = time.perf_counter()
        sent = self._fabric.send(tensor, destination=self._peer, tag=tag, what=text)
        answer.wait()
        taken = time.perf_counter() - start
        sent.wait()
        return taken

    def _ping(self, announced_bytes: int = 0) -> float:
        return self._round_trip(self._count.fill_(announced_bytes), _ASK, "ping to")

    def _transfer(self, count: int) -> float:
        self._ping(count)  # now the receiver waits for the payload
        return self._round_trip(self._payload[:count], _PAYLOAD, f"{show_bytes(count)} to")

    def measure(self, seconds: float) -> Pair:
        """Latency and bandwidth, in about ``seconds``."""
        self._ping()
        deadline = time.perf_counter() + PING_SHARE * seconds
        trips: list[float] = []
        least, most = PINGS
        while len(trips) < least or (len(trips) < most and time.perf_counter() < deadline):
            trips.append(self._ping())
        size = self._payload.numel()
        count, times = repeat(self._transfer, size, (1 - PING_SHARE) * seconds)
        taken = statistics.median(times)
        self._fabric.send(
            self._count.fill_(END), destination=self._peer, tag=_ASK, what="end of the pings"
        ).wait()
        return Pair(
            source=self._fabric.rank,
            destination=self._peer,
            latency_seconds=statistics.median(trips) / 2,
            # The shortest trip: on a busy host the median one is mostly the wait for a processor,
            # which a long message hides. The floor: one as short as a ping tells nothing.
            bytes_per_second=count / max(taken - min(trips), taken / 2),
            message_bytes=count,
            repetitions=len(times),
        )


def serve(communicator: Communicator, source: int, scratch: Tensor) -> None:
    """Answer the pings and payloads of ``source`` until it says that it has done."""
    asked, answer = _control()

    def listen() -> Handle[Tensor]:
        return communicator.receive(asked, source=source, tag=_ASK, what=f"ping of rank {source}")

    def reply() -> None:
        what = f"answer to rank {source}"
        communicator.send(answer, destination=source, tag=_ANSWER, what=what).wait()

    ping = listen()
    while True:
        ping.wait()
        count = int(asked.item())
        if count == END:
            return
        what = f"{show_bytes(count)} of rank {source}"
        payload = (
            communicator.receive(scratch[:count], source=source, tag=_PAYLOAD, what=what)
            if count
            else None
        )
        ping = listen()  # before the answer, or the next ping would find nobody waiting
        reply()
        if payload is not None:
            payload.wait()
            reply()


def repeat(
    transfer: Callable[[int], float], most_bytes: int, seconds: float
) -> tuple[int, list[float]]:
    """Transfer messages that grow while three of the next size fit in ``seconds``, then repeat.

    Returns the size reached, in bytes, and the seconds of each message of it but the first, which
    warmed up the connection.
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
