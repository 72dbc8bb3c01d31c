"""What a worker has spent so far: totals, and a telemetry record a step."""

import contextlib
from collections.abc import Iterator

from offbeat.strategies.base import Worker
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
        self._team, self._worker = worker.team, worker
        self._host, self._account = worker.team.host, worker.team.account
        self.stats = Stats(details=worker.details)
        self._records = Records(open_sinks(log, rank=self._team.member), rank=self._team.member)
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
        stats, worker, now = self.stats, self._worker, self._host.now()
        waited, sent = self._spent()
        computed = max(0.0, now - self._clock - waited)
        self.restart()
        stats.steps += 1
        stats.syncs += synced
        stats.wait_seconds += waited
        stats.compute_seconds += computed
        stats.payload_bytes += sent
        more = dict(worker.record)
        worker.record.clear()
        decision = "sync" if synced else "local"
        self._records.write(
            stats.steps, self._team.member, decision, computed, waited, sent, more=more
        )

    def finished(self) -> None:
        """What the end of training has taken belongs to no step, but to the totals."""
        waited, sent = self._spent()
        self.stats.wait_seconds += waited
        self.stats.payload_bytes += sent

    def _spent(self) -> tuple[float, int]:
        """Seconds waited and bytes sent since the last step."""
        waited, sent = self._seen
        return self._account.wait_seconds - waited, self._account.payload_bytes - sent

    def close(self) -> None:
        """Write what is left."""
        self._records.close()
