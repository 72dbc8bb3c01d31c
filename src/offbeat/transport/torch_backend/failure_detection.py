"""The liveness check: after a failed operation, find out which workers are lost or do not answer.

An operation that fails on one worker soon fails on all workers that communicate, so these all run
the check. Each of them sends a message to every other worker, which is in one of three states:

* *alive*: The worker runs the check, too, so its message arrives at once.
* *lost*: The worker's process has ended or closed the group, so the connection breaks.
* *silent*: The worker computes, is stuck or cannot be reached, so no message arrives in time. If
  the connection breaks only near the time limit, the worker also counts as silent.
"""

import queue
import threading
import time
from datetime import timedelta
from typing import Any, Literal

import torch

from offbeat.transport.torch_backend.process_groups import Group, close_connections

_GRACE_SECONDS = 0.25  # duration of the check after the first worker was found lost
_MARGIN_SECONDS = 1.0  # delay with which gloo may notice its time limit
PeerState = Literal["alive", "lost", "silent"]


class LivenessCheck:
    """Checks the other workers over a gloo group that is used for nothing else.

    Args:
        group: A gloo group of all workers.
        seconds: Time in which the message of another worker must arrive.
    """

    def __init__(self, group: Group, seconds: float) -> None:
        self._seconds = seconds
        self._group: Group | None = group
        self._sends: list[Any] = []  # gloo may drop a send whose handle is garbage-collected
        self._threads: list[threading.Thread] = []

    def close(self) -> None:
        """Close the group. Workers that check this one from now on find it lost."""
        group, self._group = self._group, None
        if group is not None and any(thread.is_alive() for thread in self._threads):
            close_connections(group)  # at exit, Python would abort if a thread were inside gloo
        for thread in self._threads:
            thread.join(self._seconds)
        self._sends.clear()

    def missing(self) -> tuple[list[int], list[int]]:
        """Check all other workers. Return the ranks of the lost and the ranks of the silent ones.

        Blocks until all workers have answered or are lost, or for about ``seconds``. When a worker
        is found lost, blocks for at most 0.25 s more, because the cause of the failure is known.
        Workers that have not answered by then count as silent. The threads of the check continue,
        so that a worker that checks later still finds this one alive.
        """
        group = self._group
        peers = [] if group is None else [r for r in range(group.size()) if r != group.rank()]
        answers: queue.SimpleQueue[tuple[int, PeerState]] = queue.SimpleQueue()
        for peer in peers:  # a thread for each, so that a silent worker does not delay the others
            thread = threading.Thread(
                target=self._check, args=(group, peer, answers), name=f"liveness of {peer}"
            )
            thread.daemon = True
            self._threads.append(thread)
            thread.start()
        states: dict[int, PeerState] = {}
        deadline = time.perf_counter() + self._seconds + _MARGIN_SECONDS
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
            self._sends.append(group.send([torch.ones(1)], peer, 0))
            message = group.recv([torch.zeros(1)], peer, 0)
            message.wait(timedelta(seconds=self._seconds))
        except RuntimeError:
            broken = time.perf_counter() - started < 0.9 * self._seconds
            answers.put((peer, "lost" if broken else "silent"))
        else:
            answers.put((peer, "alive"))
