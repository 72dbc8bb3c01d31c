"""Exchange of samples between workers that may be at different steps, for data injection.

Data injection adds samples of some workers, the senders of a step, to the batches of all other
workers. Each worker requests the samples from the senders. A sender takes them from its own batch
of that step, and responds

- at once if it has loaded that batch;
- after loading that batch if it has not loaded it yet;
- with nothing if it will never load that batch.

Each worker runs one background thread per other worker (*peer*), which receives the messages of
that peer. So a worker can respond while its training is blocked.

Requests alone could deadlock. A *barrier* is a point, such as a consensus, that no worker passes
before all have reached it. Two workers are *out of phase* if they had taken different numbers of
steps when they reached some barrier. Worker A may then block in its strategy until worker B has
taken more steps, while B cannot take them without the samples of A. To resolve this, B sends the
message BLOCKED when it starts to wait. While the strategy of A may be blocked, A then responds with
nothing, and B trains without the samples.

A message is a header of six integers, followed by the bytes of the samples, if any. Nothing is
pickled.
"""

import functools
import itertools
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from offbeat.data.conversation import HEADER, Key, Kind, Peer, Response
from offbeat.data.samples import Parcel
from offbeat.errors import OffbeatError
from offbeat.transport.handle import Completed, Handle, explained
from offbeat.transport.host import Promise
from offbeat.transport.team import Team


