"""Who gives what at which step: samples between workers that are at different steps.

A worker asks a sender for the samples of a step. The sender answers at once if it has loaded the
batch of that step, later if it has not come to the step yet, and with nothing if it will never load
that batch. Beside its training each worker runs one activity for each other worker, which takes
that worker's questions, answers and goodbye. An activity never waits for the training, so questions
are answered whatever the training is doing.

That alone could deadlock. Workers that took different numbers of steps before a meeting are out of
phase: worker A may wait in its strategy until worker B has taken more steps, while B waits for A's
samples to take them. So B tells A that it is waiting (HURRY), and A, as long as its strategy is at
work, answers such a worker with nothing instead of keeping it waiting.

A message is a header of six numbers; in an answer the bytes of the samples follow. Nothing is
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

from offbeat.data.samples import Parcel
from offbeat.errors import OffbeatError
from offbeat.transport.handle import Completed, Handle, explained
from offbeat.transport.host import Promise
from offbeat.transport.team import Team

Key: TypeAlias = tuple[int, int]
"""A step: how often all workers had met before (``Exchange.back``), and its number since then."""
Answer: TypeAlias = Tensor | Exception | None
"""The bytes of a parcel, the error to raise, or None if the sender gives nothing at that step."""

_HEADER = 6  # kind, messages received so far, key (two numbers), epoch or steps, bytes that follow


class _Kind(IntEnum):
    """What a message says."""

    ASK = 0  # for the samples of a step
    HURRY = 1  # the training waits for the samples of a step asked for before
    ANSWER = 2  # the samples of a step, or that there are none
    AWAY = 3  # the sender loads no batch before the next meeting
    LEAVE = 4  # the sender's last message


@dataclass
class _Peer:
    """What this worker knows of another one.

    Attributes:
        rank: The peer's rank.
        farewell: Fulfilled when the peer has left and has received this worker's LEAVE, or with the
            error that ended the conversation.
        sent: Handles of the messages to the peer that it has not confirmed yet, oldest first. Gloo
            may lose a message whose handle is dropped too early.
        settled: How many messages to the peer it has confirmed.
        received: How many messages of the peer have arrived; every header to it confirms them.
        wanted: The peer will not ask for any step before this one.
        asked: The peer's questions without an answer yet: the step, and the peer's epoch at it.
        blocked: The latest step for which the peer has sent HURRY.
        steps: How many steps the peer had taken at each meeting that this worker has not come to.
        in_phase: Whether the peer had taken as many steps as this worker at every meeting so far.
        answers: This worker's questions to the peer that are still open, by step.
        parting_gifts: Samples that the peer sent unasked before it left, by step.
        silent: Whether this worker has sent LEAVE, after which it sends the peer nothing.
        gone: Whether the peer has sent LEAVE.
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
    parting_gifts: dict[Key, Tensor] = field(default_factory=dict)
    silent: bool = False
    gone: bool = False


