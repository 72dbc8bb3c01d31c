"""How far apart the workers' models are: measured beside the training, under any strategy."""

import logging
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.errors import CommunicationError
from offbeat.fabric import Communicator, Handle
from offbeat.means.replica import as_real, group_tensors, pack, staging_dtype
from offbeat.strategies.base import Strategy, Worker

logger = logging.getLogger("offbeat")
_PIECE = 2**14  # elements of each model that are compared at a time, in float64


@dataclass(eq=False)
class _Call:
    """A measurement that this worker has come to, and those who can take part in it.

    Attributes:
        able: How many can, once all have come.
        models: What this worker's model was then; None: it cannot take part, or shows it later.
        step: Own steps then.
    """

    able: Handle[Tensor]
    models: list[Tensor] | None
    step: int


class Distance:
    """Measures how far apart the models are, every so many own steps.

    **Measured**, of the averaged parameters x_n of N workers, after the optimizer has stepped and
    before what the strategy does at the end of the step:

        distance          Σ_n ‖x_n − x̄‖ / N,  x̄ = Σ_n x_n / N
        distance_largest  max ‖x_a − x_b‖ over all pairs

    Nobody waits for it. At every n-th own step a worker *calls*: one number, in the background.
    Once all have called, each sends its model, in the background, too.

    - Where workers that step take equally many steps, models are those of the step at which they
      called. If the measurement before is still under way on one of them, this one is left out.
    - Where they do not (``AsyncAveraging``, the parameter server), steps of the same number may lie
      far apart in time. There models are those of the moment at which a worker sees that all have
      called, which is the same up to a step, and the next call comes n steps after this one at the
      earliest.

    While a worker has no more steps to take, nothing is measured; own steps are counted anew after
    every meeting of all (``consensus``, ``finish``). What fails here, because a worker is behind by
    more than the time-out, say, ends the measuring with a warning, and not the training.

    *Communication*: one number, the model once (all to all: worker k gets the k-th part of all
    models), and a sum of N(N+1)/2 numbers; beside the training's, on connections of its own, and
    not counted. *Memory*: two copies of the parameters while one is under way. Computing:
    N²/2 operations on each of 1/N of the parameters.

    Args:
        worker: Whose record and details are told.
        strategy: What is trained with.
        every: n, own steps.
        beside: A communicator of the same workers that nobody else uses; a failure of the
            training's would end the training.
    """

    def __init__(
        self, worker: Worker, strategy: Strategy, every: int, beside: Communicator
    ) -> None:
        self._worker, self._every = worker, every
        self._in_step = type(strategy).meet is Strategy.meet and strategy.rounds != "boundary"
        # Two orders of operations: one worker may call again while another still sends its model.
        self._calling, self._sending = beside, beside.twin()
        self._active = True
        self._groups = group_tensors(p for _, p in worker.replica.parameters if p.numel())
        self._steps = 0  # own, since all have met
        self._next = every  # own steps at the next call
        self._called = 0
        self._calls: deque[_Call] = deque()
        self._free = True  # no copy of this worker's model is kept
        self._step = 0  # of the copy
        self._parts: list[Handle[Tensor]] | None = None
        self._squares: Handle[Tensor] | None = None

    def stepped(self) -> None:
        """This worker has taken a step, which has not been synchronized yet. Never blocks."""
        if not self._active:
            return
        self._steps += 1
        try:
            self._advance()
            if self._steps >= self._next and (self._in_step or self._idle):
                self._next = self._steps + self._every
                self._call(able=self._free)
        except CommunicationError as error:
            self._give_up(str(error))

    def meet(self) -> None:
        """All workers have come, and none of them steps: end what is under way. Blocks."""
        fabric = self._worker.team.fabric
        with self._worker.team.account.paused():
            numbers = torch.tensor([self._called, not self._active], device=fabric.control_device)
            handle = fabric.maximum(numbers, what="number of measurements")
            called, failed = handle.wait().tolist()
        if failed and self._active:
            self._give_up("it has ended on another worker")
        if failed:
            return
        self._steps, self._next = 0, self._every
        try:
            while self._called < called:  # others have come to some that this worker has not
                self._call(able=False)
            self._advance(wait=True)
        except CommunicationError as error:
            self._give_up(str(error))

    def close(self, *, together: bool) -> None:
        """Give connections back; see ``Communicator.close``."""
        self._active = False
        self._calling.close(together=together)

    def _give_up(self, why: str) -> None:
        self.close(together=False)
        self._calls.clear()
        self._parts = self._squares = None
        rank = self._worker.rank
        logger.warning("rank %d: the distance is not measured any more: %s", rank, why)

    @property
    def _idle(self) -> bool:
        return self._free and not self._calls

    def _call(self, *, able: bool) -> None:
        number = torch.tensor([float(able)], device=self._calling.control_device)
        handle = self._calling.sum(number, what="call for a measurement of the distance")
        models = self._copy() if able and self._in_step else None
        self._calls.append(_Call(handle, models, self._worker.step))
        self._called += 1

    def _copy(self) -> list[Tensor]:
        """This worker's parameters, padded so that each worker can have a part of the same size."""
        self._free, copies = False, []
        for group in self._groups:
            count = sum(as_real(p.detach()).numel() for p in group)
            padded = count + -count % self._worker.size
            flat = torch.zeros(padded, dtype=staging_dtype(group[0]), device=group[0].device)
            pack(group, flat[:count])
            copies.append(flat)
        return copies

    def _advance(self, *, wait: bool = False) -> None:
        """Go on with what is under way, as far as it has come; with ``wait`` to its end."""
        while True:
            if self._squares is not None:
                if not wait and not self._squares.done():
                    return
                self._report(self._squares.wait())
                self._squares, self._free = None, True
            elif self._parts is not None:
                if not wait and not all(part.done() for part in self._parts):
                    return
                total = _squares([part.wait() for part in self._parts], self._worker.size)
                total = total.to(self._sending.control_device)
                self._squares = self._sending.sum(total, what="sum of the distances")
                self._parts = None
            elif self._calls:
                if not wait and not self._calls[0].able.done():
                    return
                self._answer(self._calls.popleft())
            else:
                return

    def _answer(self, call: _Call) -> None:
        """All have come to ``call``: send the model, if all can."""
        if call.able.wait().item() < self._worker.size:
            self._free = self._free or call.models is not None
            return
        models, self._step = call.models, call.step
        if models is None:
            models, self._step = self._copy(), self._worker.step
        what = "models, to measure the distance"
        self._parts = [self._sending.exchange(flat, what=what) for flat in models]

    def _report(self, squares: Tensor) -> None:
        distances = squares.sqrt().tolist()
        size, details = self._worker.size, self._worker.details
        found = {
            "distance": sum(distances[:size]) / size,
            "distance_largest": max(distances[size:], default=0.0),
            "distance_step": self._step,
        }
        self._worker.record.update(found)
        details.update(found, distances_measured=details.get("distances_measured", 0) + 1)


def _squares(parts: list[Tensor], workers: int) -> Tensor:
    """Of the models' parts: ‖x_n − x̄‖² of every worker, then ‖x_a − x_b‖² of every pair.

    Args:
        parts: Each with one piece of the same length from each worker.
        workers: N.
    """
    total = torch.zeros(workers + workers * (workers - 1) // 2, dtype=torch.float64)
    for part in parts:
        for piece in part.view(workers, -1).split(_PIECE, dim=1):
            models = piece.double()
            models = models - models[0]  # so that equal models are exactly at their mean
            from_mean = (models - models.mean(0)).square().sum(1)
            total += torch.cat([from_mean, torch.pdist(models).square()]).cpu()
    return total
