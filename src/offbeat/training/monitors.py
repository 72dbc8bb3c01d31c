"""Monitors, which measure a running training under any strategy; see ``Synchronizer.monitor``.

``GradientChange`` measures Δ, the relative change of the smoothed squared gradient norm from one
step to the next. The strategy SelSync averages when Δ of a worker reaches a threshold δ, and
typical values of Δ help to choose δ. ``Distance`` measures the distance between the workers' models
in the background.
"""

import logging
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.averaging import AttachedOptimizer, Worker
from offbeat.averaging.buckets import as_real, group_tensors, pack, staging_dtype
from offbeat.errors import CommunicationError
from offbeat.strategies.trigger import RelativeChange
from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Handle

logger = logging.getLogger("offbeat")
_CHUNK = 2**14  # number of elements of each model that are compared at a time, in float64


class GradientChange:
    """Adds Δ to each telemetry record as ``relative_change``. Sends nothing.

    **Measured** for N workers and g_i, the unscaled gradient of all optimizers in step i, before
    g_i is clipped or averaged by the strategy:

        m_i = (1 − a)·m_{i−1} + a·‖g_i‖²,   a = min(1, N/100)
        Δ_i = |m_i − m_{i−1}| / m_{i−1},    Δ = ∞ in the first step

    A non-finite norm gives Δ = 0 and does not change m. After three of them in a row, the next
    finite norm counts as the first step. With ``node_group`` N is the number of nodes, and g_i is
    the mean gradient of the node.

    *State*: m. It starts again at every ``attach``, because a checkpoint does not contain it.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._change, self._squared = worker, RelativeChange(), 0.0

    def __call__(self, optimizer: AttachedOptimizer, loss_scale: float, last: bool) -> None:
        """Add the gradients of one optimizer, which a GradScaler has scaled by ``loss_scale``.

        The ``last`` optimizer of the step completes the measurement.
        """
        self._squared += self._worker.squared_norm(optimizer.gradients()) / loss_scale**2
        if last:
            squared, self._squared = self._squared, 0.0
            smoothing = min(1.0, self._worker.size / 100)
            self._worker.record["relative_change"] = self._change.update(squared, smoothing)


@dataclass(eq=False)
class _Request:
    """A measurement that this worker has requested.

    Attributes:
        able: Number of workers that can take part. This sum over the workers completes when all
            workers have requested the measurement.
        models: Copy of this worker's model at the request. None: this worker cannot take part, or
            copies its model later.
        step: Number of this worker's local steps at the request.
    """

    able: Handle[Tensor]
    models: list[Tensor] | None
    step: int


class Distance:
    """Measures the distance between the workers' models at every n-th local step, or less often.

    **Measured** for the averaged parameters x_i of N workers, after the optimizers have stepped and
    before the strategy averages models at the end of the step:

        distance          Σ_i ‖x_i − x̄‖ / N,  x̄ = Σ_i x_i / N
        distance_largest  max ‖x_a − x_b‖ over all pairs
        distance_step     number of this worker's local steps when x_i was copied

    At every n-th local step a worker requests a measurement: it sends one number. When all workers
    have requested the measurement, each worker sends a copy of its model. Everything is sent in the
    background. The time of the copy depends on ``in_step``:

    - True: workers take equally many steps between two synchronizations. A worker copies its model
      at its request, so all copies belong to the same step. If some worker has not completed the
      previous measurement by then, this one is skipped.
    - False: workers proceed independently, and a slow worker may reach the same step much later. A
      worker copies its model after all workers have requested the measurement, so all copies belong
      to about the same time. It requests the next measurement after this one is complete.

    Workers block for a measurement only at a barrier, such as the start of a consensus. There the
    measurements in progress are completed, and steps are counted from 0 again. If a measurement
    fails, for example because of a time-out, a warning is logged and no more distances are
    measured. Training continues.

    *Communication* of a measurement, on separate connections that ``Stats`` does not count: one
    number; the model once (all-to-all, in which worker k receives the k-th part of all models); and
    a sum of N(N+1)/2 numbers. *Memory*: two copies of the parameters. *Computing*: each worker
    compares N(N−1)/2 pairs of model parts, each of 1/N of the parameters.

    Args:
        every: Number n of local steps between two measurements (≥ 1).
        in_step: True if workers take equally many steps between two synchronizations.
        communicator: Connects the same workers. Only measurements use it, so that a failed
            measurement does not end training.
    """

    def __init__(
        self, worker: Worker, every: int, *, in_step: bool, communicator: Communicator
    ) -> None:
        self._worker, self._every, self._in_step = worker, every, in_step
        # All workers must start the operations of one communicator in the same order. But one
        # worker may send its model before it requests the next measurement, and another worker
        # after that. So requests and models use different communicators.
        self._requesting, self._sending = communicator, communicator.twin()
        self._active = True
        self._groups = group_tensors(p for _, p in worker.replica.parameters if p.numel())
        self._steps = 0  # number of local steps since the last barrier
        self._next = every  # value of _steps at the next request
        self._requested = 0  # number of requests so far
        self._requests: deque[_Request] = deque()  # requests for which no model was sent yet
        self._free = True  # False while a copy of this worker's model exists
        self._step = 0  # number of local steps at the copy
        self._parts: list[Handle[Tensor]] | None = None  # parts of all models, in flight
        self._squares: Handle[Tensor] | None = None  # sum of the squared distances, in flight

    def step_ended(self) -> None:
        """Count a local step, and request or advance measurements. Never blocks."""
        if not self._active:
            return
        self._steps += 1
        try:
            self._advance()
            if self._steps >= self._next and (self._in_step or self._idle):
                self._next = self._steps + self._every
                self._request(able=self._free)
        except CommunicationError as error:
            self._give_up(str(error))

    def pause(self) -> None:
        """Complete the measurements in progress. Called at a barrier. A collective. Blocks."""
        communicator = self._worker.team.communicator
        with self._worker.team.account.paused():
            numbers = torch.tensor(
                [self._requested, not self._active], device=communicator.control_device
            )
            handle = communicator.maximum(numbers, what="number of measurements")
            requested, failed = handle.wait().tolist()
        if failed and self._active:
            self._give_up("it has ended on another worker")
        if failed:
            return
        self._steps, self._next = 0, self._every
        try:
            while self._requested < requested:  # another worker has made more requests
                self._request(able=False)
            self._advance(wait=True)
        except CommunicationError as error:
            self._give_up(str(error))

    def close(self, *, together: bool) -> None:
        """Stop measuring and close the connections; see ``Communicator.close``."""
        self._active = False
        self._requesting.close(together=together)

    def _give_up(self, reason: str) -> None:
        self.close(together=False)
        self._requests.clear()
        self._parts = self._squares = None
        rank = self._worker.rank
        logger.warning("rank %d: the distance is no longer measured: %s", rank, reason)

    @property
    def _idle(self) -> bool:
        return self._free and not self._requests

    def _request(self, *, able: bool) -> None:
        number = torch.tensor(
            [float(able)], dtype=torch.float32, device=self._requesting.control_device
        )
        handle = self._requesting.sum(number, what="request to measure the distance")
        models = self._copy() if able and self._in_step else None
        self._requests.append(_Request(handle, models, self._worker.step))
        self._requested += 1

    def _copy(self) -> list[Tensor]:
        """Return a copy of the parameters, padded to a multiple of the number of workers."""
        self._free, copies = False, []
        for group in self._groups:
            count = sum(as_real(p.detach()).numel() for p in group)
            padded = count + -count % self._worker.size
            flat = torch.zeros(padded, dtype=staging_dtype(group[0]), device=group[0].device)
            pack(group, flat[:count])
            copies.append(flat)
        return copies

    def _advance(self, *, wait: bool = False) -> None:
        """Advance the measurements in progress. With ``wait`` block until all are complete."""
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
            elif self._requests:
                if not wait and not self._requests[0].able.done():
                    return
                self._answer(self._requests.popleft())
            else:
                return

    def _answer(self, request: _Request) -> None:
        """Send the model, if all workers can take part in the requested measurement."""
        if request.able.wait().item() < self._worker.size:
            self._free = self._free or request.models is not None
            return
        models, self._step = request.models, request.step
        if models is None:
            models, self._step = self._copy(), self._worker.step
        what = "models, to measure the distance"
        self._parts = [self._sending.exchange(flat, what=what) for flat in models]

    def _report(self, squares: Tensor) -> None:
        distances = squares.sqrt().tolist()
        size, details = self._worker.size, self._worker.details
        measured = {
            "distance": sum(distances[:size]) / size,
            "distance_largest": max(distances[size:], default=0.0),
            "distance_step": self._step,
        }
        self._worker.record.update(measured)
        details.update(measured, distances_measured=details.get("distances_measured", 0) + 1)


def _squares(parts: list[Tensor], workers: int) -> Tensor:
    """Return ‖x_i − x̄‖² for every worker, then ‖x_a − x_b‖² for every pair, over ``parts`` only.

    Each of the ``parts`` consists of one equal-sized piece of every model x_i, in rank order.
    """
    count = workers + workers * (workers - 1) // 2
    total = torch.zeros(count, dtype=torch.float64, device="cpu")
    for part in parts:
        for chunk in part.view(workers, -1).split(_CHUNK, dim=1):
            models = chunk.double()
            models = models - models[0]  # equal models then have a distance of exactly 0
            from_mean = (models - models.mean(0)).square().sum(1)
            total += torch.cat([from_mean, torch.pdist(models).square()]).cpu()
    return total
