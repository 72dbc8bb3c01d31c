"""Who gives what at which step: parts of batches between workers that are at different steps.

Each worker asks for what it needs; an activity beside the training of each worker, one for each
other worker, takes the questions, the answers and the goodbyes of that one. An answer is given at
once if the step is reached, later if it is not, and is empty if it never will be here. Nobody waits
for anyone inside of these activities, so what the workers do meanwhile does not matter.

Workers that took different numbers of steps before they met are out of phase: one may wait in its
strategy for another to take steps for which the other waits for its samples. So one that waits says
so, and one that is at work in its strategy lets another that is out of phase with it go on without.

A message is a header of six numbers, and after an answer the bytes of the samples. Nothing is
pickled.
"""

import functools
import itertools
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

import torch
from torch import Tensor

from offbeat.data.samples import Part
from offbeat.errors import OffbeatError
from offbeat.fabric import Completed, Handle, Promise, Team, explained

Key: TypeAlias = tuple[int, int]
"""The meeting (see ``Exchange.back``) before a step, and its number since then."""
Answer: TypeAlias = Tensor | Exception | None

_HEADER = 6  # kind, messages received so far, key, epoch or steps, bytes that follow


class _Kind(IntEnum):
    ASK = 0
    HURRY = 1
    ANSWER = 2
    AWAY = 3
    LEAVE = 4


@dataclass
class _Peer:
    """Another worker.

    Attributes:
        rank: Its number.
        farewell: Fulfilled when it has left, and knows that this worker has.
        sent: What it may not have received yet; held until it has, or gloo may lose it.
        settled: Messages that it is known to have received.
        received: Messages received from it.
        wanted: It asks for nothing before this step any more.
        asked: Its questions that have no answer yet, and their epochs.
        blocked: The latest step whose samples it has waited for.
        steps: How many it had taken at each meeting that this worker has not come to.
        in_phase: Whether it had always taken as many as this worker.
        answers: To this worker's questions.
        legacy: What it left unasked, before it goes.
        silent: This worker has sent it the last message, LEAVE.
        gone: It has sent LEAVE.
    """

    rank: int
    farewell: Promise[Exception | None]
    sent: deque[list[Handle[Tensor]]] = field(default_factory=deque)
    settled: int = 0
    received: int = 0
    wanted: Key = (0, 0)
    asked: list[tuple[Key, int]] = field(default_factory=list)
    blocked: Key = (-1, -1)
    steps: dict[int, int] = field(default_factory=dict)
    in_phase: bool = True
    answers: dict[Key, Promise[Answer]] = field(default_factory=dict)
    legacy: dict[Key, Tensor] = field(default_factory=dict)
    silent: bool = False
    gone: bool = False


