"""The liveness check: after a failed operation, find out which workers are lost or do not answer.

When an operation fails on one worker, operations soon fail on all workers that communicate, and all
of these run the check. Each sends a message to every other worker and waits for a message from it.
The other worker is

* *alive*: it runs the check, too, so its message arrives.
* *lost*: its process has ended or has closed the group, so the connection breaks.
* *silent*: it computes, is stuck or cannot be reached, so no message arrives in time.
"""

import contextlib
import functools
import queue
import threading
import time
from datetime import timedelta
from typing import Any, Literal

import torch

from offbeat.transport.torch_backend.process_groups import Group, close_connections

LIVENESS_SECONDS = 3.0
"""Time in which a worker must answer. Elastic training uses ``elastic/silence.py`` instead."""
_GRACE_SECONDS = 0.25  # longest duration of the check after a worker was found lost
_MARGIN_SECONDS = 1.0  # delay with which gloo may notice its time limit
PeerState = Literal["alive", "lost", "silent"]


def _message() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


class LivenessCheck:
    """Checks the other workers over a gloo group that is used for nothing else.

    The message of another worker must arrive within ``seconds``.
    """

    def __init__(self, group: Group, seconds: float) -> None:
        self._seconds = seconds
        self._group: Group | None = group
        self._sends: list[Any] = []  # gloo may drop a send whose future is garbage-collected
        self._threads: list[threading.Thread] = []

    def close(self) -> None:
        """Close the group. Workers that check this one later find it lost."""
        group, self._group = self._group, None
        if group is not None and any(thread.is_alive() for thread in self._threads):
            close_connections(group)  # at exit, Python would abort if a thread were inside gloo
        for thread in self._threads:
            thread.join(self._seconds)
        self._sends.clear()

    def lost_and_silent(self) -> tuple[list[int], list[int]]:
        """Check all other workers. Return the ranks of the lost and the ranks of the silent ones.

        Blocks for about ``seconds`` at most. Once a worker is found lost, the cause of the failure
        is known, so the check ends 0.25 s later. Workers that have not answered by then count as
        silent. The group stays open, so a worker that checks later still finds this one alive.
        """
        group = self._group
        peers = [] if group is None else [r for r in range(group.size()) if r != group.rank()]
        answers: queue.SimpleQueue[tuple[int, PeerState]] = queue.SimpleQueue()
        for peer in peers:  # one thread each, so that a silent worker does not delay the others
            check = functools.partial(self._check, group, peer, answers)
            thread = threading.Thread(target=check, name=f"liveness of {peer}", daemon=True)
            self._threads.append(thread)
            thread.start()
        lost, silent = list[int](), set(peers)
        deadline = time.perf_counter() + self._seconds + _MARGIN_SECONDS
        with contextlib.suppress(queue.Empty):
            for _ in peers:
                peer, state = answers.get(timeout=max(0.0, deadline - time.perf_counter()))
                if state != "silent":
                    silent.remove(peer)
                if state == "lost":
                    lost.append(peer)
                    deadline = min(deadline, time.perf_counter() + _GRACE_SECONDS)
        return sorted(lost), sorted(silent)

    def _check(
        self, group: Group, peer: int, answers: "queue.SimpleQueue[tuple[int, PeerState]]"
    ) -> None:
        started = time.perf_counter()
        try:
            self._sends.append(group.send([_message()], peer, 0))
            message = group.recv([_message()], peer, 0)
            message.wait(timedelta(seconds=self._seconds))
        except RuntimeError:
            # An error near the time limit is a time-out rather than a broken connection.
            broken = time.perf_counter() - started < 0.9 * self._seconds
            answers.put((peer, "lost" if broken else "silent"))
        else:
            answers.put((peer, "alive"))
