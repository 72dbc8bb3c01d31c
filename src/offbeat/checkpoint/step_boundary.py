"""Access of ``offbeat.save`` and ``offbeat.load`` to a synchronizer between two steps.

A checkpoint belongs to the synchronizer, so this module may use its private attributes.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.averaging import Worker
from offbeat.checkpoint.synchronizer_state import check_state
from offbeat.errors import AttachError
from offbeat.synchronizer import Synchronizer, require_synchronizer


@dataclass(frozen=True)
class StepBoundary:
    """A synchronizer between two steps.

    Attributes:
        model: The attached model.
        worker: This worker.
        guard: Context around all communication.
        state: Returns the synchronizer's ``state_dict``. A collective.
        check: Raises CheckpointError unless the synchronizer can load the given state.
        sharded: True if this worker holds shards of the model.
    """

    model: nn.Module
    worker: Worker
    guard: AbstractContextManager[None]
    state: Callable[[], dict[str, Any]]
    check: Callable[[Any], None]
    sharded: bool

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.worker.team.everyone.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.worker.team.everyone.size

    @property
    def optimizers(self) -> list[Optimizer]:
        """The attached optimizers."""
        return [one.optimizer for one in self.worker.optimizers]

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.worker.optimizers[0].parameters[0].device

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the JSON-serializable ``value`` of every process, in rank order. A collective."""
        payload, everyone = json.dumps(value).encode(), self.worker.team.everyone
        with self.guard:
            return [json.loads(one) for one in everyone.gather_bytes(payload, what=what)]


@contextlib.contextmanager
def step_boundary(sync: Synchronizer, what: str, *, loads: bool = False) -> Iterator[StepBoundary]:
    """Return a context between two steps for saving or loading a checkpoint.

    ``stats`` does not count its time and bytes.

    Args:
        sync: The synchronizer that ``attach`` returned.
        what: Name of the caller, for errors.
        loads: True if the caller replaces the local model. Everything in flight lands first.

    Raises:
        TypeError: ``sync`` is not a synchronizer.
        AttachError: see ``Synchronizer.state_dict`` and ``load_state_dict``.
    """
    require_synchronizer(sync)
    iteration = sync._iteration
    sync._require_active(what)
    if sync._shards is not None:
        if iteration.shows_consensus:
            raise AttachError(
                f"{what} inside consensus() with a model that fully_shard has divided: no worker's "
                "file would hold all of it; save there with torch.distributed.checkpoint"
            )
        sync._shards.reshard()
    if loads:
        iteration.require_own_model(what)
    iteration.require_boundary(what)

    def check(state: Any) -> None:
        check_state(state, iteration.flow, sync.stats)

    try:
        with sync._recorder.paused(), sync._team.account.paused():
            if loads:  # a sum that is still in flight must not land on the loaded model
                with iteration.guard:
                    sync._consensus.settle()
            yield StepBoundary(
                model=sync._attached_objects[0],
                worker=sync._worker,
                guard=iteration.guard,
                state=sync.state_dict,
                check=check,
                sharded=sync._shards is not None,
            )
    finally:
        if loads:
            sync._recorder.restart()
