"""Text about the progress of a training run: speed, waiting, sent data and the time left."""

import math
import time

from offbeat.lab.events import Step
from offbeat.lab.job import Job
from offbeat.lab.methods.registry import is_baseline
from offbeat.lab.probe.tables import show_rate


class ProgressLine:
    """Describes the progress of one run in a line of text.

    The share of time spent waiting and the rate of sending are those of rank 0 since the line
    before. They are left out for baselines, which do not measure them. The time left is wall-clock
    time, with evaluations. It assumes that the run continues at its mean speed since the first
    update.

    Args:
        job: Configuration of the run.
        steps: Number of steps of each worker.
        period_seconds: Least wall-clock time between two lines.
    """

    def __init__(self, job: Job, steps: int, period_seconds: float) -> None:
        self._job, self._steps, self._period = job, steps, period_seconds
        self._first: tuple[float, Step] | None = None  # wall-clock time, step
        self._last: tuple[float, Step] | None = None  # of the newest line
        self._loss = ""

    def update(self, step: Step) -> str | None:
        """Return a line such as "step 120 of 2700, loss 0.43, …", or None if it is not due."""
        now = time.monotonic()
        if step.loss is not None:
            self._loss = f"loss {step.loss:.4g}"
        if self._first is None or self._last is None:
            self._first = self._last = now, step
            return None
        if now < self._last[0] + self._period:
            return None
        before, self._last = self._last[1], (now, step)
        parts = [f"step {step.step} of {self._steps}", self._loss]
        seconds = step.seconds - before.seconds
        if seconds > 0 and not is_baseline(self._job.strategy):
            waited = step.wait_seconds - before.wait_seconds
            sent = step.payload_bytes - before.payload_bytes
            parts += [f"waiting {waited / seconds:.0%}", f"sending {show_rate(sent / seconds)}"]
        start, first = self._first
        done = self._done(step)
        since_first = done - self._done(first)
        if since_first > 0:
            parts.append(show_time_left((now - start) * (1 - done) / since_first))
        return ", ".join(filter(None, parts))

    def _done(self, step: Step) -> float:
        """Return the share of the run that is done, in [0, 1]."""
        limit = self._job.max_seconds or math.inf
        return min(1.0, max(step.step / self._steps, step.seconds / limit))


def show_time_left(seconds: float) -> str:
    """Return ``"about 4 min left"`` for 250."""
    return f"about {show_duration(seconds)} left"


def show_duration(seconds: float) -> str:
    """Return ``"4 min"`` for 250, rounded to seconds, minutes or tenths of an hour."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    if seconds < 59.5 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
