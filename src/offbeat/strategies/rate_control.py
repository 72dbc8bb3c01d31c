"""Rate control of streaming averaging: parts in flight and waits.

Each worker limits the launches that it requests in two ways. The *window* is the largest number of
parts in flight. A part is *late* if it is in flight for more steps than it would be over an idle
link. The window shrinks if many parts are late, because the link is then full. The *CPU budget*
limits the processor time that launching and landing take. An *allowance* limits the time for which
the worker waits for parts in flight.

A *pass* of the model is complete when every part has landed once. Each worker measures the number
of local steps in a pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.strategies.base import transient

_LEAST_WINDOW = 2  # parts; the link sends one of them until the worker notices the other's arrival
_LATE_AGE = 2  # steps; over an idle link a part lands sooner, because workers are half a step apart
_LATE_SHARE = 4  # the window shrinks if more than 1/4 of the parts (rounded down) are late
_MOST_CPU_SHARE = 0.05
"""Largest share of the step time that a worker spends on launching and landing parts.

Network threads and the quantization of sums take about the same processor time again, and slow down
training if no core is idle. In measurements, twice this share gave twice as many passes, but their
benefit did not exceed the cost of the slower steps.
"""
_MOST_COST_RATIO = 4  # largest ratio of a cost to the average cost, or its inverse; more is noise
_MOST_ALLOWANCE = 0.5  # steps: the longest wait for parts, and the allowance at the start
_LEAST_ALLOWANCE = 0.25  # steps; with less a worker does not wait, because the wait is too short
_LEAST_GROWTH = 1 / 64
_SMOOTHING = 0.1  # weight of a new value in an exponential average
_LEAST_STEPS = 8  # shortest measurement of the steps in a pass, in local steps


@dataclass
class RateControl:
    """Window and CPU budget of one worker.

    Attributes:
        window: Number of parts in flight up to which this worker requests launches.
        probing: True while the window grows fast: from the start of training until a part is late.
        start_step: Local step at which the current measurement of the steps in a pass began.
        landed: Number of landings in this measurement. A negative number −n means that the
            measurement begins after n more landings.
        step_seconds: Duration of a local step in seconds, an exponential average. 0: unknown.
        part_seconds: Seconds to launch and land a part, without waiting, an exponential average. 0:
            unknown.
        budget: Number of parts that may be launched now within the CPU budget. May be negative.
        allowance: Time for which this worker may wait for parts now, in steps.
        growth: Factor on the growth of the allowance (1/64 to 1). It is quartered after a wait that
            was too short, and doubled after one that was not.
        stepped_at: Seconds on the worker's clock at the last step boundary. None before the first.
        seen_launches: Number of launches at the last call of ``count``.
        seen_landings: Number of landings at the last call of ``count``.
    """

    window: int = _LEAST_WINDOW
    probing: bool = True
    start_step: int = 0
    landed: int = 0
    step_seconds: float = 0.0
    part_seconds: float = 0.0
    budget: float = 0.0
    allowance: float = _MOST_ALLOWANCE
    growth: float = 1.0
    stepped_at: float | None = transient(default=None)
    seen_launches: int = 0
    seen_landings: int = 0

    def count(self, launches: int, landings: int, step: int) -> None:
        """Subtract new launches from the budget, and count new landings. Arguments are totals."""
        for _ in range(landings - self.seen_landings):
            self.landed += 1
            if self.landed == 0:
                self.start_step = step
        self.budget -= launches - self.seen_launches
        self.seen_launches, self.seen_landings = launches, landings

    def step(self, now: float, spent: Sequence[float], parts: int) -> None:
        """Measure the local step that ended at the time ``now``, and add the CPU budget of a step.

        ``spent`` contains the duration of each launch and landing in this step, in seconds.
        """
        for seconds in spent:
            cost = 2 * seconds  # a part needs a launch and a landing
            mean = self.part_seconds
            if mean:  # limits outliers, in which another process used the processor
                cost = min(cost, _MOST_COST_RATIO * mean)
                # The first cost may be hundreds of times as large, because a GPU loads its code.
                mean = min(mean, _MOST_COST_RATIO * cost)
            self.part_seconds = _smooth(mean, cost)
        if self.stepped_at is not None:
            duration = now - self.stepped_at
            if self.step_seconds:  # limits outliers, which probably contain an evaluation
                duration = min(duration, 2 * self.step_seconds)
            self.step_seconds = _smooth(self.step_seconds, duration)
        self.stepped_at = now
        added = float(parts)
        if self.part_seconds:
            added = min(added, _MOST_CPU_SHARE * self.step_seconds / self.part_seconds)
        # The budget of three steps may accumulate, because parts may be launched two steps after
        # the strategy has requested them.
        # The debt is limited, because the bound on the staleness may exceed the budget for long.
        budget = max(self.budget, -2.0 * parts) + added
        self.budget = min(budget, 1.0 + 3 * added, 2.0 * parts)

    def wait_limit(self) -> float:
        """Return the longest wait for the parts in flight at this step boundary, in seconds."""
        return self.allowance * self.step_seconds if self.allowance >= _LEAST_ALLOWANCE else 0.0

    def count_wait(self, seconds: float, *, timed_out: bool, share: float) -> None:
        """Subtract the wait at this step boundary from the allowance, and add that of one step.

        Args:
            seconds: Duration of the wait.
            timed_out: True if the wait was too short.
            share: Largest share of the training time that waits may take.
        """
        steps = seconds / self.step_seconds if self.step_seconds else 0.0
        if timed_out:
            self.growth = max(_LEAST_GROWTH, self.growth / 4)
        elif steps:
            self.growth = min(1.0, 2 * self.growth)
        # A suspended process may have waited for long.
        left = max(0.0, self.allowance - steps)
        self.allowance = min(_MOST_ALLOWANCE, left + share * self.growth)

    def resize(self, ages: Sequence[int], parts: int) -> None:
        """Grow the window if no part is late, shrink it if more than 1/4 of the parts are late.

        ``ages`` are the local steps since the launch of each part in flight.
        """
        late = sum(age >= _LATE_AGE for age in ages)
        if late > parts // _LATE_SHARE:
            least = min(_LEAST_WINDOW, parts)
            self.window, self.probing = max(least, self.window - 1), False
        elif late:
            self.probing = False
        else:
            growth = max(1, self.window // 2) if self.probing else 1
            # The largest window is twice the number of parts. A round can then decide the next
            # launch of a part that is still in flight, and this launch follows its landing at once.
            self.window = min(2 * parts, self.window + growth)

    def pass_steps(self, step: int, parts: int) -> float | None:
        """Return the measured number of local steps in a pass.

        The result is None if the measurement has fewer than two passes or eight steps. The
        measurement starts again while the window still grows fast.
        """
        if self.probing and self.window != 2 * parts and self.landed > 0:  # the window still grows
            self.start_step, self.landed = step, 0
        if self.landed < 2 * parts or step - self.start_step < _LEAST_STEPS:
            return None
        return (step - self.start_step) * parts / self.landed

    def restart_count(self, step: int) -> None:
        """Start a new measurement of the steps in a pass."""
        self.start_step, self.landed = step, 0


def _smooth(mean: float, new: float) -> float:
    return new if mean == 0 else mean + _SMOOTHING * (new - mean)
