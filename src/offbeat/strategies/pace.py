"""How fast streaming averaging sends: how many parts at a time, and how exactly.

Nothing is computed from a model of the network: parts that are late tell that the link is full, and
own steps a whole model takes tell what its bits are worth.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.checkpoint import transient
from offbeat.fabric.coding import update_bits
from offbeat.fabric.wire import Precision

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8", "int4", "int2")
"""From the most exact one down."""
FEW = 2.5
"""Steps in which the whole model should pass; with fewer bits if it does not. Over a lossy wire no
network is faster than two boundaries a part."""

_LEAST_WINDOW = 2  # parts: one is on the link while the arrival of another is noticed
_MOST_LATE = 4  # a 4th of the model may lie in front of the link; more only gets old there
_MOST_SHARE = 0.05
"""Of a worker's time for launching and landing. The network's threads and the second stage take
about as much again, and that is time in which a full processor does not compute. With twice as much
the model passes twice as often, which was worth about what it costs."""
_MOST_AT_ONCE = 4  # times what a part has cost so far
_SMOOTHING = 0.1
_LEAST_STEPS = 8  # own steps before what was measured counts
_RETRY = 4  # times as long is waited for the next try of more bits, after one in vain


@dataclass
class Pace:
    """What one worker knows of it.

    Attributes:
        window: Parts that may be under way.
        probing: The link has never been full.
        precision: Of what is launched; the same on all workers, as are all from ``tried`` to
            ``patience``. The others are this one's own.
        began: Own step since which the passes of the model are counted.
        landed: Parts that have landed since then; below 0 while those land that were launched
            before the precision changed.
        crowded: Too many were late since then.
        tried: Whether the last change was to more bits, which have not proved themselves yet.
        counts: Counts since the last change.
        patience: Counts to wait for before more bits are tried.
        step_seconds: Of its own steps, smoothed.
        part_seconds: Of launching and landing a part, waiting left out; likewise.
        allowance: Parts that it may launch without spending too much of its time on it.
        stepped: When the last step ended, on the worker's clock.
        spent: Seconds on each launch and landing of a part since then, waiting left out.
    """

    window: int = _LEAST_WINDOW
    probing: bool = True
    precision: Precision = "int4"
    began: int = 0
    landed: int = 0
    crowded: bool = False
    tried: bool = False
    counts: int = 0
    patience: int = 1
    step_seconds: float = 0.0
    part_seconds: float = 0.0
    allowance: float = 0.0
    stepped: float | None = transient(default=None)
    spent: list[float] = transient(default_factory=list)

    def step(self, now: float, spent: Sequence[float], parts: int) -> None:
        """An own step has ended; a part's cost is allowed for by the time that it took.

        Args:
            now: On the worker's clock, which is that of its node.
            spent: As noted since the last one ended; of a node the most of each.
            parts: How many there are.
        """
        for seconds in spent:
            cost = 2 * seconds
            if self.part_seconds:  # that something else had the processor is not its cost
                cost = min(cost, _MOST_AT_ONCE * self.part_seconds)
            self.part_seconds = _smooth(self.part_seconds, cost)
        if self.stepped is not None:
            took = now - self.stepped
            if self.step_seconds:  # an evaluation between two steps is not a step
                took = min(took, 2 * self.step_seconds)
            self.step_seconds = _smooth(self.step_seconds, took)
        self.stepped = now
        more = float(parts)
        if self.part_seconds:
            more = min(more, _MOST_SHARE * self.step_seconds / self.part_seconds)
        # What is asked for is launched up to two steps later: that time is not lost.
        self.allowance = min(self.allowance + more, 1.0 + 3 * more, 2.0 * parts)

    def resize(self, ages: Sequence[int], parts: int, *, prompt: int) -> None:
        """More parts under way if the link has nothing left to do, fewer if they queue for it.

        Args:
            ages: Own steps since the launch of each part under way.
            parts: How many there are.
            prompt: At this age a part is late: it would have landed, were the link free.
        """
        late = sum(age >= prompt for age in ages)
        if late > parts // _MOST_LATE:
            least = min(_LEAST_WINDOW, parts)
            self.window, self.probing, self.crowded = max(least, self.window - 1), False, True
        elif late:
            self.probing = False
        else:
            more = max(1, self.window // 2) if self.probing else 1
            # Beyond once the model it is agreed which parts follow as soon as they have landed.
            self.window = min(2 * parts, self.window + more)

    def land(self, step: int) -> None:
        """A part has landed."""
        self.landed += 1
        if self.landed == 0:
            self.began = step

    def passes(self, step: int, parts: int, *, chooses: bool) -> float | None:
        """Own steps in which all parts land once; None until that is known.

        For who ``chooses`` bits by it: one if the link is never full although everything is sent
        that can be: fewer bits would not help. Where a worker has no time for more parts, fewer
        bits let each of them arrive sooner.
        """
        widest = self.window == 2 * parts
        free = chooses and widest and self.allowance >= parts and not self.crowded
        if self.probing and not widest and self.landed > 0:  # there will be more of them yet
            self.began, self.landed = step, 0
        if self.landed < 2 * parts or step - self.began < _LEAST_STEPS:
            return None
        return 1.0 if free else (step - self.began) * parts / self.landed

    def count_anew(self, step: int) -> None:
        """What was counted of the passes is known to all."""
        self.began, self.landed, self.crowded = step, 0, False

    def choose(self, steps: float, step: int, workers: int, parts: int) -> bool:
        """Fewer bits if the model takes more than a few steps; more, one try, if it is fast.

        Args:
            steps: In which the model passes, on average over the workers.
            step: Own steps; counting begins anew.
            workers: How many there are.
            parts: Likewise.

        Returns:
            Whether the precision has changed.
        """
        self.count_anew(step)
        self.counts += 1
        bits = [update_bits(precision, workers) for precision in PRECISIONS]
        place = now = PRECISIONS.index(self.precision)
        if steps > FEW:
            while place < len(PRECISIONS) - 1:
                place += 1
                if steps * bits[place] <= FEW * bits[now]:
                    break
            self.patience = self.patience * _RETRY if self.tried else self.patience
            self.tried = False
        elif (
            place and self.counts >= self.patience and steps * bits[place - 1] <= FEW * bits[place]
        ):
            place, self.tried = place - 1, True
        elif self.tried:
            self.tried, self.patience = False, 1
        if place == now:
            return False
        self.precision, self.counts, self.probing = PRECISIONS[place], 0, True
        self.landed = -parts
        return True


def _smooth(mean: float, new: float) -> float:
    return new if mean == 0 else mean + _SMOOTHING * (new - mean)
