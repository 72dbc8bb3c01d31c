"""A wire that chooses its precision during training, for means that workers wait for."""

import logging
import math
from dataclasses import astuple, fields

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.decoding import LazyVector, TensorVector
from offbeat.quantization.payloads import StageCodecs, sum_bits
from offbeat.quantization.precision import PRECISIONS, PrecisionControl
from offbeat.quantization.two_stage_sum import ErrorFeedback
from offbeat.quantization.wire import Precision, Wire
from offbeat.transport.handle import Completed, Handle
from offbeat.transport.team import Team

logger = logging.getLogger("offbeat")

MOST_WAITING = 0.1
"""Largest share of the time that workers may wait for the link."""
CHOICES: tuple[Precision, ...] = ("float32", "bfloat16", "int8")
"""Precisions to choose from.

With fewer bits the errors that the wire keeps grow large. Such precisions suit strategies that keep
the error in the model.
"""
_BITS: dict[str, float] = {precision: sum_bits(precision) for precision in CHOICES}
_MARGIN = 0.5  # load at most expected of more bits; with a larger one the choice oscillates
_MIN_STEPS = 16  # local steps per worker between two choices
_MIN_SUMS = 4  # sums of one stream between two choices
_CONTROL_STREAM = "the choice of a precision"  # entry of ``state_dict`` that holds the choice


