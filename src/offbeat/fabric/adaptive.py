"""A wire that chooses its precision by how long the workers wait, the same on all of them."""

import logging
import math
from dataclasses import astuple, fields

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.fabric.choice import PRECISIONS, Choice
from offbeat.fabric.coding import Coding
from offbeat.fabric.handle import Completed, Handle
from offbeat.fabric.numbers import Numbers, Plain
from offbeat.fabric.team import Team
from offbeat.fabric.wire import Precision, Wire, _Stream

logger = logging.getLogger("offbeat")

_LEAST_STEPS = 16  # own steps, before a look at what was measured
_LEAST_MEANS = 4  # and sums of the same stream
_KEY = "the choice of a precision"  # among the streams of a checkpoint
_Sums = tuple[float, ...]


class AdaptiveWire(Wire):
    """Sums over the workers at a precision that they choose together; see ``Choice``.

    Each round every worker puts into the roll what it has ``measured``, and tells the wire of the
    roll when it has ``acted`` on the round. The roll before that one has come in by then, on all
    workers: what follows from it holds for all sums from the next round on. So every sum has to be
    started in a round, or before its roll is called.

    Of the seconds that the workers have waited since the roll before, those of the one that has
    waited least count: it came last, so nobody but the link kept it waiting.

    Errors that are kept when the precision changes are fed back in the next sum, whatever its own.

    Args:
        team: The workers.

    Attributes:
        choice: What is sent now.
        reason: Why, in words.
    """

    def __init__(self, team: Team) -> None:
        super().__init__(team, "auto")
        self.choice = Choice()
        self.reason = "it begins so"
        self._before: Handle[_Sums] | None = None  # what the roll before has told
        self._stale = 0  # rolls to come that were called before the last change
        self._steps = self._seconds = self._waited = 0.0  # of all workers, in those rolls
        self._sums: dict[str, int] = {}  # by stream, since the last look
        self._since: tuple[int, float, float] | None = None  # step, clock, waited at the last roll
        self._exactly: set[str] = set()  # streams whose last sum was exact
        self._fed: dict[str, _Stream] = {}  # what such a tentative sum has fed back

    @property
    @override
    def chosen(self) -> bool:
        """Whether the strategy chooses: it does not."""
        return False

    # -- what is measured, and what follows ------------------------------------------------------

    @property
    @override
    def slots(self) -> int:
        """How many numbers ``measured`` gives."""
        return 2 + self._team.size

    @override
    def measured(self, step: int, *, stepping: bool) -> _Sums:
        """Since the last roll: steps, seconds, and in the place of this rank those waited.

        Args:
            step: The own one in which the roll is called.
            stepping: False gives nothing: others have waited while this worker did not compute.
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
        """A round has been acted on: look at what the roll before it has told.

        Args:
            sums: What all workers have put into its roll, ``measured`` last.
        """
        before, self._before = self._before, sums
        if before is None or self._team.size == 1:
            return
        steps, seconds, *waits = before.wait()[-self.slots :]
        if self._stale:
            self._stale -= 1
            return
        known = [one for one in waits if one != math.inf]
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        self._waited += min(known, default=0.0) * len(known)
        means = max(self._sums.values(), default=0)
        if self._steps < _LEAST_STEPS * self._team.size or means < _LEAST_MEANS:
            return
        waited = self._waited / self._steps
        reason = self.choice.look(self._seconds / self._steps - waited, waited)
        self._steps = self._seconds = self._waited = 0.0
        self._sums.clear()
        if reason:
            self.reason, self._stale = reason, 1
            logger.info("means and gradients: %s", reason)

    @override
    def interrupted(self) -> None:
        """All workers have met, and something else than training may follow."""
        self._since = None

    @override
    def told(self) -> dict[str, str]:
        return {"wire": self.choice.precision, "wire_reason": self.reason}

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
        self._exactly.discard(stream)
        if self._coding(Plain(tensor), "auto") is None:
            self._exactly.add(stream)
            if contribute and stream in self._streams:
                self._feed_back(tensor, stream, tentative=tentative)
        return super().sum(
            tensor, stream=stream, what=what, contribute=contribute, tentative=tentative
        )

    def _feed_back(self, tensor: Tensor, stream: str, *, tentative: bool) -> None:
        """Add the errors of both stages to an exact contribution; then there are none."""
        errors = self._streams.pop(stream)
        tensor.add_(errors.sent.reshape(-1)[: tensor.numel()])
        chunk = errors.summed.numel()
        own = tensor[self._team.rank * chunk :][:chunk]
        own.add_(errors.summed[: own.numel()])
        if tentative:
            self._fed[stream] = errors

    @override
    def take_back(self, stream: str) -> None:
        if stream not in self._exactly:
            super().take_back(stream)
        elif stream in self._fed:
            self._streams[stream] = self._fed.pop(stream)

    @override
    def _coding(self, like: Numbers, precision: Precision) -> Coding | None:
        return super()._coding(like, self.choice.precision if precision == "auto" else precision)

    # -- checkpoints -----------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The errors, and the choice in the form of one more stream."""
        precision, *numbers = astuple(self.choice)
        now, account = self._team.host.now(), self._team.account.wait_seconds
        step, clock, waited = (0, now, account) if self._since is None else self._since
        kept = [PRECISIONS.index(precision), *numbers, self._stale]
        kept += [self._steps, self._seconds, self._waited, max(self._sums.values(), default=0)]
        kept += [self._since is not None, step, now - clock, account - waited]
        before = () if self._before is None else self._before.wait()
        return {
            **super().state_dict(),
            _KEY: {
                "sent": torch.tensor(kept, dtype=torch.float64),
                "summed": torch.tensor(before, dtype=torch.float64),
            },
        }

    @override
    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        super().load_state_dict({name: one for name, one in state.items() if name != _KEY})
        kept, before = (state[_KEY][name].tolist() for name in ("sent", "summed"))
        place, change, step_seconds, *counts, stale = kept[: len(fields(Choice)) + 1]
        kept = kept[len(fields(Choice)) + 1 :]
        self.choice = Choice(PRECISIONS[int(place)], int(change), step_seconds, *map(int, counts))
        self._before = Completed(tuple(before)) if before else None
        self._steps, self._seconds, self._waited, means, running, step, seconds, waited = kept
        self._stale, self._sums = int(stale), {_KEY: int(means)}
        now, account = self._team.host.now(), self._team.account.wait_seconds
        self._since = (int(step), now - seconds, account - waited) if running else None
        self.reason = "as it was saved"
