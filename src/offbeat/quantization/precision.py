"""Automatic choice of the precision of messages, from what the workers measure together.

No model of the network is fitted. The workers measure a *load*: how much of something scarce the
messages use, relative to what they may use. The load is assumed to be proportional to the bits of a
message, and each choice is checked by the next measurement.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.arguments import Precision

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8", "int4", "int2")
"""The most exact first."""

_RETRY = 4  # factor on the number of measurements to wait for, after a change that was reversed
_QUIET = 8  # times the patience without a change, after which it is divided by the factor
_MOST_PATIENCE = 4**6


@dataclass
class PrecisionControl:
    """Chooses a precision from a sequence of loads. All workers call it with the same arguments.

    - Load above 1: the most exact precision that should bring it to 1, or the one with fewest bits.
    - Load so low that one more exact precision should keep it below ``margin``: that one, once
      enough measurements have passed since the last change (``patience``).
    - Fewer bits are taken back if steps did not become shorter, because quantization takes time,
      too. This is checked if durations are given.

    Each change in the opposite direction to the last one makes the patience four times as long, so
    that noise does not move the precision back and forth for ever.

    Attributes:
        precision: Precision in use.
        counts: Number of measurements since it was chosen.
        patience: Number of measurements to wait for before more bits are tried.
        heading: Direction of the last change: 1 to fewer bits, −1 to more bits, 0 before the first.
        on_trial: True if the last change was to fewer bits and has not been checked.
        before: Precision before the last change.
        before_seconds: Duration of a step before the last change.
        refused: True if fewer bits were taken back; they, too, then wait for ``patience``.
    """

    precision: Precision = "float32"
    counts: int = 0
    patience: int = 1
    heading: int = 0
    on_trial: bool = False
    before: Precision = "float32"
    before_seconds: float = 0.0
    refused: bool = False

    def update(
        self,
        load: float,
        bits: Mapping[str, float],
        *,
        choices: Sequence[Precision] = PRECISIONS,
        margin: float = 1.0,
        seconds: float | None = None,
    ) -> bool:
        """Judge the last choice by a measurement, and choose again.

        Args:
            load: Measured load.
            bits: Bits that a number costs at each precision.
            choices: Precisions to choose from, the most exact first.
            margin: Largest load that more bits may be expected to cause, at most 1.
            seconds: Duration of a step. None: fewer bits are not on trial.

        Returns:
            True if the precision has changed.
        """
        self.counts += 1
        on_trial, self.on_trial = self.on_trial, False
        if on_trial and seconds is not None and seconds >= self.before_seconds:
            self.refused = True
            return self._change(self.before, -1)
        costs = [bits[one] for one in choices]
        place = now = choices.index(self.precision)
        waits = self.counts < self.patience
        if not waits and self.patience > 1 and self.counts >= _QUIET * self.patience:
            self.patience //= _RETRY
        if load > 1:
            while place < len(choices) - 1 and (place == now or load * costs[place] > costs[now]):
                place += 1
            if place == now or (self.refused and waits):
                return False
            self.refused, self.on_trial = False, seconds is not None
            self.before_seconds = seconds or 0.0
            return self._change(choices[place], 1)
        if now and not waits and load * costs[now - 1] <= margin * costs[now]:
            return self._change(choices[now - 1], -1)
        return False

    def _change(self, precision: Precision, heading: int) -> bool:
        if heading == -self.heading:
            self.patience = min(_MOST_PATIENCE, _RETRY * self.patience)
        self.before, self.precision = self.precision, precision
        self.heading, self.counts = heading, 0
        return True
