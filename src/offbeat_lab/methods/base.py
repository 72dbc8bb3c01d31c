"""Interface between the training loop of a run and the method that trains the model.

A *task* is what one worker trains: model, optimizer, loss, data and schedule. A ``Method`` trains
it. ``Attached`` is the method for strategies of this package. A *reference* is ``ideal`` or a
method of torch, to compare strategies with: ``Reference`` has its settings and creates
its ``Method``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from offbeat import Stats, Strategy, Synchronizer
from offbeat.extend import clock_of, snapshot_of
from offbeat_lab.recipes import Task


class Method(ABC):
    """Trains the model of a task on one worker, batch by batch."""

    ends_alone: ClassVar[bool] = False
    """True if a worker may end before the others, when its clock has reached the time limit."""

    loss: Tensor | None = None
    """Loss of the last batch on this worker. None: before the first batch, or not known."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of batches that this worker has trained on."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Training seconds of this worker so far, without evaluations."""

    @property
    def step_seconds(self) -> float | None:
        """Duration of a step if ``seconds`` is defined as step · duration; else None.

        The duration is final only after ``finish``, and then applies to earlier steps, too.
        """
        return None

    @property
    @abstractmethod
    def stats(self) -> Stats:
        """Totals of this worker, such as its waiting time; zero where not measured."""

    @abstractmethod
    def train(self, batch: Any) -> None:
        """Train on one batch, whose tensors are on the model's device."""

    @abstractmethod
    def snapshot(self) -> list[Tensor]:
        """Return copies in host memory of what this worker contributes to an evaluation.

        Their mean over the workers is the evaluated model; see ``average_over_workers``. The order
        of the tensors is that of ``Replica.snapshot``. Sends nothing and takes no training time.
        """

    def combine_seconds(self, seconds: Sequence[float]) -> float:
        """Return the time of an evaluation, given the workers' ``seconds`` at its step."""
        return max(seconds)

    @abstractmethod
    def finish(self) -> None:
        """End the training and leave the same model on all workers. A collective."""


class Attached(Method):
    """Trains a task with a strategy of this package, by the result of ``attach``.

    Attributes:
        sync: The synchronizer.
        now: Function that returns the seconds of this worker's clock, virtual in the simulator. All
            processes of a machine have the same clock.
    """

    ends_alone: ClassVar[bool] = True

    def __init__(self, task: Task, sync: Synchronizer) -> None:
        self._task, self.sync = task, sync
        self.now = clock_of(sync)

    @property
    @override
    def step(self) -> int:
        return self.sync.step

    @property
    @override
    def seconds(self) -> float:
        return self.sync.stats.compute_seconds + self.sync.stats.wait_seconds

    @property
    @override
    def stats(self) -> Stats:
        return self.sync.stats

    @override
    def train(self, batch: Any) -> None:
        self._backward(batch)
        self._optimize()

    def _backward(self, batch: Any, weight: float = 1.0) -> None:
        """Add the gradient of one batch, times ``weight``."""
        loss = self._task.loss(self._task.model, batch)
        (weight * loss).backward()
        self.loss = loss.detach()

    def _optimize(self) -> None:
        """Take a step with the gradients."""
        task, sync = self._task, self.sync
        with task.scaled_lr():
            if task.clip_norm is not None:
                sync.clip_grad_norm_(task.clip_norm)
            sync.record(loss=self.loss)
            if task.position is None:  # otherwise the number of this worker's steps is unknown
                sync.record(total_steps=task.steps)
            task.optimizer.step()
        task.advance()

    @override
    def snapshot(self) -> list[Tensor]:
        return snapshot_of(self.sync)

    @override
    def finish(self) -> None:
        self.sync.finish()


class Elastic(Attached):
    """Trains a task with workers that die and join, whose clocks all begin with the training.

    Args:
        task: The task.
        sync: Synchronizer of elastic training.
    """

    def __init__(self, task: Task, sync: Synchronizer) -> None:
        super().__init__(task, sync)
        self._start = self.now()
        sync.share_state(lambda: (self._start, task.position), self._load)

    def _load(self, state: tuple[float, int]) -> None:
        self._start, self._task.position = state

    @property
    @override
    def seconds(self) -> float:
        return self.now() - self._start


class Reference(ABC):
    """Settings of an algorithm to compare strategies with. Subclasses are frozen dataclasses."""

    name: ClassVar[str]
    """Name on the command line, such as ``torch:ddp``."""
    simulated: ClassVar[bool]
    """True if the reference can also run in the simulator."""
    refused: ClassVar[tuple[str, ...]] = ("wire", "adam_correction", "injection", "log")
    """Fields of ``Job`` that the reference does not support."""

    @abstractmethod
    def start(
        self,
        task: Task,
        under: Callable[[Strategy], Synchronizer],
        batches: Callable[[], Iterable[Any]],
    ) -> Method:
        """Start training on this worker. A collective.

        Args:
            task: The task, on its device.
            under: Function that attaches a strategy to the task, for references based on one.
            batches: Function that returns a new iterable over this worker's batches, from the
                first, on the model's device.
        """
