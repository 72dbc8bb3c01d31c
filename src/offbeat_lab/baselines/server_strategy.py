"""Base classes of the strategies with a parameter server: settings, flow and state.

The vector of all parameters is divided into *shards*, one on each rank. A ``Rule`` applies the
workers' pushes to a shard. A consensus shows the server's model.
``offbeat.strategies.base`` explains the other terms.
"""

import logging
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat import OffbeatError, Strategy
from offbeat.extend import (
    AttachedOptimizer,
    CustomFlow,
    Flat,
    Flow,
    Round,
    Vote,
    Worker,
    squared_norm,
    staging_dtype,
)
from offbeat_lab.baselines.parameter_server import ParameterServer
from offbeat_lab.baselines.shard import Rule

logger = logging.getLogger("offbeat")


@dataclass(frozen=True, kw_only=True, repr=False)
class ServerStrategy(Strategy):
    """Base class of strategies in which each worker exchanges values with a parameter server.

    The server's model is the result of training: ``consensus`` gives it to all workers temporarily,
    ``finish`` permanently. ``consensus`` leaves out the steps that a worker has not pushed;
    ``finish`` pushes them first. The server holds no buffers. ``consensus`` and ``finish`` average
    floating-point and complex buffers over the workers, and set signed integer buffers to their
    maximum.
    """

    flow: ClassVar[type["ServerFlow"]]
    """Subclass of ``ServerFlow`` that drives the strategy on each worker."""

    @override
    def averages(self) -> CustomFlow:
        return CustomFlow(self.flow)


class ServerFlow(Flow):
    """Drives a strategy with a parameter server on one worker.

    A subclass defines ``flush`` and ``step_ended``. ``step_ended`` returns True if this worker's
    model has received values from the server.

    Attributes:
        tensors: Parameters of this worker's model, in the order of the server's vector.
        server: The parameter server. After ``start``, its vector is the initial model.
        unpushed: Number of local steps that this worker has not pushed yet.
    """

    can_save = False
    server: ParameterServer
    tensors: list[Tensor]
    unpushed = 0

    def __init__(self, strategy: Strategy, worker: Worker) -> None:
        super().__init__(strategy, worker)
        self._flushed = self._warned = False

    def rule(self) -> Rule:
        """Return the rule that applies pushes to a shard. By default it adds them.

        The background threads of the server hold the rule, so it must not hold the flow.
        """
        return Rule()

    @abstractmethod
    def flush(self) -> None:
        """Start the last push, with all local steps that this worker has not pushed yet.

        Called at most once, when training ends. May block until an earlier request is answered.
        """

    def barrier_reached(self, clock: int) -> None:
        """Handle the end of a barrier, given the minimum clock of all workers. Default: nothing."""

    # -- start, end and consensus ----------------------------------------------------------------

    @override
    def start(self) -> None:
        """Create the parameter server with this worker's model, which is equal on all workers."""
        self.tensors = [p for _, p in self.worker.replica.parameters]
        model, double = self.model, any(staging_dtype(p) == torch.float64 for p in self.tensors)
        dtype = torch.float64 if double else torch.float32
        vector = torch.empty(model.elements, dtype=dtype, device="cpu")
        model.read(0, vector)
        self.server = ParameterServer(self.worker.team, vector, self.rule())

    @property
    def model(self) -> Flat:
        """This worker's parameters as one vector."""
        return Flat(self.tensors)

    @property
    @override
    def unsynced(self) -> bool:
        return self.worker.touched or self.unpushed > 0

    @override
    def gradients_ready(self, optimizer: AttachedOptimizer, *, last: bool) -> bool:
        return False

    @override
    def enter_barrier(self, *, finishing: bool) -> None:
        """Push the remaining steps if training ends. Block until all workers are at the barrier."""
        if finishing and self.unsynced and not self._flushed:
            self.flush()
        self._flushed = self._flushed or finishing
        self.barrier_reached(self.server.barrier())

    @override
    def consensus(self, last: Round, *, final: bool) -> None:
        """Replace the parameters by the server's and average the buffers. A collective."""
        worker = self.worker
        self.model.write(0, self.server.read())
        if worker.size > 1:
            what = f"{'final mean' if final else 'consensus'} of the buffers at step {worker.step}"
            worker.model_mean.average_buffers(1.0, worker.size, what=what)
        # No worker may push before all workers have read the vector.
        worker.barrier("the end of the consensus")
        if final:
            self.update_details()
            self.server.leave()

    @override
    def snapshot(self) -> list[Tensor]:
        """Contribute this rank's shard of the server's vector, times the number of workers.

        The other elements are 0, so that the mean over the workers is the server's vector.
        """
        copies = super().snapshot()
        model = Flat(copies[: len(self.tensors)])
        model.write(0, self.server.own_part().mul_(self.worker.size))
        return copies

    # -- votes: sent only at a barrier, where no worker takes a step -------------------------------

    @override
    def vote(self, optimizer: int, *, stepping: bool) -> Round:
        """Report to all workers that this worker takes no step (``stepping`` is False here)."""
        return self.rounds.send(Vote())

    @override
    def decide(self, round: Round) -> bool:
        raise AssertionError("no worker of a parameter server votes in a step")

    # -- pushes ----------------------------------------------------------------------------------

    def check_push(self, values: Tensor) -> None:
        """Raise or warn if ``values``, which are pushed next, contain NaN or infinity.

        With ``non_finite="warn"`` only the first such push is logged, and the caller pushes the
        values nevertheless. A single worker is not checked.

        Raises:
            OffbeatError: A value is not finite, and ``non_finite`` is not "warn".
        """
        worker = self.worker
        if worker.size == 1 or math.isfinite(squared_norm([values])):
            return
        worker.details["non_finite"] = worker.details.get("non_finite", 0) + 1
        message = (
            f"rank {worker.rank} would push NaN or infinity to the parameter server at step "
            f"{worker.step}"
        )
        if worker.guarded:
            raise OffbeatError(f'{message}; the server has not received it (non_finite="raise")')
        if not self._warned:
            self._warned = True
            logger.warning('%s: all workers receive it; non_finite="raise" prevents that', message)

    def stage_push(self, values: Tensor) -> None:
        """Move ``values`` to the vector that is pushed next, and set ``unpushed`` to 0.

        ``values`` become 0. The caller must then start the request that pushes them. Non-finite
        values are handled as in ``check_push``.
        """
        self.check_push(values)
        self.server.vector.copy_(values)
        values.zero_()
        self.unpushed = 0

    def update_details(self) -> None:
        """Write the pulled bytes, and the statistics of this rank's shard, to ``Stats.details``."""
        details, shard = self.worker.details, self.server.shard
        details.update(
            pulled_bytes=self.server.pulled_bytes,
            pushes_served=shard.pushes,
            staleness_max=max(shard.staleness, default=0),
            staleness_histogram=dict(shard.staleness),
        )