class Exchange:
    """This worker's end of the conversations. All workers make one alike; it is no collective.

    Args:
        team: The workers, over a communicator that nothing else uses. Waiting for samples counts as
            waiting; the bytes of samples do not count as those of the training.

    Attributes:
        samples_sent: Samples handed to others, each as often as it was sent.
        bytes_sent: The bytes of these samples.

    *Memory*: a parcel is kept until every other worker has asked for its step or a later one, or
    loads nothing any more.
    """

    def __init__(self, team: Team) -> None:
        self._team, self._messages = team, team.uncounted
        self.samples_sent = self.bytes_sent = 0
        self._lock = threading.Lock()  # never held while waiting
        self._parcels: dict[Key, Parcel] = {}
        self._latest: Key = (-1, -1)  # the last step whose batch was published
        self._meeting = 0
        self._owed: Key | None = None  # a step of before a checkpoint that is published first
        self._away = self._busy = False
        self._steps: dict[int, int] = {}  # taken by this worker before each meeting
        self._ended_epoch = -1
        self._error: Exception | None = None
        self._peers: dict[int, _Peer] = {}
        for rank in team.ranks:
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
        """Ranks that had taken another number of steps than this one at some meeting."""
        return [peer.rank for peer in self._peers.values() if not peer.in_phase]

    def start_at(self, meeting: int, owed: Key | None, out_of_phase: Iterable[int]) -> None:
        """Continue a run that has had ``meeting`` meetings, before anything is published.

        Args:
            meeting: How many.
            owed: The step to be published first; it may lie before the last meeting. None: the next
                one.
            out_of_phase: As the property of this name was.
        """
        with self._lock:
            self._meeting, self._owed = meeting, owed
            for rank in out_of_phase:
                self._peers[rank].in_phase = False

    def publish(self, key: Key, parcel: Parcel | None) -> None:
        """Say that the batch of step ``key`` is loaded, and give ``parcel`` of it, or nothing.

        Each call has a larger key than the one before.
        """
        with self._lock:
            self._require_service()
            self._latest, self._owed = key, None
            if parcel is not None:
                self._parcels[key] = parcel
            self._review()

    def ask(self, rank: int, key: Key, epoch: int) -> Handle[Answer]:
        """Ask ``rank`` for its samples of step ``key``, which lies in this worker's ``epoch``."""
        what = f"samples of rank {rank} for step {key[1]}"
        with self._lock:
            self._require_service()
            peer = self._peers[rank]
            if key in peer.parting_gifts or peer.gone or peer.silent:
                return Completed(peer.parting_gifts.pop(key, None))
            answer: Promise[Answer] = self._team.host.promise()
            peer.answers[key] = answer
            self._send(peer, _Kind.ASK, key, number=epoch)
            return self._team.communicator.await_promise(answer, what=what)

    def hurry(self, rank: int, key: Key) -> None:
        """Tell ``rank`` that the training waits for its samples of step ``key``."""
        with self._lock:
            self._require_service()
            peer = self._peers[rank]
            if key in peer.answers and not peer.silent:
                self._send(peer, _Kind.HURRY, key)

    def busy(self, busy: bool) -> None:
        """Note whether the strategy is at work, where it may wait for other workers."""
        with self._lock:
            self._busy = busy
            if busy and self._error is None:
                self._review()

    def end_epoch(self, epoch: int) -> None:
        """Say that this worker loads no more batches in ``epoch`` and those before.

        −1 takes it back: an epoch has begun.
        """
        with self._lock:
            self._ended_epoch = epoch
            self._review()

    def away(self, steps: int) -> None:
        """Say that this worker has taken ``steps`` and loads nothing before the next meeting."""
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
        """Count a meeting of all workers; steps begin at 0 again. All workers call it as often."""
        with self._lock:
            self._away = False
            self._meeting += 1
            if self._error is None:
                self._review()

    def leave(self) -> None:
        """Say goodbye to all other workers, and wait until they know.

        They answer with a goodbye, and may go on among themselves. The samples that they may still
        ask for are sent before.

        Raises:
            CommunicationError: another worker is lost.
        """
        with self._lock:
            self._require_service()
            for peer in self._peers.values():
                self._say_goodbye(peer)
            self._review()
        for peer in self._peers.values():
            what = f"the goodbye of rank {peer.rank} to data injection"
            error = self._messages.await_promise(peer.farewell, what=what).wait()
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
                    (k, epoch) for k, epoch in peer.asked if not self._answer(peer, k, epoch)
                ]
        least = min(
            (p.wanted for p in self._peers.values() if not (p.gone or p.silent)), default=None
        )
        for key in [k for k in self._parcels if least is None or k < least]:
            del self._parcels[key]

    def _answer(self, peer: _Peer, key: Key, epoch: int) -> bool:
        """Answer the question for step ``key``, if it can be answered yet; whether it could."""
        parcel = self._parcels.get(key)
        if parcel is None and not self._gives_nothing(peer, key, epoch):
            return False  # this worker may still load that batch
        if parcel is not None:
            self.samples_sent += parcel.samples
            self.bytes_sent += parcel.values_bytes
        self._send(peer, _Kind.ANSWER, key, data=None if parcel is None else parcel.data)
        return True

    def _gives_nothing(self, peer: _Peer, key: Key, epoch: int) -> bool:
        """Whether ``peer`` need not wait for samples of step ``key`` that are not here."""
        if key == self._owed:
            # After a checkpoint: the batch is loaded again, although it may lie before the meeting.
            return False
        if key <= self._latest:
            # That batch was published without samples, or with some that are forgotten by now.
            return True
        if key[0] < self._meeting:
            # This worker left these steps behind when all met, and counts anew.
            return True
        if self._away and key[0] == self._meeting:
            # It is in consensus() or at its end. The peer comes to the meeting only after its own
            # last steps, so to wait for a batch that is loaded after the meeting is a deadlock.
            return True
        if epoch <= self._ended_epoch:
            # Without a synchronizer: this worker's loader was shorter and is exhausted.
            return True
        # The strategy here may be waiting for steps that the peer takes only with these samples.
        # Never in phase: there the strategy waits for nothing that the peer could not have done,
        # and batches must not depend on who is faster.
        return self._busy and not peer.in_phase and key <= peer.blocked

    def _compare(self, peer: _Peer) -> None:
        """Compare the steps both had taken at each meeting to which both have come."""
        for meeting in [m for m in peer.steps if m in self._steps]:
            if peer.steps.pop(meeting) != self._steps[meeting]:
                peer.in_phase = False

    def _say_goodbye(self, peer: _Peer) -> None:
        if not peer.silent:
            for key in sorted(k for k in self._parcels if k >= peer.wanted and not peer.gone):
                self._answer(peer, key, 0)
            self._send(peer, _Kind.LEAVE, (0, 0))
            peer.silent = True
            peer.asked.clear()

    # -- beside the worker -------------------------------------------------------------------

    def _converse(self, peer: _Peer) -> None:
        """Take the messages of one other worker until it leaves."""
        try:
            while not peer.gone:
                self._take(peer)
            for handles in peer.sent:  # the peer receives all, as the last one is this LEAVE
                for handle in handles:
                    handle.wait()
            peer.farewell.fulfil(None)
        except Exception as error:  # no caller is here to raise it: those who wait for answers do
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
        with self._lock:  # the training may be appending to peer.sent
            arrived = [peer.sent.popleft() for _ in range(received - peer.settled)]
            peer.settled = received
        for handle in itertools.chain(*arrived):  # confirmed by the peer, so they end at once
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
                peer.parting_gifts[key] = data
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
