"""The running totals of one worker, and one telemetry record per step."""

import contextlib
from collections.abc import Iterator

from offbeat.averaging import Worker
from offbeat.telemetry import Records, Stats, open_sinks


class StatsRecorder:
    """Adds each step of a worker to its ``Stats`` and writes the step's record.

    The time between the ends of two steps is computing time, except for the time blocked in
    communication and the time inside ``paused``.

    Args:
        worker: The worker.
        log: Destination of the records; see ``attach``.

    Attributes:
        stats: The totals. Loading a checkpoint replaces them.
    """

    def __init__(self, worker: Worker, log: object) -> None:
        self._worker, self._member = worker, worker.team.member
        self._host, self._account = worker.team.host, worker.team.account
        self.stats = Stats(details=worker.details)
        self._records = Records(open_sinks(log, rank=self._member), rank=self._member)
        self.restart()

    def restart(self) -> None:
        """Start to measure the next step now. Time and bytes since the last step do not count."""
        self._clock = self._host.now()
        self._counted = (self._account.wait_seconds, self._account.payload_bytes)

    def exclude(self, seconds: float) -> None:
        """Exclude ``seconds`` of the time since the last step from its computing time."""
        self._clock += seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context from computing time."""
        start = self._host.now()
        try:
            yield
        finally:
            self.exclude(self._host.now() - start)

    def record(self, values: dict[str, object]) -> None:
        """Add ``values`` to the next record; see ``Synchronizer.record``."""
        self._records.add(values)

    def record_loss(self, loss: object) -> None:
        """Add the loss that a closure returned, unless it is something other than a number."""
        with contextlib.suppress(TypeError):
            self._records.add({"loss": loss})

    def completed(self, *, synced: bool) -> None:
        """Count a completed step and write its record."""
        stats, worker = self.stats, self._worker
        start, before = self._clock, self._counted
        self.restart()
        waited, sent = self._counted[0] - before[0], self._counted[1] - before[1]
        computed = max(0.0, self._clock - start - waited)
        stats.steps += 1
        stats.syncs += synced
        stats.wait_seconds += waited
        stats.compute_seconds += computed
        stats.payload_bytes += sent
        more, worker.record = worker.record, {}
        decision = "sync" if synced else "local"
        self._records.write(stats.steps, self._member, decision, computed, waited, sent, more=more)

    def finished(self) -> None:
        """Add the waiting time and bytes of ``finish`` to the totals; they belong to no step."""
        waited, sent = self._counted
        self.stats.wait_seconds += self._account.wait_seconds - waited
        self.stats.payload_bytes += self._account.payload_bytes - sent

    def close(self) -> None:
        """Close the sinks."""
        self._records.close()
