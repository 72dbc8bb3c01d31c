"""Which precision suits means that workers wait for, by how long they wait."""

from dataclasses import dataclass

from offbeat.fabric.coding import sum_bits
from offbeat.fabric.wire import Precision

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8")
"""From the most exact one down. Fewer bits are for those that keep in the model what rounding takes
away: fed back from a memory, the error of so few grows large."""
MOST_WAITING = 0.1
"""The share of the time that may be spent waiting."""

_CLEARLY_LESS = (
    0.5  # of it: more bits are tried where no more is expected, or they would come and go
)
_RETRY = 4  # times as long is waited for the next try, after one that went back
_QUIET = 8
_MOST_PATIENCE = 4**6


@dataclass
class Choice:
    """What is chosen, from the same figures on all workers.

    float32, unless waiting for the link takes more than a tenth of the time; then the most exact
    precision that should bring it under that, if it goes with the bits. Each change is on trial:
    fewer bits must make a step shorter (rounding takes time, too), more bits must keep waiting
    under a tenth. Else it is taken back. So that nothing comes and goes, the next change waits four
    times as long after each that goes the other way than the one before, until all has been quiet
    for eight times that.

    Attributes:
        precision: What is sent.
        before: Index of what was sent before a change that is on trial; -1: there is none.
        before_seconds: Of a step, then.
        heading: Of the last change: 1 to fewer bits, −1 to more; 0 if it was taken back.
        looks: Since the last change.
        patience: Looks to wait for before something is tried.
    """

    precision: Precision = PRECISIONS[0]
    before: int = -1
    before_seconds: float = 0.0
    heading: int = 0
    looks: int = 0
    patience: int = 1

    def look(self, computing: float, waiting: float) -> str:
        """Judge the change on trial, and perhaps make another one.

        Args:
            computing: Seconds of a step, on average over the workers, without ``waiting``.
            waiting: Seconds of a step in which the link keeps all waiting.

        Returns:
            Why it has changed; empty if it has not.
        """
        self.looks += 1
        now, step = PRECISIONS.index(self.precision), computing + waiting
        share = waiting / step if step else 0.0
        waits = f"the link keeps all waiting {100 * share:.0f} % of the time in {self.precision}"
        before, self.before = self.before, -1
        if before >= 0:
            fewer = now > before
            if fewer and step >= self.before_seconds:
                return self._take_back(before, f"steps are not shorter in {self.precision}")
            if not fewer and share > MOST_WAITING:
                return self._take_back(before, waits)
        if self.looks < self.patience:
            return ""
        if self.patience > 1 and self.looks >= _QUIET * self.patience:
            self.patience //= _RETRY
        if share > MOST_WAITING and now < len(PRECISIONS) - 1:
            there = now + 1
            while there < len(PRECISIONS) - 1 and self._share(computing, waiting, there) > (
                MOST_WAITING
            ):
                there += 1
            return self._try(there, step, waits)
        if now and self._share(computing, waiting, now - 1) <= _CLEARLY_LESS * MOST_WAITING:
            return self._try(now - 1, step, waits)
        return ""

    def _share(self, computing: float, waiting: float, there: int) -> float:
        """Of waiting, if it goes with the bits."""
        waiting *= sum_bits(PRECISIONS[there]) / sum_bits(self.precision)
        return waiting / (computing + waiting) if waiting else 0.0

    def _try(self, there: int, step: float, why: str) -> str:
        now, before = PRECISIONS.index(self.precision), self.heading
        self.before, self.before_seconds = now, step
        self.heading = 1 if there > now else -1
        return self._change(there, why, longer=before == -self.heading)

    def _take_back(self, there: int, why: str) -> str:
        self.heading = 0
        return self._change(there, why, longer=True)

    def _change(self, there: int, why: str, *, longer: bool) -> str:
        if longer:
            self.patience = min(_MOST_PATIENCE, _RETRY * self.patience)
        self.precision, self.looks = PRECISIONS[there], 0
        return f"{why}: {self.precision} from now on"
