"""All workers between two steps, for something that is not training, such as a checkpoint."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from offbeat.strategies.base import Worker


@dataclass(frozen=True)
class Aside:
    """What is done there sees of the synchronizer.

    Attributes:
        model: The attached one.
        worker: This one.
        guard: Around all that communicates.
        state: Gives the state of the synchronizer. A collective.
        check: Raises CheckpointError unless the synchronizer can load this state.
        divided: Whether this worker holds shards of the model.
    """

    model: nn.Module
    worker: Worker
    guard: AbstractContextManager[None]
    state: Callable[[], dict[str, Any]]
    check: Callable[[Any], None]
    divided: bool

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.worker.team.everyone.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.worker.team.everyone.size

    @property
    def optimizers(self) -> list[Optimizer]:
        """The attached ones."""
        return [part.optimizer for part in self.worker.parts]

    @property
    def device(self) -> torch.device:
        """Of the model."""
        return self.worker.parts[0].parameters[0].device

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every process's plain value, in rank order."""
        payload, everyone = json.dumps(value).encode(), self.worker.team.everyone
        with self.guard:
            return [json.loads(one) for one in everyone.gather_bytes(payload, what=what)]
