"""Pace of self-clocked averaging: parts in a message, waits and processor time.

A worker has at most one *message* in flight, which contains the updates of one or several parts of
the model. It launches the next message at the end of the local step in which the previous one has
landed. Workers are *in phase* if they launch a message at about the same time. To stay in phase, a
worker may wait at the end of a step for a message that is about to arrive. Its *allowance* limits
these waits. All times are in local steps, unless a name ends in ``seconds``.
"""

import math
from dataclasses import dataclass, field

_MOST_ALLOWANCE = 1.0  # largest allowance, in steps
_ACQUIRE = 0.7  # allowance, in steps, from which on a worker out of phase waits
_LEAST_GROWTH = 1 / 64  # smallest ``Pace.growth``
STEP_END_SHARE = 0.03
"""Share of a step for which the training thread may pack or land parts at a step boundary."""
_MOST_SHARE = 0.05
"""Largest share of the step time that a worker spends on launching and landing parts."""
_SMOOTHING = 0.1  # weight of a new value in an exponential average
_GAIN = 0.5  # part of the error of a prediction that ``Line`` corrects
_SLACK = 0.1  # share of a step that is kept free, because steps and messages vary


@dataclass
class Line:
    """A time that grows linearly with the number m of parts in a message: ``base`` + ``each``·m.

    Attributes:
        base: Time of a message without parts.
        each: Time of one part.
        known: True once messages of two sizes have been measured.
    """

    base: float = 0.0
    each: float = 0.0
    known: bool = False

    def at(self, number: int) -> float:
        """Return the expected time of a message with ``number`` parts."""
        return self.base + self.each * number

    def learn(self, steps: float, number: int, *, first: bool) -> None:
        """Learn from a message with ``number`` parts that took ``steps``.

        ``first`` is True for the first message, of one part. The next one has two parts, and the
        difference of their times is ``each``.
        """
        if first:
            self.each = steps
        elif not self.known:
            before, self.known = self.each, True
            self.each = max(0.0, steps - before) if number == 2 and before else steps / number
            self.base = max(0.0, steps - self.each * number)
        else:
            step = _GAIN * (steps - self.at(number)) / (1 + number * number)
            self.base = max(0.0, self.base + step)
            self.each = max(0.0, self.each + step * number)


@dataclass
class Sizer:
    """Chooses the number of parts in the next message, equal on all workers.

    A message with m parts lands at the end of a step; 0.1 steps are kept free. About half of its
    processor time is packing and adding by the training thread, which takes several step boundaries
    if it is long. So the message takes F = max(1, ⌈time + 0.1⌉) + ⌊cost/(2·0.03)⌋ steps, and a
    worker launches one every I = max(F, cost/0.05) steps on average. All n parts take n/m messages,
    or I·n/m steps. Updates are F steps old when they land, and then wait for half of that time on
    average. So the updates of the other workers in the local model have the mean age F + I·n/(2m).
    The sizer chooses the m with the smallest age. F may be at most the bound on the staleness, at
    which a worker would wait, or the F of one part if that is larger.

    Attributes:
        parts: Number n of parts of the model.
        number: Number m of parts in the next message.
        bound: Bound on the staleness, in steps.
        time: Model of the time from sending to arrival of a message.
        cost: Model of its processor time on the worker that spends most.
    """

    parts: int
    number: int = 1
    bound: float = math.inf
    time: Line = field(default_factory=Line)
    cost: Line = field(default_factory=Line)

    @property
    def expected_steps(self) -> float:
        """Expected time of the next message, in steps. Infinite until ``time.known``."""
        return self.time.at(self.number) if self.time.known else math.inf

    def measure(self, steps: float, number: int, cost: float = 0.0) -> None:
        """Learn from a message with ``number`` parts, and choose the parts of the next one.

        ``steps`` is the time of this message, and ``cost`` its processor time, both in steps.
        """
        first = number == 1 < self.parts and not self.time.known
        self.time.learn(steps, number, first=first)
        self.cost.learn(cost, number, first=first)
        if first:
            self.number = 2
            return
        most = max(self.bound, self._flight(1))
        fits = [m for m in range(1, self.parts + 1) if self._flight(m) <= most]
        self.number = min(fits, key=self.age)

    def age(self, number: int) -> float:
        """Return the mean age of the other workers' updates if messages have ``number`` parts."""
        flight = self._flight(number)
        every = max(flight, self.cost.at(number) / _MOST_SHARE)
        return flight + every * self.parts / (2 * number)

    def _flight(self, number: int) -> int:
        in_flight = max(1, math.ceil(self.time.at(number) + _SLACK))
        return in_flight + int(self.cost.at(number) / (2 * STEP_END_SHARE))


@dataclass
class Pace:
    """Step times of one worker, its waits and its processor time.

    Attributes:
        patience: Largest share of the training time for which this worker waits.
        step_seconds: Duration of a local step without waits, an exponential average. 0: unknown.
        allowance: Time for which this worker may wait now, in steps. Each step adds ``patience``,
            or ``patience``·``growth`` while the worker is out of phase.
        in_phase: True if the newest wait ended with the arrival of the message. A worker out of
            phase waits only if its allowance is at least ``_ACQUIRE``, to come into phase again.
        growth: Factor on the growth of the allowance out of phase. A wait in vain then halves it.
        credit_seconds: Processor time that this worker may spend on the next message. Negative
            after a message that cost more than a step allows.
        began: Time at which the current step began. None: the step is not measured, for example
            because it contains a barrier.
    """

    patience: float
    step_seconds: float = 0.0
    allowance: float = 0.0
    in_phase: bool = False
    growth: float = 1.0
    credit_seconds: float = 0.0
    began: float | None = None

    def __post_init__(self) -> None:
        self.allowance = _ACQUIRE if self.patience else 0.0

    def step_ended(self, now: float) -> None:
        """Measure the step that ends ``now``, and add one step's processor time to the credit."""
        if self.began is not None:
            seconds, mean = now - self.began, self.step_seconds
            if mean:  # a longer step probably contains an evaluation
                seconds = min(seconds, 2 * mean)
            self.step_seconds = seconds if not mean else mean + _SMOOTHING * (seconds - mean)
        added = _MOST_SHARE * self.step_seconds
        self.credit_seconds = min(self.credit_seconds + added, 2 * added)

    def wait_seconds(self) -> float:
        """Return the time for which the worker may wait at the end of this step."""
        may_wait = self.in_phase or self.allowance >= _ACQUIRE
        return self.allowance * self.step_seconds if may_wait else 0.0

    def waited(self, seconds: float, *, in_vain: bool) -> None:
        """Subtract a wait from the allowance, and add the growth of one step."""
        steps = seconds / self.step_seconds if self.step_seconds else 0.0
        if in_vain:
            self.growth = self.growth if self.in_phase else max(_LEAST_GROWTH, self.growth / 2)
            self.in_phase = False
        elif steps:
            self.in_phase, self.growth = True, 1.0
        left = max(0.0, self.allowance - steps)  # a suspended process may have waited for long
        growth = 1.0 if self.in_phase else self.growth
        self.allowance = min(_MOST_ALLOWANCE, left + self.patience * growth)
