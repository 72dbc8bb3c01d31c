"""Leases ahead of use: a background activity keeps a worker supplied with chunks.

The training thread calls all public methods. At most one background activity runs at a time. It
acknowledges finished chunks and leases new ones, or runs a function for ``call``. So the training
waits for the board only at the start, if a lease takes longer than the batches in hand, for a
checkpoint, and at the end. It waits for ``timeout_seconds`` at most.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import TypeVar

from offbeat.data.leasing.leases import Lease, Leases
from offbeat.errors import CommunicationError, CommunicationTimeout, OffbeatError
from offbeat.transport.host import Promise
from offbeat.transport.team import Team

T = TypeVar("T")
_IN_HAND = 4.0  # batches in hand last at least this many times as long as a lease takes
_CHUNK = 2.0  # a chunk lasts at least this many times as long as a lease takes
_STEP_SECONDS = 0.05  # assumed time of a batch until it was measured
_ROUND_TRIPS = 2  # round trips to the board for a lease
_NEWEST = 0.2  # weight of the newest measurement
_STOP_SECONDS = 5.0  # longest wait for the background activity at the end


class Prefetch:
    """Supplies one worker with chunks.

    Args:
        leases: The leases of this worker.
        team: The workers, for the clock, the threads and the time limit.
        lost: Function that returns the numbers of the workers that were lost so far.

    Attributes:
        step_seconds: Recent mean time of a batch, or an estimate until it was measured.
    """

    def __init__(self, leases: Leases, team: Team, lost: Callable[[], Collection[int]]) -> None:
        self._leases, self._team, self._lost = leases, team, lost
        self._lock = threading.Lock()
        self._ready: deque[Lease] = deque()  # leased and not taken
        self._finished: deque[Lease] = deque()  # to be acknowledged
        self._epoch = 0  # the epoch from which chunks are leased
        self._training_epoch = 0
        self._in_hand = 0  # batches of the taken chunk that are left
        self._running = False
        self._changed: Promise[None] | None = None  # the training waits for it
        self._error: Exception | None = None
        self._used_at: float | None = None
        self.step_seconds, self._lease_seconds = _STEP_SECONDS, 0.0  # recent means
        self._spent_seconds = 0.0  # time of searches without a result since the last lease
        self._measured = False  # True once a step was measured

    # -- called by the training ------------------------------------------------------------------

    def begin(self, epoch: int) -> None:
        """Begin an epoch. ``take`` also returns the chunks of earlier epochs that are ready."""
        with self._lock:
            self._training_epoch, self._epoch = epoch, max(epoch, self._epoch)

    def take(self) -> Lease | None:
        """Return the next chunk to train on, or None if the epoch has no more. May block.

        Raises:
            CommunicationError: The board does not answer.
        """
        while True:
            with self._lock:
                if self._error is not None:
                    raise self._explained(self._error)
                lease = self._pop(self._training_epoch)
                if lease is not None or self._epoch > self._training_epoch:
                    self._in_hand = 0 if lease is None else lease.batches
                    return lease
                changed: Promise[None] = self._team.host.promise()
                self._changed = changed
            self._start()
            start = self._team.host.now()
            self._wait(changed)
            self._team.account.waited(self._team.host.now() - start)
            self._used_at = None

    def drawn(self) -> None:
        """Note that a batch of the taken chunk was drawn, perhaps ahead of use. Never blocks."""
        with self._lock:
            self._in_hand -= 1
        self._start()

    def used(self) -> None:
        """Note that the training loop receives a batch, to measure the time of a batch."""
        now = self._team.host.now()
        if self._used_at is not None and now > self._used_at:
            seconds = now - self._used_at
            self.step_seconds = _mean(self.step_seconds, seconds) if self._measured else seconds
            self._measured = True
        self._used_at = now

    @property
    def least_chunk(self) -> int:
        """Smallest number of batches in a chunk with which leases keep up with the training."""
        return max(1, math.ceil(_CHUNK * self._lease_seconds / self.step_seconds))

    def finish(self, lease: Lease) -> None:
        """Let the next background activity acknowledge a chunk."""
        with self._lock:
            self._finished.append(lease)

    def settle(self) -> None:
        """Wait until all finished chunks are acknowledged and no background activity runs.

        Raises:
            CommunicationError: The board does not answer.
        """
        while True:
            with self._lock:
                if self._error is not None:
                    raise self._explained(self._error)
                if not self._running and not self._finished:
                    return
                changed: Promise[None] = self._team.host.promise()
                self._changed = changed
            self._start()
            self._wait(changed)

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function``, which uses the board, in the background, and return its result. Blocks.

        It calls ``settle`` first, so nothing else uses the leases meanwhile.

        Raises:
            CommunicationError: The board does not answer.
        """
        self.settle()
        results: list[T] = []
        with self._lock:
            changed: Promise[None] = self._team.host.promise()
            self._changed, self._running = changed, True
        self._team.host.spawn(lambda: self._call(function, results), what="leases of data")
        self._wait(changed)
        with self._lock:
            if self._error is not None:
                raise self._explained(self._error)
        return results[0]

    def stop(self) -> None:
        """End the background activity, at the end of training. Never raises."""
        with self._lock:
            self._error = self._error or OffbeatError("the training has ended: attach again")
            if not self._running:
                return
            changed: Promise[None] = self._team.host.promise()
            self._changed = changed
        self._team.host.wait_for(changed, _STOP_SECONDS, "the end of the leases")

    def take_ready(self, last_epoch: int) -> Lease | None:
        """Return a chunk of an epoch up to ``last_epoch`` if one is ready. Never blocks."""
        with self._lock:
            return self._pop(last_epoch)

    def _pop(self, last_epoch: int) -> Lease | None:
        for lease in self._ready:
            if lease.epoch <= last_epoch:
                self._ready.remove(lease)
                return lease
        return None

    def _start(self) -> None:
        """Start the background activity if there is work for it and it does not run."""
        with self._lock:
            if self._running or self._error is not None or not self._has_work():
                return
            self._running = True
        self._team.host.spawn(self._work, what="leases of data")

    def _wait(self, changed: Promise[None]) -> None:
        team = self._team
        seconds = team.communicator.timeout_seconds
        if not team.host.wait_for(changed, seconds, "a lease of data"):
            raise CommunicationTimeout(
                f"rank {team.rank}: leasing data failed: the store of the workers has not answered "
                f"within timeout_seconds={seconds:g}"
            )

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, OffbeatError):
            return error
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return CommunicationError(
            f"rank {self._team.rank}: leasing data failed: the store of the workers does not "
            f"answer ({reason})"
        )

    # -- in the background -----------------------------------------------------------------------

    def _has_work(self) -> bool:
        if self._error is not None:
            return False
        return bool(self._finished) or self._lacks_batches()

    def _lacks_batches(self) -> bool:
        if self._epoch > self._training_epoch + 1:  # one epoch ahead is enough
            return False
        ready = (lease.batches for lease in self._ready if lease.epoch <= self._epoch)
        return self._in_hand + sum(ready) < self._wanted()

    def _wanted(self) -> int:
        """Return the number of batches to have in hand."""
        return max(1, math.ceil(_IN_HAND * self._lease_seconds / self.step_seconds))

    def _work(self) -> None:
        """Acknowledge and lease until there is no work."""
        try:
            while True:
                with self._lock:
                    if not self._has_work():
                        self._running = False
                        self._notify()
                        return
                    finished = list(self._finished)
                    self._finished.clear()
                for lease in finished:
                    self._leases.acknowledge(lease)
                self._leases.lose(self._lost())
                with self._lock:
                    lacks, epoch = self._lacks_batches(), self._epoch
                if lacks:
                    self._lease(epoch)
        except Exception as error:
            with self._lock:
                self._error, self._running = error, False
                self._notify()

    def _call(self, function: Callable[[], T], results: list[T]) -> None:
        """Append the result of ``function`` to ``results``, or store its error."""
        error: Exception | None = None
        try:
            results.append(function())
        except Exception as raised:
            error = raised
        with self._lock:
            self._error, self._running = self._error or error, False
            self._notify()

    def _lease(self, epoch: int) -> None:
        """Lease one chunk, or go to the next epoch if there is none."""
        host = self._team.host
        start = host.now()
        if not self._lease_seconds:  # the plan of the first epoch depends on it
            self._leases.open()
            self._lease_seconds = _ROUND_TRIPS * (host.now() - start)
            start = host.now()
        lease = self._leases.reclaim() or self._leases.lease(epoch)
        if lease is None:
            self._leases.look_again()
            lease = self._leases.reclaim()
        self._spent_seconds += host.now() - start
        with self._lock:
            if lease is None:
                self._epoch = max(self._epoch, epoch + 1)
            else:
                self._lease_seconds = _mean(self._lease_seconds, self._spent_seconds)
                self._spent_seconds = 0.0
                self._ready.append(lease)
            self._notify()

    def _notify(self) -> None:
        """Wake the training if it waits."""
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.fulfil(None)


def _mean(mean: float, value: float) -> float:
    """Return a running mean with the newest value. A single long pause changes it little."""
    return mean + _NEWEST * (min(value, 2 * mean) - mean) if mean else value
