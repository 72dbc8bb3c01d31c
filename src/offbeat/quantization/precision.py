"""Automatic choice of the precision of messages from measurements during training.

The input is a *load*: the measured use of a limited resource by the messages, divided by the
allowed use. A load above 1 is too high. Example: workers wait for the network in 30 % of the time,
and 10 % are allowed; the load is 3. The only assumption is that the load is proportional to the
bits per number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.arguments import Precision

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8", "int4", "int2")
"""All precisions, from most to fewest bits."""

_PATIENCE_FACTOR = 4  # a change of direction multiplies the patience by this
_QUIET_PERIODS = 8  # from 8·patience measurements without a change on, the patience shrinks
_MAX_PATIENCE = 4**6


@dataclass
class PrecisionControl:
    """Chooses a precision from a sequence of loads.

    All workers must call ``update`` with the same arguments. Then all choose the same precision.

    If the load is measured at b bits, the expected load at b' bits is load · b'/b. Each call of
    ``update`` applies these rules:

    - *Fewer bits*: If the load is above 1, choose the precision with the most bits whose expected
      load is at most 1. If there is none, choose the precision with the fewest bits.
    - *More bits*: Choose the next precision with more bits if its expected load is at most
      ``margin``, and if ``patience`` measurements were made since the last change.
    - *Trial*: After a change to fewer bits, the next measurement must show shorter steps. If not,
      quantization takes longer than it saves: return to the previous precision. There is no trial
      if the caller does not give the duration of a step.
    - *Patience*: ``patience`` is multiplied by 4 (up to 4⁶) if two successive changes have opposite
      directions, so that noise does not make the precision oscillate. Each measurement divides it
      by 4 (down to 1) once 8·``patience`` measurements were made since the last change.

    Attributes:
        precision: Precision in use.
        counts: Number of measurements since the last change.
        patience: Smallest ``counts`` at which a change to more bits is allowed.
        heading: Direction of the last change: 1 to fewer bits, −1 to more bits, 0 before the first
            change.
        on_trial: True if the next measurement decides a trial.
        before: Precision before the last change.
        before_seconds: Duration of a step before the last change to fewer bits. 0 if unknown.
        refused: True if the last trial failed. Fewer bits then also need ``patience`` measurements.
    """

    # The names of the fields are keys of checkpoints.

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
        """Apply the rules above to a measurement.

        Args:
            load: Load measured at the current precision (≥ 0).
            bits: Bits per number, by precision.
            choices: Precisions to choose from, from most to fewest bits.
            margin: Largest expected load, at most 1, at which more bits are chosen.
            seconds: Measured duration of a step, in seconds. None means no trial.

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
