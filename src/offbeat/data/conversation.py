"""The conversation of a worker with one other worker about samples, for data injection.

``offbeat.data.exchange`` explains the messages.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from torch import Tensor

from offbeat.transport.handle import Handle
from offbeat.transport.host import Promise

Key: TypeAlias = tuple[int, int]
"""Identity of a step: number of barriers before it, and number of steps since the last barrier."""
Response: TypeAlias = Tensor | Exception | None
"""Bytes of the samples, None if the peer sends none, or the error that prevents a response."""

# A header contains the kind, the number of messages received so far from the addressee, the two
# numbers of the key, an epoch or a number of steps, and the number of bytes that follow.
HEADER = 6


class Kind(IntEnum):
    """Kind of a message. Its *author* is the worker that sends it."""

    REQUEST = 0  # requests the samples of a step
    BLOCKED = 1  # the training of the author waits for the response to its request
    RESPONSE = 2  # contains the samples of a step, or nothing
    PAUSED = 3  # the author has reached a barrier, where it loads no batches
    CLOSE = 4  # the last message of the author


@dataclass
class Peer:
    """State of the conversation with one other worker.

    Attributes:
        closed: Promise of the end of the conversation: None, or the error that ended it.
        unconfirmed: Handles of the messages that the peer has not confirmed yet, oldest first. They
            are stored because Gloo may lose a message whose handle is dropped too early.
        confirmed: Number of messages that the peer has confirmed.
        received: Number of messages received from the peer. Every header to the peer contains this
            number, which confirms these messages.
        next_request: Smallest step that the peer may still request.
        requests: Requests of the peer without a response: pairs of the step and the peer's epoch.
        blocked_at: Latest step for which the peer has sent BLOCKED.
        steps: Total number of steps of the peer when it reached a barrier, by barrier. Contains
            only barriers that this worker has not reached yet.
        in_phase: True if the peer had taken as many steps as this worker at every barrier so far.
        responses: Promises of the responses that this worker waits for, by step.
        unrequested: Samples that the peer sent without a request, just before its CLOSE, by step.
    """

    rank: int
    closed: Promise[Exception | None]
    unconfirmed: deque[list[Handle[Tensor]]] = field(default_factory=deque)
    confirmed: int = 0
    received: int = 0
    next_request: Key = (0, 0)
    requests: list[tuple[Key, int]] = field(default_factory=list)
    blocked_at: Key = (-1, -1)
    steps: dict[int, int] = field(default_factory=dict)
    in_phase: bool = True
    responses: dict[Key, Promise[Response]] = field(default_factory=dict)
    unrequested: dict[Key, Tensor] = field(default_factory=dict)
    close_sent: bool = False
    close_received: bool = False

    @property
    def open(self) -> bool:
        """True until either side has sent CLOSE."""
        return not (self.close_sent or self.close_received)