class Exchange:
    """One worker's part in the exchange of samples. Every worker creates one.

    A *parcel* is the serialized samples that this worker sends in one step. A step is identified by
    its ``Key``. A parcel is stored until no peer can request it any more.

    Args:
        team: The workers, with a communicator that nothing else uses. The time in which the
            training waits for samples is added to ``team.account``. The bytes of the samples are
            not added.

    Attributes:
        barriers: Number of barriers that this worker has left so far.
        samples_sent: Number of samples sent so far, counted once per receiver.
        bytes_sent: Number of bytes of these samples.
    """

    def __init__(self, team: Team) -> None:
        self._team, self._messages = team, team.uncounted
        self.samples_sent = self.bytes_sent = self.barriers = 0
        self._lock = threading.Lock()  # never held while waiting
        self._parcels: dict[Key, Parcel] = {}
        self._latest: Key = (-1, -1)  # step of the last published batch
        self._republished: Key | None = None  # ``pending`` of ``start_at``, until it is published
        self._paused = self._blocking = False
        self._steps: dict[int, int] = {}  # steps of this worker, by barrier
        self._ended_epoch = -1
        self._error: Exception | None = None
        self._peers: dict[int, Peer] = {}
        for rank in team.ranks:
            if rank != team.rank:
                self._peers[rank] = Peer(rank, team.host.promise())
        for peer in self._peers.values():
            team.host.spawn(
                functools.partial(self._converse, peer), what=f"data injection with {peer.rank}"
            )

    # -- called by the training ------------------------------------------------------------------

    @property
    def out_of_phase(self) -> list[int]:
        """Ranks of the peers that are out of phase with this worker."""
        return [peer.rank for peer in self._peers.values() if not peer.in_phase]

    def start_at(self, barriers: int, pending: Key | None, out_of_phase: Iterable[int]) -> None:
        """Set the state at the start of training. Call before the first ``publish``.

        Args:
            barriers: Number of barriers in the saved run that this run resumes; 0 for a new run.
            pending: Step whose batch the saved run had loaded but not used, if any. This run loads
                and publishes that batch first.
            out_of_phase: Ranks of peers that are out of phase already.
        """
        with self._lock:
            self.barriers, self._republished = barriers, pending
            for rank in out_of_phase:
                self._peers[rank].in_phase = False

    def publish(self, key: Key, parcel: Parcel | None) -> None:
        """Report that the batch of step ``key`` is loaded, and offer ``parcel`` to the peers.

        None: this worker sends no samples in this step. ``key`` increases from call to call.
        """
        with self._lock:
            self._require_service()
            self._latest, self._republished = key, None
            if parcel is not None:
                self._parcels[key] = parcel
            self._serve()

    def request(self, rank: int, key: Key, epoch: int) -> Handle[Response]:
        """Request the samples of ``rank`` for step ``key``. Does not wait for them.

        ``epoch`` is the number of the current iteration over this worker's loader, from 0.
        """
        what = f"samples of rank {rank} for step {key[1]}"
        with self._lock:
            self._require_service()
            peer = self._peers[rank]
            if key in peer.unrequested or not peer.open:
                return Completed(peer.unrequested.pop(key, None))
            response: Promise[Response] = self._team.host.promise()
            peer.responses[key] = response
            self._send(peer, Kind.REQUEST, key, number=epoch)
            return self._team.communicator.await_promise(response, what=what)

    def report_blocked(self, rank: int, key: Key) -> None:
        """Send BLOCKED to ``rank``, unless its response for step ``key`` has arrived."""
        with self._lock:
            self._require_service()
            peer = self._peers[rank]
            if key in peer.responses and not peer.close_sent:
                self._send(peer, Kind.BLOCKED, key)

    def set_blocking(self, blocking: bool) -> None:
        """Report that the strategy may block from now on (True), or that it may not (False)."""
        with self._lock:
            self._blocking = blocking
            if blocking and self._error is None:
                self._serve()

    def end_epoch(self, epoch: int) -> None:
        """Respond with nothing to requests from epochs up to ``epoch`` for batches not loaded.

        For use without a synchronizer, when this worker's loader has ended. After a call with −1,
        such requests wait for the batches again.
        """
        with self._lock:
            self._ended_epoch = epoch
            self._serve()

    def pause(self, steps: int) -> None:
        """Report to all peers that this worker has reached a barrier, after ``steps`` in total."""
        with self._lock:
            if self._error is None and not self._paused:
                self._paused = True
                self._steps[self.barriers] = steps
                for peer in self._peers.values():
                    self._compare_steps(peer)
                    if peer.open:
                        self._send(peer, Kind.PAUSED, (self.barriers + 1, 0), number=steps)
                self._serve()

    def resume(self) -> None:
        """Leave a barrier. Step numbers restart at 0. All workers must call it equally often."""
        with self._lock:
            self._paused = False
            self.barriers += 1
            if self._error is None:
                self._serve()

    def close(self) -> None:
        """Send CLOSE to all peers, and wait until each has sent CLOSE.

        Before CLOSE, this worker sends each peer the stored samples that the peer may still
        request (none after the peer's CLOSE). The background threads of the peers respond with
        CLOSE at once, so their training may continue.

        Raises:
            CommunicationError: A peer is lost.
        """
        with self._lock:
            self._require_service()
            for peer in self._peers.values():
                self._send_close(peer)
            self._serve()
        for peer in self._peers.values():
            what = f"the end of data injection with rank {peer.rank}"
            error = self._messages.await_promise(peer.closed, what=what).wait()
            if error is not None:
                raise explained(error)

    # -- called by training and background threads, with the lock held ---------------------------

    def _require_service(self) -> None:
        if self._error is not None:
            raise explained(self._error)

    def _send(
        self, peer: Peer, kind: Kind, key: Key, *, number: int = 0, data: Tensor | None = None
    ) -> None:
        size = 0 if data is None else data.numel()
        header = torch.tensor([kind, peer.received, *key, number, size], device="cpu")
        parts = [header] if data is None else [header, data]
        what = f"message about samples to rank {peer.rank}"
        peer.unconfirmed.append(
            [
                self._messages.send(part, destination=peer.rank, tag=i, what=what)
                for i, part in enumerate(parts)
            ]
        )

    def _serve(self) -> None:
        """Respond to requests that need not wait, and delete parcels that no peer can request."""
        for peer in self._peers.values():
            if not peer.close_sent:
                peer.requests = [one for one in peer.requests if not self._respond(peer, *one)]
        least = min((p.next_request for p in self._peers.values() if p.open), default=None)
        for key in [k for k in self._parcels if least is None or k < least]:
            del self._parcels[key]

    def _respond(self, peer: Peer, key: Key, epoch: int) -> bool:
        """Respond to the request for step ``key``. Return False if the response must wait."""
        parcel = self._parcels.get(key)
        if parcel is None and not self._gives_nothing(peer, key, epoch):
            return False
        if parcel is not None:
            self.samples_sent += parcel.samples
            self.bytes_sent += parcel.values_bytes
        self._send(peer, Kind.RESPONSE, key, data=None if parcel is None else parcel.data)
        return True

    def _gives_nothing(self, peer: Peer, key: Key, epoch: int) -> bool:
        """Return True to respond with nothing to a request for step ``key``, False to wait.

        To be called only if no parcel of that step is stored.
        """
        if key == self._republished:
            # This worker publishes this batch soon, even if its step precedes the last barrier.
            return False
        if key <= self._latest:
            # The batch was published without samples, or its parcel has been deleted.
            return True
        if key[0] < self.barriers:
            # The step precedes the last barrier. This worker does not load batches of such steps.
            return True
        if self._paused and key[0] == self.barriers:
            # This worker waits at a barrier and loads no batch before its end. The peer must finish
            # this step to reach the barrier. If it waited for the samples, both would wait forever.
            return True
        if epoch <= self._ended_epoch:
            # Without a synchronizer, the peer's loader may have more batches in this epoch than
            # this worker's loader.
            return True
        # Avoid a deadlock: the strategy of this worker may be blocked until the peer takes more
        # steps, while the peer is blocked until it gets these samples. Workers in phase cannot
        # deadlock: the strategy of this worker waits only for steps of the peer whose samples this
        # worker has already published. So a peer in phase always waits, and its batches do not
        # depend on the speed of the workers.
        return self._blocking and not peer.in_phase and key <= peer.blocked_at

    def _compare_steps(self, peer: Peer) -> None:
        """Clear ``peer.in_phase`` if the workers took different numbers of steps to a barrier."""
        for barrier in [number for number in peer.steps if number in self._steps]:
            if peer.steps.pop(barrier) != self._steps[barrier]:
                peer.in_phase = False

    def _send_close(self, peer: Peer) -> None:
        """Send CLOSE, after the parcels that the peer may still request."""
        if not peer.close_sent:
            if not peer.close_received:
                for key in sorted(k for k in self._parcels if k >= peer.next_request):
                    self._respond(peer, key, 0)
            self._send(peer, Kind.CLOSE, (0, 0))
            peer.close_sent = True
            peer.requests.clear()

    # -- background threads, one per peer --------------------------------------------------------

    def _converse(self, peer: Peer) -> None:
        """Receive the messages of one peer until its CLOSE."""
        try:
            while not peer.close_received:
                self._receive_message(peer)
            # These waits end, because the peer receives all messages up to this worker's CLOSE.
            for handle in itertools.chain(*peer.unconfirmed):
                handle.wait()
            peer.closed.fulfil(None)
        except Exception as error:  # ``_require_service`` raises it in the training thread
            self._fail(error)

    def _receive_message(self, peer: Peer) -> None:
        header = torch.zeros(HEADER, dtype=torch.int64, device="cpu")
        what = f"a message of rank {peer.rank} about samples"
        self._receive(header, peer, 0, what, patient=True)
        kind, received, barriers, step, number, size = header.tolist()
        if not 0 <= kind < len(Kind) or size < 0:
            raise OffbeatError(f"{what} is invalid: {header.tolist()}")
        data = None
        if size:
            data = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._receive(data, peer, 1, f"samples of rank {peer.rank}", patient=False)
        with self._lock:  # the training thread also changes ``unconfirmed``
            arrived = [peer.unconfirmed.popleft() for _ in range(received - peer.confirmed)]
            peer.confirmed = received
        for handle in itertools.chain(*arrived):  # confirmed, so this does not block
            handle.wait()
        with self._lock:
            peer.received += 1
            self._handle(peer, Kind(kind), (barriers, step), number, data)

    def _receive(self, tensor: Tensor, peer: Peer, tag: int, what: str, *, patient: bool) -> None:
        self._messages.receive(tensor, source=peer.rank, tag=tag, what=what, patient=patient).wait()

    def _handle(self, peer: Peer, kind: Kind, key: Key, number: int, data: Tensor | None) -> None:
        """Process a message. ``number`` is an epoch in REQUEST, and the total steps in PAUSED."""
        if kind is Kind.RESPONSE:
            if key in peer.responses:
                peer.responses.pop(key).fulfil(data)
            elif data is not None:
                peer.unrequested[key] = data
            return
        if kind is Kind.REQUEST:
            peer.requests.append((key, number))
            peer.next_request = (key[0], key[1] + 1)
        elif kind is Kind.BLOCKED:
            peer.blocked_at = key
        elif kind is Kind.PAUSED:
            peer.next_request = key
            peer.steps[key[0] - 1] = number
            self._compare_steps(peer)
        else:
            peer.close_received = True
            for response in peer.responses.values():
                response.fulfil(None)
            peer.responses.clear()
            self._send_close(peer)
        self._serve()

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._error = self._error or error
            for peer in self._peers.values():
                for response in peer.responses.values():
                    response.fulfil(error)
                peer.responses.clear()
                if not peer.closed.fulfilled:
                    peer.closed.fulfil(error)
