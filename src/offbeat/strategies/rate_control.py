"""Rate control of streaming averaging: how many parts a worker sends, and at which precision.

No model of the network is fitted. Parts that land late show that the link is full, and the steps
that a pass of the whole model takes show whether fewer bits are worth their rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.quantization.precision import PrecisionControl
from offbeat.strategies.base import Precision, common, transient

TARGET_PASS_STEPS = 2.5
"""Steps in which the whole model should pass. Fewer bits are used if it takes longer. Over a lossy
wire no network is faster than two step boundaries a part."""

_LEAST_WINDOW = 2  # parts: one is on the link while the arrival of another is noticed
_LATE_SHARE = 4  # a quarter of the parts may queue for the link; more would only get older there
_MOST_CPU_SHARE = 0.05
"""Largest share of a worker's time for launching and landing. The network threads and the second
stage take about as much again, which slows a fully used processor. Twice as much lets the model
pass twice as often; measured, that gained about as much as it cost."""
_MOST_COST_RATIO = 4  # largest cost of one part relative to the average, against measurement noise
_SMOOTHING = 0.1
_LEAST_STEPS = 8  # local steps before a count of passes is used


@dataclass
class RateControl:
    """Window, CPU budget and precision of one worker.

    Attributes:
        control: Chooses the precision, the same on all workers.
        window: Number of parts that may be in flight.
        probing: True until the link has been full once; the window then grows slowly.
        start_step: Local step at which the current count of passes began.
        landed: Parts landed since then; negative while parts of the previous precision land.
        crowded: True if too many parts were late since then.
        step_seconds: Duration of a local step, smoothed.
        part_seconds: Time to launch and land a part without waiting, smoothed.
        budget: Number of parts that may be launched within the CPU share.
        stepped_at: Time on the worker's clock at the last step boundary.
        seen_launches: Launches of the flow that were charged to the budget.
        seen_landings: Landings of the flow that were counted.
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
        """Charge the flow's launches and landings since the last call.

        Args:
            launches: Number of parts launched so far.
            landings: Number of parts landed so far.
            step: Local steps so far.
        """
        for _ in range(landings - self.seen_landings):
            self.landed += 1
            if self.landed == 0:
                self.start_step = step
        self.budget -= launches - self.seen_launches
        self.seen_launches, self.seen_landings = launches, landings

    def step(self, now: float, spent: Sequence[float], parts: int) -> None:
        """Measure a local step that has ended, and add its time to the CPU budget.

        Args:
            now: Seconds on the worker's clock.
            spent: Seconds spent on each launch and landing since the last step boundary.
            parts: Number of parts of the model.
        """
        for seconds in spent:
            cost = 2 * seconds  # a launch and a landing
            if self.part_seconds:  # another process may have held the processor
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
        # A part that is asked for now may be launched up to two steps later: keep that budget.
        self.budget = min(self.budget + more, 1.0 + 3 * more, 2.0 * parts)

    def resize(self, ages: Sequence[int], parts: int, *, prompt_age: int) -> None:
        """Grow the window if the link has spare capacity, shrink it if parts queue for the link.

        Args:
            ages: Local steps since the launch of each part in flight.
            parts: Number of parts of the model.
            prompt_age: At this age a part is late: over a free link it would have landed.
        """
        late = sum(age >= prompt_age for age in ages)
        if late > parts // _LATE_SHARE:
            least = min(_LEAST_WINDOW, parts)
            self.window, self.probing, self.crowded = max(least, self.window - 1), False, True
        elif late:
            self.probing = False
        else:
            more = max(1, self.window // 2) if self.probing else 1
            # Beyond one model, rounds decide which parts follow as soon as they have landed.
            self.window = min(2 * parts, self.window + more)

    def pass_steps(self, step: int, parts: int, *, chooses: bool) -> float | None:
        """Local steps in which every part lands once; None until that is known.

        If the rate control also ``chooses`` the precision, a link that is never full although
        everything is sent counts as 1 step: fewer bits would not help there. A worker whose CPU
        budget is short gains from fewer bits, because each part arrives sooner.
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
        """Use fewer bits if a pass of the model takes too long; try more bits if it is fast.

        Args:
            steps: Local steps of a pass, averaged over the workers.
            step: Local steps so far.
            bits: Bits that each number costs at each precision.
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
