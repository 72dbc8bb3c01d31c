"""Detection of the steady state of a simulated run. The run's last steps give the forecast.

*Jitter* is random variation of compute times. Without jitter, a run is steady if its steps repeat:

* A period of p steps must occur three times, and then repeat eight more times or for 512 steps,
  whichever is shorter. The reason is that a schedule with intervals of 14, 14, 14 and 15 steps
  looks periodic at first.
* Two steps are equal if they have the same duration, bytes, number of synchronizations, and
  *backlog*: the time until the link is free. Without the backlog, a slowly growing queue would look
  steady.
* The period must contain a mean, except with a single worker or node, and after 4096 steps.

With jitter, or if the steps do not repeat, the steps are divided into batches of equal length. The
means of the batches give a 95 % confidence interval. Its half width must be at most 3 % for the
bytes. For the waiting time it must be at most 1 % of the duration of a batch. From the first to the
second half of the steps, the backlog may grow by at most 5 %.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import process_time

import numpy as np
from numpy.typing import NDArray

from offbeat.plan.record import Record, Step

_REPEATS = 3  # occurrences of a period before it is a candidate
_CONFIRMED = 8  # further periods that must follow before a candidate is accepted
_MOST_CONFIRMED = 512  # limit of the total length of these periods, in steps
_SILENT_STEPS = 4096  # steps after which a period need not contain a mean
_DIGITS = 6  # compared digits of a duration in units of the compute time of a step
_ROUNDING = 8  # bytes by which equal steps may differ, because parts of a tensor are rounded
_SPARSER = 1.1  # factor on the number of steps from one check to the next
_BATCHES = {10: 2.262, 7: 2.447}
"""Quantile of Student's distribution (95 %), by number of batches. Two numbers of batches are
tested, because the length of a batch may coincide with a period."""
_WITHIN, _BYTES_WITHIN = 0.01, 0.03  # largest relative half widths for durations and bytes
_LEAST_BATCHED = 100  # steps before batches are tested
_BACKLOG = 0.05  # relative increase of the mean backlog, from one half of the steps to the other
_START = Step(0.0, 0.0, 0, 0.0, 0.0, 0)
MOST_SECONDS = 5.0
"""Default limit of the processor seconds that a run may take."""


@dataclass(frozen=True)
class Window:
    """The steps from which the figures of a forecast are taken.

    Attributes:
        first: Number of steps before the window.
        last: Number of steps up to the end of the window.
        steady: False if the run was ended before it was steady.
    """

    first: int
    last: int
    steady: bool


class SteadyStateDetector:
    """Decides when a run is long enough.

    Args:
        jitter: True if compute times vary.
        alone: True if there is only one worker or node.
        most_seconds: Limit of the processor seconds that the run may take.
        now: Function that returns the processor seconds of this process.

    Attributes:
        window: The steps from which to take figures. Valid once ``ended`` has returned True.
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
        self._next_check = 4  # number of steps at the next check
        self._candidate: tuple[int, int] | None = None  # period, and the step at which it was found
        self._numbers: dict[tuple[float, ...], int] = {}  # a number for each kind of step
        self._sequence: list[int] = []  # number of the kind of each step
        self._sizes: list[float] = []  # each different number of bytes sent in a step
        self.window = Window(0, 0, steady=False)

    def ended(self, record: Record) -> bool:
        """Return True and set ``window`` if ``record`` is long enough or the time is used up."""
        steps = len(record)
        late = steps > 1 and self._now() > self._until  # the first step has no step before it
        if steps < self._next_check and not late:
            return False
        self._next_check = max(steps + 1, math.ceil(steps * _SPARSER))
        window = self._repeated(record) if not self._jitter else None
        if window is None and (late or steps >= _LEAST_BATCHED):
            window = self._batched(record, late=late)
        if window is None:
            return False
        self.window = window
        return True

    # -- exact repetition ------------------------------------------------------------------------

    def _repeated(self, record: Record) -> Window | None:
        """Return the last steps if they repeat long enough, else None."""
        self._extend(record)
        steps, matches = len(record), _self_matches(self._sequence)
        if self._candidate is not None:
            period, since = self._candidate
            if matches[period] < (_REPEATS - 1) * period + steps - since:
                self._candidate = None
        if self._candidate is None:
            shortest = self._period(record, matches)
            if shortest is None:
                return None
            self._candidate = shortest, steps
        period, since = self._candidate
        confirmed = since + min(_CONFIRMED * period, _MOST_CONFIRMED)
        if steps < confirmed:
            self._next_check = min(self._next_check, confirmed)
            return None
        times = min(matches[period] + period, steps - 1) // period
        return Window(steps - times * period, steps, steady=True)

    def _extend(self, record: Record) -> None:
        """Append the new steps to the sequence, in which equal steps have equal numbers."""
        unit = record.step_seconds
        steps = record.steps
        for i in range(len(self._sequence), len(steps)):
            step = steps[i]
            before = steps[i - 1] if i else _START
            sent = _known_size(self._sizes, step.payload - before.payload)
            seconds, backlog = (step.clock - before.clock) / unit, step.backlog / unit
            synced = step.syncs - before.syncs
            key = (round(seconds, _DIGITS), sent, round(backlog, _DIGITS), synced)
            self._sequence.append(self._numbers.setdefault(key, len(self._numbers)))

    def _period(self, record: Record, matches: Sequence[int]) -> int | None:
        """Return the shortest period that has occurred three times and contains a mean.

        Two kinds of periods need no mean: all with a single worker or node; and after 4096 steps
        those in which bytes are sent.
        """
        steps = record.steps
        last = steps[-1]
        for period in range(1, len(steps) // _REPEATS + 1):
            if matches[period] >= (_REPEATS - 1) * period:
                before = steps[-1 - period]
                sent = last.payload > before.payload
                synced = last.syncs > before.syncs or len(steps) > _SILENT_STEPS
                if self._alone or (sent and synced):
                    return period
        return None

    # -- batch means -----------------------------------------------------------------------------

    def _batched(self, record: Record, *, late: bool) -> Window | None:
        """Return about the last four fifths of the steps if they are steady, or if ``late``."""
        steps = len(record)
        sent = [step.payload - before.payload for before, step in pairwise(record.steps)]
        period = _payload_period(sent)
        cycles = 4 * (steps - 1) // 5 // period  # without the first fifth of the steps
        certain = cycles >= max(_BATCHES) and any(sent[-period * cycles :])
        for batches in _BATCHES if certain and not self._alone else ():
            certain = certain and self._certain(record, batches, cycles // batches * period)
        if certain or self._alone:
            return Window(steps - max(1, cycles) * period, steps, steady=True)
        if not late:
            return None
        return Window(max(1, steps - max(1, cycles) * period), steps, steady=False)

    def _certain(self, record: Record, batches: int, length: int) -> bool:
        """Return True if the last ``batches`` batches of ``length`` steps have similar means.

        Waiting times, bytes and backlog are tested. The mean of the compute times is known.
        """
        first = len(record) - batches * length
        ends = [record.steps[first - 1 + i * length] for i in range(batches + 1)]
        waited = np.diff([step.clock - step.computed for step in ends])
        payload = np.diff([step.payload for step in ends])
        seconds = (ends[-1].clock - ends[0].clock) / batches
        sent = (ends[-1].payload - ends[0].payload) / batches
        if _half_width(waited) > _WITHIN * seconds or _half_width(payload) > _BYTES_WITHIN * sent:
            return False
        backlog = [step.backlog for step in record.steps[first:]]
        half = len(backlog) // 2
        before, after = float(np.mean(backlog[:half])), float(np.mean(backlog[half:]))
        return after - before <= _BACKLOG * max(after, record.step_seconds)


def _payload_period(sent: Sequence[float]) -> int:
    """Return the shortest period of the bytes sent, or 1 if less than half of them repeat."""
    ids: dict[float, int] = {}
    known: list[float] = []
    matches = _self_matches([ids.setdefault(_known_size(known, each), len(ids)) for each in sent])
    periods = range(1, len(sent) // _REPEATS + 1)
    least = len(sent) // 2
    return next((p for p in periods if matches[p] >= max(p, least) and any(sent[-p:])), 1)


def _half_width(batch: NDArray[np.float64]) -> float:
    """Return half the width of the 95 % confidence interval of the mean of ``batch``."""
    count = len(batch)
    return float(_BATCHES[count] * batch.std(ddof=1) / math.sqrt(count))


def _known_size(known: list[float], size: float) -> float:
    """Return the element of ``known`` that equals ``size`` up to rounding, or append ``size``."""
    for other in known:
        if abs(other - size) <= _ROUNDING:
            return other
    known.append(size)
    return size


def _self_matches(values: Sequence[int]) -> list[int]:
    """Return for each shift p how many values at the end equal those p places before them.

    Example: 1 2 3 2 3 gives 2 for p = 2. This is the Z algorithm on the reversed sequence.
    """
    text = values[::-1]
    count = len(text)
    lengths = [0] * (count + 1)
    left = right = 0
    for i in range(1, count):
        length = min(right - i, lengths[i - left]) if i < right else 0
        while i + length < count and text[length] == text[i + length]:
            length += 1
        lengths[i] = length
        if i + length > right:
            left, right = i, i + length
    return lengths
