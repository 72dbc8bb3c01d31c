"""A wire whose precision is chosen during training, for means that workers wait for."""

import logging
import math
from dataclasses import astuple, fields

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.decoding import Numbers, Plain
from offbeat.quantization.payloads import Coding, sum_bits
from offbeat.quantization.precision import PRECISIONS, PrecisionControl
from offbeat.quantization.wire import Precision, Wire, _Stream
from offbeat.transport.handle import Completed, Handle
from offbeat.transport.team import Team

logger = logging.getLogger("offbeat")

MOST_WAITING = 0.1
"""Largest share of the time that may be spent waiting for the link."""
CHOICES: tuple[Precision, ...] = ("float32", "bfloat16", "int8")
"""Fewer bits suit parts with error feedback in the model only: fed back from a memory, their
quantization error grows large."""
_BITS: dict[str, float] = {one: sum_bits(one) for one in CHOICES}
_MARGIN = 0.5  # more bits are tried if they should use half of the allowed waiting; else they flap
_LEAST_STEPS = 16  # local steps between two looks at the measurements
_LEAST_SUMS = 4  # sums of the same stream between two looks
_KEY = "the choice of a precision"  # a stream of this name holds it in checkpoints
_Sums = tuple[float, ...]


class AdaptiveWire(Wire):
    """Sums over the workers at a precision that they choose together.

    The load of ``PrecisionControl`` is the time that the link makes the workers wait, relative to
    ``MOST_WAITING``. Of the waiting between two rounds that of the worker counts that waited least:
    it was the last to arrive, so only the link kept it waiting.

    Every worker adds its measurements to its vote. When a round is decided, the tally of the round
    before has arrived on all workers, and a choice that follows from it holds for all sums that are
    started from then on. So all sums of a round must be started on the same side of that moment on
    all workers.

    If an exact sum follows a quantized one of the same stream, it carries the quantization errors.

    Args:
        team: The workers.

    Attributes:
        control: Chooses the precision.
        reason: Why the precision was chosen, for ``Stats.details``.
    """

    def __init__(self, team: Team) -> None:
        super().__init__(team, "auto")
        self.control = PrecisionControl()
        self.reason = "initial precision"
        self._before: Handle[_Sums] | None = None  # tally of the round before
        self._stale = 0  # tallies to come whose measurements preceded the last change
        self._steps = self._seconds = self._waited = 0.0  # of all workers, since the last look
        self._sums: dict[str, int] = {}  # by stream, since the last look
        self._since: tuple[int, float, float] | None = None  # step, clock, waited at the last vote
        self._exact_streams: set[str] = set()  # streams whose last sum was exact
        self._fed: dict[str, _Stream] = {}  # errors that a tentative exact sum has carried

    @property
    @override
    def chosen(self) -> bool:
        return False

    # -- measurements and choice -----------------------------------------------------------------

    @property
    @override
    def slots(self) -> int:
        return 2 + self._team.size

    @override
    def measured(self, step: int, *, stepping: bool) -> _Sums:
        """Steps and seconds since the last vote, and at the place of this rank seconds waited.

        Args:
            step: Local steps so far.
            stepping: False gives no measurement: this worker did not compute.
        """
        waits = [0.0] * self._team.size
        waits[self._team.rank] = math.inf
        now, before = (step, self._team.host.now(), self._team.account.wait_seconds), self._since
        if stepping:
            self._since = now
        if before is None or not stepping:
            return (0.0, 0.0, *waits)
        waits[self._team.rank] = now[2] - before[2]
        return (float(step - before[0]), now[1] - before[1], *waits)

    @override
    def acted(self, sums: Handle[_Sums]) -> None:
        """A round is decided: look at the tally of the round before.

        Args:
            sums: Sums of ``measured`` over the workers.
        """
        before, self._before = self._before, sums
        if before is None or self._team.size == 1:
            return
        steps, seconds, *waits = before.wait()
        if self._stale:
            self._stale -= 1
            return
        known = [one for one in waits if one != math.inf]
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        self._waited += min(known, default=0.0) * len(known)
        most = max(self._sums.values(), default=0)
        if self._steps >= _LEAST_STEPS * self._team.size and most >= _LEAST_SUMS:
            self._look()

    def _look(self) -> None:
        """Choose by the measurements since the last look."""
        step, waited = self._seconds / self._steps, self._waited / self._steps
        allowed = (step - waited) * MOST_WAITING / (1 - MOST_WAITING)
        load = waited / allowed if allowed > 0 else math.inf if waited > 0 else 0.0
        before = self.control.precision
        self._steps = self._seconds = self._waited = 0.0
        self._sums.clear()
        if self.control.update(load, _BITS, choices=CHOICES, margin=_MARGIN, seconds=step):
            share = 100 * waited / step if step else 0.0
            self.reason = f"the link made workers wait {share:.0f} % of the time in {before}"
            self._stale = 1
            logger.info("means: %s from now on, as %s", self.control.precision, self.reason)

    @override
    def interrupted(self) -> None:
        self._since = None

    @override
    def told(self) -> dict[str, str]:
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
        self._sums[stream] = self._sums.get(stream, 0) + 1
        self._fed.pop(stream, None)
        self._exact_streams.discard(stream)
        if self._coding(Plain(tensor), "auto") is None:
            self._exact_streams.add(stream)
            if contribute and stream in self._streams:
                self._feed_back(tensor, stream, tentative=tentative)
        return super().sum(
            tensor, stream=stream, what=what, contribute=contribute, tentative=tentative
        )

    def _feed_back(self, tensor: Tensor, stream: str, *, tentative: bool) -> None:
        """Add the errors of both stages to an exact contribution; none are left."""
        errors = self._streams.pop(stream)
        tensor.add_(errors.sent.reshape(-1)[: tensor.numel()])
        chunk = errors.summed.numel()
        own = tensor[self._team.rank * chunk :][:chunk]
        own.add_(errors.summed[: own.numel()])
        if tentative:
            self._fed[stream] = errors

    @override
    def take_back(self, stream: str) -> None:
        if stream not in self._exact_streams:
            super().take_back(stream)
        elif stream in self._fed:
            self._streams[stream] = self._fed.pop(stream)

    @override
    def _coding(self, like: Numbers, precision: Precision) -> Coding | None:
        return super()._coding(like, self.control.precision if precision == "auto" else precision)

    # -- checkpoints -----------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The errors, and choice and measurements in the form of one more stream."""
        control = [
            float(PRECISIONS.index(one)) if isinstance(one, str) else float(one)
            for one in astuple(self.control)
        ]
        now, account = self._team.host.now(), self._team.account.wait_seconds
        step, clock, waited = (0, now, account) if self._since is None else self._since
        measured = [self._steps, self._seconds, self._waited, max(self._sums.values(), default=0)]
        since = [self._since is not None, step, now - clock, account - waited]
        before = () if self._before is None else self._before.wait()
        numbers = [*control, self._stale, *measured, *since]
        return {
            **super().state_dict(),
            _KEY: {
                "sent": torch.tensor(numbers, dtype=torch.float64),
                "summed": torch.tensor(before, dtype=torch.float64),
            },
        }

    @override
    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        super().load_state_dict({name: one for name, one in state.items() if name != _KEY})
        numbers, before = (state[_KEY][name].tolist() for name in ("sent", "summed"))
        for one in fields(PrecisionControl):
            value, present = numbers.pop(0), getattr(self.control, one.name)
            whole = PRECISIONS[int(value)] if isinstance(present, str) else type(present)(value)
            setattr(self.control, one.name, whole)
        self._before = Completed(tuple(before)) if before else None
        stale, self._steps, self._seconds, self._waited, most, running, *since = numbers
        self._stale, self._sums = int(stale), {_KEY: int(most)}
        step, seconds, waited = since
        now, account = self._team.host.now(), self._team.account.wait_seconds
        self._since = (int(step), now - seconds, account - waited) if running else None
        self.reason = "loaded from a checkpoint"
