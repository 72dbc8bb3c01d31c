"""A wire that chooses its own precision during training: float32, bfloat16 or int8.

A *wire* sums tensors over the workers at some precision. ``AdaptiveWire`` is for strategies whose
workers block until a mean has arrived (BSP, LocalSGD). It measures how long they block.
The measurements are a part of the votes.
"""

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
"""Target: workers wait for the network for at most this share of the training time."""
CHOICES: tuple[Precision, ...] = ("float32", "bfloat16", "int8")
"""Precisions to choose from. With int4 and int2 the quantization errors would grow too large."""
_BITS: dict[str, float] = {precision: sum_bits(precision) for precision in CHOICES}
# More bits are chosen only if their expected load (see AdaptiveWire) is at most this. With 1, the
# precision would oscillate.
_MARGIN = 0.5
_MIN_STEPS = 16  # least average number of local steps per worker between two choices
_MIN_SUMS = 4  # least number of sums, of the tensor with the most, between two choices
_CONTROL_STREAM = "the choice of a precision"  # key of the state of the choice in ``state_dict``


class AdaptiveWire(Wire):
    """Sums over the workers at a precision that they choose together.

    **Choice.** ``PrecisionControl`` chooses the precision from a *load*: the time for which workers
    wait for the network, divided by the time that ``MOST_WAITING`` allows. In each round the
    shortest wait among the workers counts as the network wait of every worker. The worker with the
    shortest wait arrived last, so it waited only for the network. Longer waits also contain the
    time until the last worker arrived.

    **Agreement.** In each round, each worker evaluates the tally of the previous round
    (``apply_measurements``). All workers read the same numbers and make the same choice. It applies
    to all sums that start afterwards. Therefore all workers must start their sums and decide their
    rounds in the same order.

    **Errors.** A *stream* is a sequence of sums of the same tensor. A quantized sum stores its
    quantization errors for the next sum of the stream. If the next sum is exact, the worker adds
    the errors to its contribution. So no errors are lost when the precision becomes float32.

    Args:
        team: The workers.

    Attributes:
        control: Chooses the precision; in the same state on all workers.
        reason: Reason for the current precision, for ``Stats.details``.
    """

    def __init__(self, team: Team) -> None:
        super().__init__(team, "auto")
        self.control = PrecisionControl()
        self.reason = "initial precision"
        self._previous_tally: Handle[tuple[float, ...]] | None = None
        # Number of coming tallies to ignore, because they were measured at the previous precision.
        self._outdated_tallies = 0
        # Totals over all workers since the last choice.
        self._steps = self._seconds = self._waited_seconds = 0.0
        self._sums_by_stream: dict[str, int] = {}  # number of sums since the last choice
        # Local steps, clock and seconds waited, at the last vote with a step. The next vote reports
        # the increase of each. None if the next vote has nothing to report.
        self._last_vote: tuple[int, float, float] | None = None
        self._exact_streams: set[str] = set()  # streams whose last sum was exact
        self._sent_errors: dict[str, ErrorFeedback] = {}  # errors to restore if a sum is undone

    @property
    @override
    def strategy_sets_precision(self) -> bool:
        return False

    # -- measurements and choice -----------------------------------------------------------------

    @property
    @override
    def measurement_count(self) -> int:
        return 2 + self._team.size

    @override
    def measurements(self, step: int, *, stepping: bool) -> tuple[float, ...]:
        """Return steps and seconds since the last call with ``stepping``, and one wait per worker.

        The wait of this worker is the seconds that it waited. The waits of other workers are 0, so
        the tally lists all waits. If nothing was measured, this worker's wait is infinity, and
        steps and seconds are 0.

        Args:
            step: Number of local steps so far.
            stepping: False if this worker takes no step. It then reports no measurement.
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
        """Evaluate the previous round's tally, which may change the precision.

        Blocks until that tally has arrived.

        Args:
            sums: Sum of ``measurements`` over the workers in this round, for the next call.
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
        step, waited = self._seconds / self._steps, self._waited_seconds / self._steps  # per step
        # With step − waited of computing: allowed / (allowed + computing) = MOST_WAITING.
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
        """Move the stored errors of ``stream`` into an exact contribution."""
        errors = self._streams.pop(stream)
        tensor.add_(errors.sent.reshape(-1)[: tensor.numel()].to(tensor.device))
        errors.add_summed(tensor, self._team.rank)
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
        """Return the errors of all streams, and one entry with the state of the choice.

        Its "sent" contains all numbers of the state, its "summed" the previous tally. Times are
        relative to now, because clocks differ between runs. May block until that tally has arrived.
        """
        control = [
            float(PRECISIONS.index(value)) if isinstance(value, str) else float(value)
            for value in astuple(self.control)
        ]
        now, account = self._team.host.now(), self._team.account.wait_seconds
        sums = max(self._sums_by_stream.values(), default=0)
        totals = [self._steps, self._seconds, self._waited_seconds, sums]
        step, clock, waited = (0, now, account) if self._last_vote is None else self._last_vote
        interval = [self._last_vote is not None, step, now - clock, account - waited]
        numbers = [*control, self._outdated_tallies, *totals, *interval]
        tally = () if self._previous_tally is None else self._previous_tally.wait()
        return {
            **super().state_dict(),
            _CONTROL_STREAM: {
                "sent": torch.tensor(numbers, dtype=torch.float64, device="cpu"),
                "summed": torch.tensor(tally, dtype=torch.float64, device="cpu"),
            },
        }

    @override
    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        errors = {stream: value for stream, value in state.items() if stream != _CONTROL_STREAM}
        super().load_state_dict(errors)
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