class Exchange:
    """This worker's end. All workers make it alike, though it is no collective.

    Args:
        team: The workers, with an order of operations for this alone. Waiting for samples counts as
            waiting; their bytes do not count as the training's.

    Attributes:
        samples_sent: Samples handed to others, each as often as it was sent.
        bytes_sent: Their bytes.

    *Memory*: a part is kept until every other worker has asked for it or for a later one, or has
    gone away.
    """

    def __init__(self, team: Team) -> None:
        self._team, self._messages = team, team.uncounted
        self.samples_sent = self.bytes_sent = 0
        self._lock = threading.Lock()  # never held while waiting
        self._parts: dict[Key, Part] = {}
        self._latest: Key = (-1, -1)  # the last step published
        self._meeting = 0
        self._owed: Key | None = None
        self._away = self._busy = False
        self._steps: dict[int, int] = {}  # own ones at each meeting
        self._ended_epoch = -1
        self._error: Exception | None = None
        self._peers: dict[int, _Peer] = {}
        for rank in team.members:
            if rank != team.rank:
                self._peers[rank] = _Peer(rank, team.host.promise())
        for peer in self._peers.values():
            team.host.spawn(
                functools.partial(self._converse, peer), what=f"data injection with {peer.rank}"
            )

    @property
    def meeting(self) -> int:
        """How often all workers have met."""
        return self._meeting

    # -- what the worker does ----------------------------------------------------------------

    @property
    def out_of_phase(self) -> list[int]:
        """Ranks that had not always taken as many steps as this one when all met."""
        return [peer.rank for peer in self._peers.values() if not peer.in_phase]

    def start_at(self, meeting: int, owed: Key | None, out_of_phase: Iterable[int]) -> None:
        """Continue after ``meeting`` meetings; ``owed`` is published first, perhaps of before."""
        with self._lock:
            self._meeting, self._owed = meeting, owed
            for rank in out_of_phase:
                self._peers[rank].in_phase = False

    def publish(self, key: Key, part: Part | None) -> None:
        """This worker has loaded the batch of step ``key``, and gives ``part`` of it, or nothing.

        Keys only rise.
        """
        with self._lock:
            self._require_service()
            self._latest, self._owed = key, None
            if part is not None:
                self._parts[key] = part
            self._review()

    def ask(self, rank: int, key: Key, epoch: int) -> Handle[Answer]:
        """Ask ``rank`` for its part of step ``key``, which is in this worker's ``epoch``.

        The result is the part's bytes, None if it gives none, or the exception to raise.
        """
        what = f"samples of rank {rank} for step {key[1]}"
        with self._lock:
            self._require_service()
            peer = self._peers[rank]
            if key in peer.legacy or peer.gone or peer.silent:
                return Completed(peer.legacy.pop(key, None))
            answer: Promise[Answer] = self._team.host.promise()
            peer.answers[key] = answer
            self._send(peer, _Kind.ASK, key, number=epoch)
            return self._team.fabric.fulfilment(answer, what=what)

    def hurry(self, rank: int, key: Key) -> None:
        """This worker waits for what it has asked ``rank`` for."""
        with self._lock:
            self._require_service()
            peer = self._peers[rank]
            if key in peer.answers and not peer.silent:
                self._send(peer, _Kind.HURRY, key)

    def busy(self, busy: bool) -> None:
        """Whether the strategy is at work."""
        with self._lock:
            self._busy = busy
            if busy and self._error is None:
                self._review()

    def end_epoch(self, epoch: int) -> None:
        """Nothing comes of ``epoch`` any more; −1: all that is asked for will come."""
        with self._lock:
            self._ended_epoch = epoch
            self._review()

    def away(self, steps: int) -> None:
        """This worker, which has taken ``steps``, loads nothing until all have met."""
        with self._lock:
            if self._error is None and not self._away:
                self._away = True
                self._steps[self._meeting] = steps
                for peer in self._peers.values():
                    self._compare(peer)
                    if not (peer.gone or peer.silent):
                        self._send(peer, _Kind.AWAY, (self._meeting + 1, 0), number=steps)
                self._review()

    def back(self) -> None:
        """All have met: steps count from 0 again. All workers must count the same meetings."""
        with self._lock:
            self._away = False
            self._meeting += 1
            if self._error is None:
                self._review()

    def leave(self) -> None:
        """Say goodbye to all and wait until they have heard it. They need not leave, too.

        Parts that they may still ask for go along.

        Raises:
            CommunicationError: one is lost.
        """
        with self._lock:
            self._require_service()
            for peer in self._peers.values():
                self._say_goodbye(peer)
            self._review()
        for peer in self._peers.values():
            what = f"the goodbye of rank {peer.rank} to data injection"
            error = self._messages.fulfilment(peer.farewell, what=what).wait()
            if error is not None:
                raise explained(error)

    # -- what both do, under the lock --------------------------------------------------------

    def _require_service(self) -> None:
        if self._error is not None:
            raise explained(self._error)

    def _send(
        self, peer: _Peer, kind: _Kind, key: Key, *, number: int = 0, data: Tensor | None = None
    ) -> None:
        size = 0 if data is None else data.numel()
        header = torch.tensor([kind, peer.received, *key, number, size])
        parts = [header] if data is None else [header, data]
        what = f"message about samples to rank {peer.rank}"
        peer.sent.append(
            [
                self._messages.send(part, destination=peer.rank, tag=i, what=what)
                for i, part in enumerate(parts)
            ]
        )

    def _review(self) -> None:
        """Answer all questions that can be answered now, and forget what nobody will ask for."""
        for peer in self._peers.values():
            if not peer.silent:
                peer.asked = [
                    (k, epoch) for k, epoch in peer.asked if not self._tell(peer, k, epoch)
                ]
        least = min(
            (p.wanted for p in self._peers.values() if not (p.gone or p.silent)), default=None
        )
        for key in [k for k in self._parts if least is None or k < least]:
            del self._parts[key]

    def _tell(self, peer: _Peer, key: Key, epoch: int) -> bool:
        """Answer one question if it is time; whether it was."""
        part = self._parts.get(key)
        if part is not None:
            self.samples_sent += part.samples
            self.bytes_sent += part.values_bytes
        elif key == self._owed or not (
            key <= self._latest  # forgotten
            or key[0] < self._meeting
            or (self._away and key[0] == self._meeting)
            or epoch <= self._ended_epoch
            or (self._busy and not peer.in_phase and key <= peer.blocked)
        ):
            return False
        self._send(peer, _Kind.ANSWER, key, data=None if part is None else part.data)
        return True

    def _compare(self, peer: _Peer) -> None:
        """Note whether both had taken as many steps at the meetings to which both have come."""
        for meeting in [m for m in peer.steps if m in self._steps]:
            if peer.steps.pop(meeting) != self._steps[meeting]:
                peer.in_phase = False

    def _say_goodbye(self, peer: _Peer) -> None:
        if not peer.silent:
            for key in sorted(key for key in self._parts if key >= peer.wanted and not peer.gone):
                self._tell(peer, key, 0)
            self._send(peer, _Kind.LEAVE, (0, 0))
            peer.silent = True
            peer.asked.clear()

    # -- beside the worker -------------------------------------------------------------------

    def _converse(self, peer: _Peer) -> None:
        """Take the messages of one other worker until it leaves."""
        try:
            while not peer.gone:
                self._take(peer)
            for handles in peer.sent:  # it receives to the last one, which says goodbye
                for handle in handles:
                    handle.wait()
            peer.farewell.fulfil(None)
        except Exception as error:  # raised by whoever needs an answer
            self._fail(error)

    def _take(self, peer: _Peer) -> None:
        header = torch.zeros(_HEADER, dtype=torch.int64)
        what = f"a message of rank {peer.rank} about samples"
        self._receive(header, peer, 0, what, patient=True)
        kind, received, meeting, step, number, size = header.tolist()
        if not 0 <= kind < len(_Kind) or size < 0:
            raise OffbeatError(f"{what} is none: {header.tolist()}")
        data = None
        if size:
            data = torch.empty(size, dtype=torch.uint8)
            self._receive(data, peer, 1, f"samples of rank {peer.rank}", patient=False)
        with self._lock:  # whoever sends notes it under the lock
            arrived = [peer.sent.popleft() for _ in range(received - peer.settled)]
            peer.settled = received
        for handle in itertools.chain(*arrived):  # ends at once
            handle.wait()
        with self._lock:
            peer.received += 1
            self._handle(peer, _Kind(kind), (meeting, step), number, data)

    def _receive(self, tensor: Tensor, peer: _Peer, tag: int, what: str, *, patient: bool) -> None:
        self._messages.receive(tensor, source=peer.rank, tag=tag, what=what, patient=patient).wait()

    def _handle(self, peer: _Peer, kind: _Kind, key: Key, number: int, data: Tensor | None) -> None:
        if kind is _Kind.ANSWER:
            if key in peer.answers:
                peer.answers.pop(key).fulfil(data)
            elif data is not None:
                peer.legacy[key] = data
            return
        if kind is _Kind.ASK:
            peer.asked.append((key, number))
            peer.wanted = (key[0], key[1] + 1)
        elif kind is _Kind.HURRY:
            peer.blocked = key
        elif kind is _Kind.AWAY:
            peer.wanted = key
            peer.steps[key[0] - 1] = number
            self._compare(peer)
        else:
            peer.gone = True
            for answer in peer.answers.values():
                answer.fulfil(None)
            peer.answers.clear()
            self._say_goodbye(peer)
        self._review()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
            for peer in self._peers.values():
                for answer in peer.answers.values():
                    answer.fulfil(error)
                peer.answers.clear()
                if not peer.farewell.fulfilled:
                    peer.farewell.fulfil(error)
