"""The parts of a synchronizer that ``offbeat.save`` and ``offbeat.load`` use between two steps."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.averaging import Worker


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
