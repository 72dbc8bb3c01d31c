"""Access of ``offbeat.save`` and ``offbeat.load`` to a synchronizer between two training steps.

This module uses private attributes of ``Synchronizer``.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.checkpoint.synchronizer_state import check_state
from offbeat.errors import AttachError
from offbeat.synchronizer import Synchronizer, require_synchronizer


class StepBoundary:
    """The data and operations of a synchronizer that ``save`` and ``load`` need.

    Attributes:
        model: The attached model.
        optimizers: The attached optimizers.
        device: Device of the trained parameters.
        sharded: True if ``fully_shard`` has divided the model.
    """

    def __init__(self, sync: Synchronizer) -> None:
        self._sync = sync
        optimizers = sync._worker.optimizers
        self.model: nn.Module = sync._components.objects[0]
        self.optimizers: list[Optimizer] = [attached.optimizer for attached in optimizers]
        self.device: torch.device = optimizers[0].parameters[0].device
        self.sharded = sync._components.shards is not None

    # Rank and size are properties, because they change when training loses a worker.

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self._sync.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._sync.size

    def check(self, state: Any) -> None:
        """Raise CheckpointError unless this worker can load the synchronizer's state ``state``."""
        check_state(state, self._sync._iteration.flow, self._sync.stats)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the ``value`` of every process, in rank order. A collective."""
        payload, everyone = json.dumps(value).encode(), self._sync._team.everyone
        with self._sync._iteration.guard:
            return [json.loads(each) for each in everyone.gather_bytes(payload, what=what)]


@contextlib.contextmanager
def step_boundary(sync: Synchronizer, what: str, *, loads: bool = False) -> Iterator[StepBoundary]:
    """Return a context in which a checkpoint is saved or loaded, between two steps.

    ``Synchronizer.stats`` counts neither time nor bytes of the context. ``what`` is the name of the
    caller in errors. ``loads`` is True if the caller replaces the local model. Entering the context
    is then a collective, which completes all operations in flight.

    Raises:
        AttachError: after ``finish`` or ``detach``, or in the middle of an iteration. Or inside
            ``consensus``, if ``loads`` is set or ``fully_shard`` has divided the model.
        CheckpointError: inside ``consensus``, and another worker has called ``finish``. Or the
            caller loads, and the strategy cannot be saved and loaded.
    """
    require_synchronizer(sync)
    iteration = sync._iteration
    sync._require_active(what)
    if sync._components.shards is not None:
        if iteration.shows_consensus:
            raise AttachError(
                f"{what} inside consensus() with a model that fully_shard has divided: no worker's "
                "file would hold all of it; save there with torch.distributed.checkpoint"
            )
        sync._components.shards.reshard()
    if loads:
        sync._require_savable()
        iteration.require_own_model(what)
    iteration.require_boundary(what)
    sync._consensus.require_complete(what)
    try:
        with sync._recorder.paused(), sync._team.account.paused():
            if loads:  # a mean that arrives later would change the loaded model
                with iteration.guard:
                    sync._consensus.complete_operations()
            yield StepBoundary(sync)
    finally:
        if loads:
            sync._recorder.restart()
