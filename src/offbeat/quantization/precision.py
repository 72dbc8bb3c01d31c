"""Automatic choice of the precision of messages from measurements during training.

The input is a *load*: how much of a limited resource the messages use, divided by the allowed use.
A load above 1 is too high. An example is the time that workers wait for the network, divided by a
tenth of the training time. The load is assumed to be proportional to the bits per number. Nothing
else is assumed about the network. The next load shows whether a choice was right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.arguments import Precision

PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "int8", "int4", "int2")
"""All precisions, from most to fewest bits."""

_PATIENCE_FACTOR = 4  # a change of direction multiplies the patience by this
_QUIET_PERIODS = 8  # 8·patience measurements without a change divide the patience by the factor
_MAX_PATIENCE = 4**6


@dataclass
class PrecisionControl:
    """Chooses a precision from a sequence of loads.

    All workers must call ``update`` with the same arguments. Then all choose the same precision.

    The expected load at b' bits is (load at b bits) · b'/b. Each call of ``update`` applies these
    rules:

    - *Fewer bits*: If the load is above 1, choose the precision with the most bits whose expected
      load is at most 1. If there is none, choose the precision with the fewest bits.
    - *More bits*: If the next precision with more bits has an expected load of at most ``margin``,
      and there were ``patience`` measurements since the last change, choose that precision.
    - *Trial*: If the caller gives the duration of a step, fewer bits are on trial until the next
      measurement. If that measurement shows no shorter steps, return to the previous precision,
      because quantization takes longer than it saves.
    - *Patience*: ``patience`` is multiplied by 4 (up to 4⁶) if two successive changes have opposite
      directions, so that noise does not make the precision oscillate. It is divided by 4 (down to
      1) after 8·``patience`` measurements without a change.

    Attributes:
        precision: Precision in use.
        counts: Number of measurements since the last change.
        patience: Smallest ``counts`` at which a change to more bits is allowed.
        heading: Direction of the last change: 1 to fewer bits, −1 to more bits, 0 before the first
            change.
        on_trial: True if the last change is on trial.
        before: Precision before the last change.
        before_seconds: Duration of a step before the last change to fewer bits. 0 if unknown.
        refused: True if the last trial failed. A change to fewer bits then also requires that
            ``counts`` is at least ``patience``.
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
        """Process a measurement, and change the precision if the rules above require it.

        Args:
            load: Load measured at the current precision (≥ 0).
            bits: Bits per number at each precision.
            choices: Precisions to choose from, from most to fewest bits.
            margin: Largest expected load, at most 1, at which more bits are chosen.
            seconds: Measured duration of a step, in seconds. None: there is no trial.

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