class AdaptiveWire(Wire):
    """Sums over the workers at a precision that they choose together.

    The load of ``PrecisionControl`` is the time for which workers wait for the link, relative to
    ``MOST_WAITING``. Each round counts only the shortest wait of any worker. That worker arrived
    last, so it waited for the link alone; the other workers waited for it, too.

    Every vote carries the measurements of its worker. When a round is decided, the tally of the
    round before has arrived on all workers. They all read it then and make the same choice, which
    holds for all sums started afterwards. So all sums of a round must be started on the same side
    of that moment on all workers.

    An exact sum that follows a quantized sum of the same stream carries its errors. None are lost
    when the precision changes.

    Args:
        team: The workers.

    Attributes:
        control: Chooses the precision. Common.
        reason: Reason for the last choice, for ``Stats.details``.
    """

    def __init__(self, team: Team) -> None:
        super().__init__(team, "auto")
        self.control = PrecisionControl()
        self.reason = "initial precision"
        self._previous_tally: Handle[tuple[float, ...]] | None = None
        self._outdated_tallies = 0  # next tallies to ignore: measured before the last change
        # Sums over all workers since the last choice.
        self._steps = self._seconds = self._waited_seconds = 0.0
        self._sums_by_stream: dict[str, int] = {}  # since the last choice
        # Step, time and seconds waited at the last vote. None: no interval is being measured.
        self._last_vote: tuple[int, float, float] | None = None
        self._exact_streams: set[str] = set()  # streams whose last sum was exact
        self._sent_errors: dict[str, ErrorFeedback] = {}  # carried by tentative exact sums

    @property
    @override
    def strategy_sets_precision(self) -> bool:
        return False

    # -- measurements and choice -----------------------------------------------------------------

    @property
    @override
    def slots(self) -> int:
        return 2 + self._team.size

    @override
    def measurements(self, step: int, *, stepping: bool) -> tuple[float, ...]:
        """Return steps and seconds since the last vote, then one entry for each worker.

        The entry of this worker is the seconds that it waited. The other entries are 0, so that the
        tally lists the waits of all workers.

        Args:
            step: Local steps so far.
            stepping: False measures nothing, because this worker takes no step. Its entry is
                infinite, which excludes it.
        """
        waits = [0.0] * self._team.size
        waits[self._team.rank] = math.inf
        last = self._last_vote
        now = (step, self._team.host.now(), self._team.account.wait_seconds)
        if stepping:
            self._last_vote = now
        if last is None or not stepping:
            return (0.0, 0.0, *waits)
        waits[self._team.rank] = now[2] - last[2]
        return (float(step - last[0]), now[1] - last[1], *waits)

    @override
    def apply_measurements(self, sums: Handle[tuple[float, ...]]) -> None:
        """Evaluate the tally of the round before, and keep that of this round for the next one.

        Args:
            sums: Tally of ``measurements`` in the round that is being decided.
        """
        tally, self._previous_tally = self._previous_tally, sums
        if tally is None or self._team.size == 1:
            return
        steps, seconds, *waits = tally.wait()
        if self._outdated_tallies:
            self._outdated_tallies -= 1
            return
        known = [wait for wait in waits if wait != math.inf]
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        self._waited_seconds += min(known, default=0.0) * len(known)
        sums_of_a_stream = max(self._sums_by_stream.values(), default=0)
        if self._steps >= _MIN_STEPS * self._team.size and sums_of_a_stream >= _MIN_SUMS:
            self._choose()

    def _choose(self) -> None:
        """Choose a precision by the measurements since the last choice."""
        step, waited = self._seconds / self._steps, self._waited_seconds / self._steps
        allowed = (step - waited) * MOST_WAITING / (1 - MOST_WAITING)
        load = waited / allowed if allowed > 0 else math.inf if waited > 0 else 0.0
        previous = self.control.precision
        self._steps = self._seconds = self._waited_seconds = 0.0
        self._sums_by_stream.clear()
        if self.control.update(load, _BITS, choices=CHOICES, margin=_MARGIN, seconds=step):
            share = 100 * waited / step if step else 0.0
            self.reason = f"the link made workers wait {share:.0f} % of the time in {previous}"
            self._outdated_tallies = 1
            logger.info("means: %s from now on, as %s", self.control.precision, self.reason)

    @override
    def discard_interval(self) -> None:
        self._last_vote = None

    @override
    def details(self) -> dict[str, str]:
        return {"wire": self.control.precision, "wire_reason": self.reason}

    # -- sums ------------------------------------------------------------------------------------

    @override
    def sum(
        self,
        tensor: Tensor,
        *,
        stream: str,
        what: str,
        contribute: bool = True,
        tentative: bool = False,
    ) -> Handle[Tensor]:
        self._sums_by_stream[stream] = self._sums_by_stream.get(stream, 0) + 1
        self._sent_errors.pop(stream, None)
        self._exact_streams.discard(stream)
        if self._codecs_for(TensorVector(tensor), "auto") is None:
            self._exact_streams.add(stream)
            if contribute and stream in self._streams:
                self._add_errors(tensor, stream, tentative=tentative)
        return super().sum(
            tensor, stream=stream, what=what, contribute=contribute, tentative=tentative
        )

    def _add_errors(self, tensor: Tensor, stream: str, *, tentative: bool) -> None:
        """Add the errors of both stages to an exact contribution, and remove them."""
        errors = self._streams.pop(stream)
        tensor.add_(errors.sent.reshape(-1)[: tensor.numel()])
        size = errors.summed.numel()
        chunk = tensor[self._team.rank * size :][:size]
        chunk.add_(errors.summed[: chunk.numel()])
        if tentative:
            self._sent_errors[stream] = errors

    @override
    def undo(self, stream: str) -> None:
        if stream not in self._exact_streams:
            super().undo(stream)
        elif stream in self._sent_errors:
            self._streams[stream] = self._sent_errors.pop(stream)

    @override
    def _codecs_for(self, vector: LazyVector, precision: Precision) -> StageCodecs | None:
        chosen = self.control.precision if precision == "auto" else precision
        return super()._codecs_for(vector, chosen)

    # -- checkpoints -----------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return the errors of all streams, and choice and measurements as one more stream.

        The entry "sent" of that stream has the fields of ``control``, the number of outdated
        tallies, the measurements since the last choice, and the interval since the last vote. Times
        are relative to now, because clocks differ between runs. "summed" has the previous tally.
        """
        control = [
            float(PRECISIONS.index(value)) if isinstance(value, str) else float(value)
            for value in astuple(self.control)
        ]
        now, account = self._team.host.now(), self._team.account.wait_seconds
        sums = max(self._sums_by_stream.values(), default=0)
        measured = [self._steps, self._seconds, self._waited_seconds, sums]
        step, clock, waited = (0, now, account) if self._last_vote is None else self._last_vote
        interval = [self._last_vote is not None, step, now - clock, account - waited]
        numbers = [*control, self._outdated_tallies, *measured, *interval]
        tally = () if self._previous_tally is None else self._previous_tally.wait()
        return {
            **super().state_dict(),
            _CONTROL_STREAM: {
                "sent": torch.tensor(numbers, dtype=torch.float64),
                "summed": torch.tensor(tally, dtype=torch.float64),
            },
        }

    @override
    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        super().load_state_dict({key: one for key, one in state.items() if key != _CONTROL_STREAM})
        numbers, tally = (state[_CONTROL_STREAM][key].tolist() for key in ("sent", "summed"))
        for field in fields(PrecisionControl):
            number, current = numbers.pop(0), getattr(self.control, field.name)
            is_name = isinstance(current, str)
            value = PRECISIONS[int(number)] if is_name else type(current)(number)
            setattr(self.control, field.name, value)
        self._previous_tally = Completed(tuple(tally)) if tally else None
        outdated, self._steps, self._seconds, self._waited_seconds, sums, *interval = numbers
        self._outdated_tallies, self._sums_by_stream = int(outdated), {_CONTROL_STREAM: int(sums)}
        measuring, step, seconds, waited = interval
        now, account = self._team.host.now(), self._team.account.wait_seconds
        self._last_vote = (int(step), now - seconds, account - waited) if measuring else None
        self.reason = "loaded from a checkpoint"
