"""Rate control of streaming averaging: the number of parts in flight, and their precision.

Each worker controls a *window*, the number of parts that it may have in flight, and a *CPU budget*
for launching and landing parts. Parts that land late show that the link is full, so the window
shrinks.

A *pass* is complete when every part has landed once. The workers agree on the mean number of local
steps in a pass and choose the precision by it: fewer bits if a pass takes too many steps, more bits
if it is fast.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.quantization.precision import PrecisionControl
from offbeat.strategies.base import Precision, common, transient

TARGET_PASS_STEPS = 2.5
"""Target for the local steps in a pass. The precision is lowered if a pass takes longer. Over a
lossy wire a part takes at least two step boundaries, on any network."""

_LEAST_WINDOW = 2  # parts: the link sends one while the arrival of another is noticed
_LATE_SHARE = 4  # a quarter of the parts may queue for the link; more would only age in the queue
_MOST_CPU_SHARE = 0.05
"""Largest share of a worker's time for launching and landing. The network threads and the second
stage take about as much again, which slows down a fully used processor. Twice the share doubles the
number of passes; in measurements its benefit was about its cost."""
_MOST_COST_RATIO = 4  # largest cost of one part relative to the average, against measurement noise
_SMOOTHING = 0.1  # weight of a new value in an exponential average
_LEAST_STEPS = 8  # local steps before a count of passes is used


@dataclass
class RateControl:
    """Window, CPU budget and precision of one worker.

    Attributes:
        control: Chooses the precision, the same on all workers.
        window: Number of parts that may be in flight.
        probing: True until the link has been full once. The window grows fast while it is set.
        start_step: Local step at which the current count of landings began.
        landed: Number of landings since ``start_step``. Negative while parts that were launched at
            the previous precision land.
        crowded: True if too many parts were late since ``start_step``.
        step_seconds: Duration of a local step in seconds, smoothed.
        part_seconds: Seconds to launch and land a part, without waiting, smoothed.
        budget: Number of parts that may be launched within the CPU share.
        stepped_at: Seconds on the worker's clock at the last step boundary.
        seen_launches: Number of launches that were charged to the budget.
        seen_landings: Number of landings that were counted.
    """

    control: PrecisionControl = common(default_factory=lambda: PrecisionControl("int4"))
    window: int = _LEAST_WINDOW
    probing: bool = True
    start_step: int = 0
    landed: int = 0
    crowded: bool = False
    step_seconds: float = 0.0
    part_seconds: float = 0.0
    budget: float = 0.0
    stepped_at: float | None = transient(default=None)
    seen_launches: int = 0
    seen_landings: int = 0

    @property
    def precision(self) -> Precision:
        """Precision of the next launches."""
        return self.control.precision

    def count(self, launches: int, landings: int, step: int) -> None:
        """Charge the launches since the last call to the budget, and count the landings.

        Args:
            launches: Number of launches so far.
            landings: Number of landings so far.
            step: Number of local steps so far.
        """
        for _ in range(landings - self.seen_landings):
            self.landed += 1
            if self.landed == 0:
                self.start_step = step
        self.budget -= launches - self.seen_launches
        self.seen_launches, self.seen_landings = launches, landings

    def step(self, now: float, spent: Sequence[float], parts: int) -> None:
        """Measure a local step that has ended, and add its share of time to the CPU budget.

        Args:
            now: Seconds on the worker's clock.
            spent: Seconds spent on each launch and landing since the last step boundary.
            parts: Number of parts of the model.
        """
        for seconds in spent:
            cost = 2 * seconds  # a launch and a landing
            if self.part_seconds:  # a longer time may be that of another process
                cost = min(cost, _MOST_COST_RATIO * self.part_seconds)
            self.part_seconds = _smooth(self.part_seconds, cost)
        if self.stepped_at is not None:
            took = now - self.stepped_at
            if self.step_seconds:  # an evaluation between two steps is not part of a step
                took = min(took, 2 * self.step_seconds)
            self.step_seconds = _smooth(self.step_seconds, took)
        self.stepped_at = now
        more = float(parts)
        if self.part_seconds:
            more = min(more, _MOST_CPU_SHARE * self.step_seconds / self.part_seconds)
        # A round may launch its parts two steps after it was requested: keep the budget for these.
        self.budget = min(self.budget + more, 1.0 + 3 * more, 2.0 * parts)

    def resize(self, ages: Sequence[int], parts: int, *, prompt_age: int) -> None:
        """Grow the window if the link has spare capacity, shrink it if parts queue for the link.

        Args:
            ages: Local steps since the launch of each part in flight.
            parts: Number of parts of the model.
            prompt_age: Age from which a part is late. Over a free link it would have landed.
        """
        late = sum(age >= prompt_age for age in ages)
        if late > parts // _LATE_SHARE:
            least = min(_LEAST_WINDOW, parts)
            self.window, self.probing, self.crowded = max(least, self.window - 1), False, True
        elif late:
            self.probing = False
        else:
            more = max(1, self.window // 2) if self.probing else 1
            # More parts than the model has: a queued part is launched as soon as it has landed.
            self.window = min(2 * parts, self.window + more)

    def pass_steps(self, step: int, parts: int, *, chooses: bool) -> float | None:
        """Return the number of local steps in a pass, or None before enough parts have landed.

        Args:
            step: Number of local steps so far.
            parts: Number of parts of the model.
            chooses: True if the rate control also chooses the precision. A link that is never full
                although all parts are sent then counts as 1 step, because fewer bits would not
                help. A worker with a short CPU budget is not such a case: with fewer bits each
                part arrives sooner.
        """
        widest = self.window == 2 * parts
        free = chooses and widest and self.budget >= parts and not self.crowded
        if self.probing and not widest and self.landed > 0:  # the window is still growing
            self.start_step, self.landed = step, 0
        if self.landed < 2 * parts or step - self.start_step < _LEAST_STEPS:
            return None
        return 1.0 if free else (step - self.start_step) * parts / self.landed

    def restart_count(self, step: int) -> None:
        """Start a new count of passes."""
        self.start_step, self.landed, self.crowded = step, 0, False

    def choose(self, steps: float, step: int, bits: Mapping[str, float], parts: int) -> bool:
        """Choose fewer bits if a pass takes too long, and try more bits if it is fast.

        Args:
            steps: Mean over the workers of the number of local steps in a pass.
            step: Number of local steps so far.
            bits: Bits per number of an update, by precision.
            parts: Number of parts of the model.

        Returns:
            True if the precision has changed.
        """
        self.restart_count(step)
        changed = self.control.update(steps / TARGET_PASS_STEPS, bits)
        if changed:
            self.probing, self.landed = True, -parts
        return changed


def _smooth(mean: float, new: float) -> float:
    return new if mean == 0 else mean + _SMOOTHING * (new - mean)
