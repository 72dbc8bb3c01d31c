"""Adds up the totals of one worker and writes a telemetry record for each step."""

import contextlib
from collections.abc import Iterator

from offbeat.averaging import Worker
from offbeat.telemetry import Records, Stats, open_sinks


class StatsRecorder:
    """Adds each step of a worker to its ``Stats`` and writes the step's record.

    The computing time of a step is the time since the end of the previous step, without the time
    blocked in communication and without the time inside ``paused``.

    Attributes:
        stats: The totals. A checkpoint that is loaded replaces them.
        records: Writes the records.
    """

    def __init__(self, worker: Worker, log: object) -> None:
        self._worker, self._member = worker, worker.team.identity
        self._host, self._account = worker.team.host, worker.team.account
        self.stats = Stats(details=worker.details)
        self.records = Records(open_sinks(log, rank=self._member), rank=self._member)
        self.restart()

    def restart(self) -> None:
        """Start the next step now. Time and bytes since the last step are not counted."""
        self._clock = self._host.now()
        self._counted = (self._account.wait_seconds, self._account.payload_bytes)

    def exclude_time(self, seconds: float) -> None:
        """Subtract ``seconds`` from the computing time of the step that is being measured."""
        self._clock += seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count neither time nor bytes inside the context, which may contain another one."""
        clock, start = self._clock, self._host.now()
        try:
            with self._account.paused():  # a wait would otherwise be subtracted twice
                yield
        finally:
            self._clock = clock + self._host.now() - start

    def count_step(self, *, synced: bool) -> None:
        """Count a completed step and write its record.

        ``synced`` is True if a mean of models or gradients took effect in this step.
        """
        stats, worker, account = self.stats, self._worker, self._account
        now, counted = self._host.now(), (account.wait_seconds, account.payload_bytes)
        waited, sent = counted[0] - self._counted[0], counted[1] - self._counted[1]
        computed = max(0.0, now - self._clock - waited)
        self._clock, self._counted = now, counted
        stats.steps += 1
        stats.syncs += synced
        stats.wait_seconds += waited
        stats.compute_seconds += computed
        stats.payload_bytes += sent
        if self.records.sinks:
            decision = "sync" if synced else "local"
            values = stats.steps, self._member, decision, computed, waited, sent
            self.records.write(*values, more=worker.record)
        worker.record = {}

    def count_remainder(self) -> None:
        """Add waiting time and bytes since the last step to the totals, when training ends."""
        waited, sent = self._counted
        self.stats.wait_seconds += self._account.wait_seconds - waited
        self.stats.payload_bytes += self._account.payload_bytes - sent
