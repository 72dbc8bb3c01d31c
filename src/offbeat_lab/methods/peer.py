"""Base classes of *peers*: training methods of torch.

A peer runs the code of torch, not offbeat's. It trains a *task*: model, optimizer, loss, data
and schedule. ``Peer`` holds the settings of the method, and ``TrainingLoop`` runs the training.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from offbeat import Stats, Strategy, Synchronizer
from offbeat.extend import Replica, check_settings
from offbeat_lab.evaluation import explain_failures
from offbeat_lab.methods.base import Method, Reference
from offbeat_lab.recipes import Task
from offbeat_lab.recipes.base import device_of
from offbeat_lab.timing.step_time import now

PREFIX = "torch:"
"""Beginning of the names of peers."""


@dataclass(frozen=True, kw_only=True)
class Peer(Reference):
    """Settings of a method of torch. It runs on real processes only."""

    simulated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_settings(self)

    @override
    def start(
        self,
        task: Task,
        under: Callable[[Strategy], Synchronizer],
        batches: Callable[[], Iterable[Any]],
    ) -> "TrainingLoop":
        with explain_failures(f"failed in the start of {self.name}"):
            return self.loop(task)

    @abstractmethod
    def loop(self, task: Task) -> "TrainingLoop":
        """Create the training loop. A collective."""


class TrainingLoop(Method):
    """An ordinary training loop around a model, timed with the wall clock.

    Args:
        name: Name of the method, for error messages.
        task: The task.
        module: The task's model, or a wrapper of it such as DDP.
        differ: True if the parameters may differ between workers. The training then ends with the
            mean of the parameters.
    """

    def __init__(self, name: str, task: Task, module: nn.Module, *, differ: bool = False) -> None:
        self._differ = differ
        self._name, self._task, self._module = name, task, module
        trainable = [p for p in task.model.parameters() if p.requires_grad]
        self._replica = Replica(task.model, trainable)
        self._step, self._seconds, self._began = 0, 0.0, self._now()

    @property
    @override
    def step(self) -> int:
        return self._step

    @property
    @override
    def seconds(self) -> float:
        return self._seconds

    @property
    @override
    def stats(self) -> Stats:
        """Steps and seconds. The waiting time and bytes sent are unknown, and zero here."""
        return Stats(steps=self._step, details={"seconds": self._seconds})

    @override
    def train(self, batch: Any) -> None:
        task = self._task
        with explain_failures(f"failed in batch {self._step + 1} of {self._name}"):
            task.loss(self._module, batch).backward()
            with task.scaled_lr():
                if task.clip_norm is not None:
                    nn.utils.clip_grad_norm_(task.model.parameters(), task.clip_norm)
                task.optimizer.step()
        self._step += 1
        self._seconds = time.perf_counter() - self._began
        task.advance()

    @override
    def snapshot(self) -> list[Tensor]:
        began = self._now()
        copies = self._replica.snapshot("cpu")
        self._began += self._now() - began
        return copies

    @override
    def finish(self) -> None:
        before = self._now()
        with explain_failures(f"failed in the end of {self._name}"):
            self._average()
            self._seconds += self._now() - before

    def _average(self) -> None:
        """Average the parameters if they may differ, and copy the buffers of rank 0."""
        with torch.no_grad():
            if self._differ:
                for _, parameter in self._replica.parameters:
                    dist.all_reduce(parameter.data)
                    parameter.div_(dist.get_world_size())
            for buffer in self._task.model.buffers():
                dist.broadcast(buffer, src=0)

    def _now(self) -> float:
        return now(device_of(self._task.model))
