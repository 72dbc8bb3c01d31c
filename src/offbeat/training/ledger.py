"""What a worker has spent so far: totals, and a telemetry record a step."""

import contextlib
from collections.abc import Iterator

from offbeat.averaging import Worker
from offbeat.telemetry import Records, Stats, open_sinks


class Ledger:
    """The totals of one worker, which its steps add to.

    Time between two steps is computing, but for what was waited, and what is not the training's.

    Attributes:
        stats: The totals; replaced when a checkpoint is loaded.

    Args:
        worker: Whose.
        log: Where records go; see ``attach``.
    """

    def __init__(self, worker: Worker, log: object) -> None:
        self._worker, self._member = worker, worker.team.member
        self._host, self._account = worker.team.host, worker.team.account
        self.stats = Stats(details=worker.details)
        self._records = Records(open_sinks(log, rank=self._member), rank=self._member)
        self.restart()

    def restart(self) -> None:
        """What was spent up to now belongs to no step."""
        self._clock = self._host.now()
        self._seen = (self._account.wait_seconds, self._account.payload_bytes)

    def passed(self, seconds: float) -> None:
        """Some time is not the training's."""
        self._clock += seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside is not the training's."""
        start = self._host.now()
        try:
            yield
        finally:
            self.passed(self._host.now() - start)

    def record(self, values: dict[str, object]) -> None:
        """For the record of the coming step; see ``Synchronizer.record``."""
        self._records.add(values)

    def record_loss(self, loss: object) -> None:
        """What a closure has returned, if it is a number: the optimizer takes anything."""
        with contextlib.suppress(TypeError):
            self._records.add({"loss": loss})

    def completed(self, *, synced: bool) -> None:
        """A step has ended."""
        stats, worker = self.stats, self._worker
        start, before = self._clock, self._seen
        self.restart()
        waited, sent = self._seen[0] - before[0], self._seen[1] - before[1]
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
        """What the end of training has taken belongs to no step, but to the totals."""
        waited, sent = self._seen
        self.stats.wait_seconds += self._account.wait_seconds - waited
        self.stats.payload_bytes += self._account.payload_bytes - sent

    def close(self) -> None:
        """Write what is left."""
        self._records.close()
