"""Steady state: whether a run repeats itself by now, and from which steps to take its figures.

Without jitter a run is steady when steps repeat exactly: a window of p steps has come three times,
each step with the same seconds, bytes and backlog of the link, and a mean was taken in it; and it
goes on like that for eight windows more. The backlog is compared because a queue that grows slowly
looks steady otherwise; eight more because of schedules of nearly equal intervals (of 14, 14, 14 and
15 steps, say), whose first ones look like a period.

With jitter, or where nothing repeats (rate control may wander), means of batches decide: their
confidence interval must be within ± 1 % for seconds and ± 3 % for bytes, and the backlog must not
grow.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import process_time

import numpy as np
from numpy.typing import NDArray

from offbeat.plan.record import Record, Step

_REPEATS = 3
_CONFIRMED, _MOST_CONFIRMED = 8, 512  # windows, and steps; longer intervals err by less than 1 %
_SILENT_STEPS = 4096  # without a mean: it may never come
_DIGITS = 6  # of seconds, relative to a step
_ROUNDING = 8  # bytes of a step: workers of a node carry equal parts
_SPARSER = 1.1  # from one look to the next: factor of the steps
_BATCHES = {10: 2.262, 7: 2.447}
"""How many, and 95 % of Student's distribution. Both, because batches of one length may happen to
have the length of a period."""
_WITHIN, _BYTES_WITHIN = 0.01, 0.03
_LEAST_BATCHED = 100  # steps
_BACKLOG = 0.05  # of the longer half's; more is growth
_START = Step(0.0, 0.0, 0, 0.0, 0.0, 0)
MOST_SECONDS = 5.0  # of processor, for a run


@dataclass(frozen=True)
class Window:
    """Steps from which figures are taken: after step ``first`` up to step ``last``.

    Attributes:
        first: Number of steps before it.
        last: Number of steps up to its end.
        steady: False if the run was ended before it was steady.
    """

    first: int
    last: int
    steady: bool


class Watch:
    """Decides when a run has been long enough.

    Args:
        jitter: Whether steps vary.
        alone: Whether there is nobody to send anything to.
        most_seconds: Of processor.
        now: Seconds of processor so far.

    Attributes:
        window: What was found.
    """

    def __init__(
        self,
        *,
        jitter: bool,
        alone: bool,
        most_seconds: float = MOST_SECONDS,
        now: Callable[[], float] = process_time,
    ) -> None:
        self._jitter, self._alone = jitter, alone
        self._now, self._until = now, now() + most_seconds
        self._look = 4
        self._found: tuple[int, int] | None = None  # a period, and the step at which it was found
        self._ids: dict[tuple[float, ...], int] = {}
        self._known: list[int] = []  # of each step
        self._sent: list[float] = []  # bytes of a step, each of them once
        self.window = Window(0, 0, steady=False)

    def ended(self, record: Record) -> bool:
        """Whether ``record`` is long enough; then ``window`` is set."""
        steps = len(record)
        late = self._now() > self._until
        if steps < self._look and not late:
            return False
        self._look = max(steps + 1, math.ceil(steps * _SPARSER))
        window = self._repeated(record) if not self._jitter else None
        if window is None and (late or steps >= _LEAST_BATCHED):
            window = self._batched(record, late=late)
        if window is None:
            return False
        self.window = window
        return True

    # -- exact repetition ------------------------------------------------------------------------

    def _repeated(self, record: Record) -> Window | None:
        self._extend(record)
        steps, matches = len(record), _self_matches(self._known)
        if self._found is not None:
            period, since = self._found
            if matches[period] < (_REPEATS - 1) * period + steps - since:
                self._found = None
        if self._found is None:
            found = self._period(record, matches)
            if found is None:
                return None
            self._found = found, steps
        period, since = self._found
        confirmed = since + min(_CONFIRMED * period, _MOST_CONFIRMED)
        if steps < confirmed:
            self._look = min(self._look, confirmed)
            return None
        times = min(matches[period] + period, steps - 1) // period
        return Window(steps - times * period, steps, steady=True)

    def _extend(self, record: Record) -> None:
        """Give equal steps equal numbers."""
        unit = record.step_seconds
        done = len(self._known)
        steps = record.steps
        for i in range(done, len(steps)):
            one = steps[i]
            before = steps[i - 1] if i else _START
            sent = _one_of(self._sent, one.payload - before.payload)
            seconds, backlog = (one.clock - before.clock) / unit, one.backlog / unit
            synced = one.syncs - before.syncs
            key = (round(seconds, _DIGITS), sent, round(backlog, _DIGITS), synced)
            self._known.append(self._ids.setdefault(key, len(self._ids)))

    def _period(self, record: Record, matches: Sequence[int]) -> int | None:
        """The shortest period that has come three times, with a mean in it."""
        steps = record.steps
        last = steps[-1]
        for period in range(1, len(steps) // _REPEATS + 1):
            if matches[period] >= (_REPEATS - 1) * period:
                before = steps[-1 - period]
                sent = last.payload > before.payload
                met = last.syncs > before.syncs or len(steps) > _SILENT_STEPS
                if self._alone or (sent and met):
                    return period
        return None

    # -- batch means -----------------------------------------------------------------------------

    def _batched(self, record: Record, *, late: bool) -> Window | None:
        steps = len(record)
        sent = [two.payload - one.payload for one, two in pairwise(record.steps)]
        period = _payload_period(sent)
        cycles = 4 * (steps - 1) // 5 // period  # the first fifth of the steps does not count
        close = cycles >= max(_BATCHES) and any(sent[-period * cycles :])
        for batches in _BATCHES if close and not self._alone else ():
            close = close and self._close(record, batches, cycles // batches * period)
        if close or self._alone:
            return Window(steps - max(1, cycles) * period, steps, steady=True)
        if not late:
            return None
        return Window(max(1, steps - max(1, cycles) * period), steps, steady=False)

    def _close(self, record: Record, batches: int, each: int) -> bool:
        """Whether the means of the last so many batches of ``each`` steps are close enough."""
        first = len(record) - batches * each
        ends = [record.steps[first - 1 + i * each] for i in range(batches + 1)]
        waited = np.diff([one.clock - one.computed for one in ends])  # computing is known
        payload = np.diff([one.payload for one in ends])
        seconds = (ends[-1].clock - ends[0].clock) / batches
        sent = (ends[-1].payload - ends[0].payload) / batches
        if _half_width(waited) > _WITHIN * seconds or _half_width(payload) > _BYTES_WITHIN * sent:
            return False
        backlog = [one.backlog for one in record.steps[first:]]
        half = len(backlog) // 2
        before, after = float(np.mean(backlog[:half])), float(np.mean(backlog[half:]))
        return after - before <= _BACKLOG * max(after, record.step_seconds)


def _payload_period(sent: Sequence[float]) -> int:
    """The shortest period of what is sent, if at least half of it repeats; else 1."""
    ids: dict[float, int] = {}
    known: list[float] = []
    matches = _self_matches([ids.setdefault(_one_of(known, one), len(ids)) for one in sent])
    periods = range(1, len(sent) // _REPEATS + 1)
    least = len(sent) // 2
    return next((p for p in periods if matches[p] >= max(p, least) and any(sent[-p:])), 1)


def _half_width(batch: NDArray[np.float64]) -> float:
    """Of the confidence interval of the mean."""
    count = len(batch)
    return float(_BATCHES[count] * batch.std(ddof=1) / math.sqrt(count))


def _one_of(known: list[float], size: float) -> float:
    """The one of ``known`` that ``size`` is, but for rounding of bytes; else it becomes one."""
    found = next((one for one in known if abs(one - size) <= _ROUNDING), None)
    if found is None:
        known.append(size)
        return size
    return found


def _self_matches(values: Sequence[int]) -> list[int]:
    """For each shift p: how many of the last values equal those p before, from the end on.

    The Z algorithm on the reversed sequence, in linear time.
    """
    text = values[::-1]
    count = len(text)
    found = [0] * (count + 1)
    left = right = 0
    for i in range(1, count):
        length = min(right - i, found[i - left]) if i < right else 0
        while i + length < count and text[length] == text[i + length]:
            length += 1
        found[i] = length
        if i + length > right:
            left, right = i, i + length
    return found
