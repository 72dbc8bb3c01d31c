"""Failure detection after a failed operation: which peers are lost, and which do not answer."""

import queue
import threading
import time
from datetime import timedelta
from typing import Any, Literal

import torch

from offbeat.transport.torch_backend.process_groups import Group, close_connections

_GRACE_SECONDS = 0.25  # time for further peers to be found lost, once one is
PeerState = Literal["alive", "lost", "silent"]


class LivenessCheck:
    """Exchanges one message with every peer, over a gloo group that is used for nothing else.

    All workers run the check when an operation fails. A peer that is in the check, too, answers
    at once. A peer that computes is silent. The connection to a dead peer breaks.

    Args:
        group: A gloo group of all workers.
        seconds: Time in which a peer must answer.
    """

    def __init__(self, group: Group, seconds: float) -> None:
        self._seconds = seconds
        self._group: Group | None = group
        self._messages: list[Any] = []  # gloo may drop a send whose handle is garbage-collected
        self._threads: list[threading.Thread] = []

    def close(self) -> None:
        """Close the group. Peers that check this worker from now on find it lost."""
        group, self._group = self._group, None
        if group is not None and any(thread.is_alive() for thread in self._threads):
            close_connections(group)  # Python would abort with a thread inside gloo
        for thread in self._threads:
            thread.join(self._seconds)
        self._messages.clear()

    def missing(self) -> tuple[list[int], list[int]]:
        """Return the ranks of the lost peers and those of the silent peers.

        Blocks for up to ``seconds`` if no peer is lost. Once one is, it returns within a fraction
        of a second, because the silent peers no longer matter. Threads continue to exchange
        messages with these, so that they in turn find this worker alive.
        """
        group = self._group
        peers = [] if group is None else [r for r in range(group.size()) if r != group.rank()]
        answers: queue.SimpleQueue[tuple[int, PeerState]] = queue.SimpleQueue()
        for peer in peers:  # one thread each: the time-out of one must not delay another
            thread = threading.Thread(
                target=self._check, args=(group, peer, answers), name=f"liveness of {peer}"
            )
            thread.daemon = True
            self._threads.append(thread)
            thread.start()
        states: dict[int, PeerState] = {}
        deadline = time.perf_counter() + self._seconds + 1.0
        while len(states) < len(peers):
            try:
                peer, state = answers.get(timeout=max(0.0, deadline - time.perf_counter()))
            except queue.Empty:
                break
            states[peer] = state
            if state == "lost":
                deadline = min(deadline, time.perf_counter() + _GRACE_SECONDS)
        return (
            [peer for peer in peers if states.get(peer) == "lost"],
            [peer for peer in peers if states.get(peer, "silent") == "silent"],
        )

    def _check(
        self, group: Group, peer: int, answers: "queue.SimpleQueue[tuple[int, PeerState]]"
    ) -> None:
        started = time.perf_counter()
        try:
            self._messages.append(group.send([torch.ones(1)], peer, 0))
            answer = group.recv([torch.zeros(1)], peer, 0)
            answer.wait(timedelta(seconds=self._seconds))
        except RuntimeError:
            broken = time.perf_counter() - started < 0.9 * self._seconds
            answers.put((peer, "lost" if broken else "silent"))
        else:
            answers.put((peer, "alive"))
