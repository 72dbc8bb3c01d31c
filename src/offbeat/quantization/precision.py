"""Automatic choice of the precision of messages from measurements that all workers share.

There is no model of the network. The workers measure a *load*: how much the messages use of a
limited resource, relative to the allowed use. The load is assumed to be proportional to the bits
per number. The next measurement checks each choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.arguments import Precision

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8", "int4", "int2")
"""All precisions, from most to fewest bits."""

_PATIENCE_FACTOR = 4  # by which each change in the opposite direction lengthens the patience
_QUIET_PERIODS = 8  # multiples of the patience without a change after which it becomes shorter
_MAX_PATIENCE = 4**6


@dataclass
class PrecisionControl:
    """Chooses a precision from a sequence of loads. All workers call it with the same arguments.

    - A load above 1 selects the precision with the most bits that should bring it to 1 or below, or
      the one with the fewest bits if none should.
    - A load so low that the next precision with more bits should keep it at or below ``margin``
      selects that precision, once ``patience`` measurements have passed since the last change.
    - Fewer bits are on trial if durations are given. They are reversed if the next measurement
      shows that steps did not become shorter, because quantization takes time, too.

    Each change in the opposite direction to the last one makes the patience four times as long, so
    that noise does not make the precision oscillate. Long periods without a change shorten it.

    The names of the attributes are keys of checkpoints.

    Attributes:
        precision: Precision in use.
        counts: Number of measurements since it was chosen.
        patience: Number of measurements to wait for before more bits are tried.
        heading: Direction of the last change: 1 to fewer bits, −1 to more bits, 0 before the
            first.
        on_trial: True if the last change was to fewer bits and no measurement has followed.
        before: Precision before the last change.
        before_seconds: Duration of a step before the last change.
        refused: True if fewer bits were reversed. The next try must then wait for ``patience``.
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
        """Check the last choice against a measurement, and choose again.

        Args:
            load: Measured load.
            bits: Bits per number at each precision.
            choices: Precisions to choose from, from most to fewest bits.
            margin: Largest load that may be expected of more bits, at most 1.
            seconds: Duration of a step. None: fewer bits are not on trial.

        Returns:
            True if the precision has changed.
        """
        self.counts += 1
        on_trial, self.on_trial = self.on_trial, False
        if on_trial and seconds is not None and seconds >= self.before_seconds:
            self.refused = True
            return self._change(self.before, -1)
        costs = [bits[precision] for precision in choices]
        new = now = choices.index(self.precision)
        must_wait = self.counts < self.patience
        if self.patience > 1 and self.counts >= _QUIET_PERIODS * self.patience:
            self.patience //= _PATIENCE_FACTOR
        if load > 1:
            while new < len(choices) - 1 and (new == now or load * costs[new] > costs[now]):
                new += 1
            if new == now or (self.refused and must_wait):
                return False
            self.refused, self.on_trial = False, seconds is not None
            self.before_seconds = seconds or 0.0
            return self._change(choices[new], 1)
        if now and not must_wait and load * costs[now - 1] <= margin * costs[now]:
            return self._change(choices[now - 1], -1)
        return False

    def _change(self, precision: Precision, direction: int) -> bool:
        if direction == -self.heading:
            self.patience = min(_MAX_PATIENCE, _PATIENCE_FACTOR * self.patience)
        self.before, self.precision = self.precision, precision
        self.heading, self.counts = direction, 0
        return True
