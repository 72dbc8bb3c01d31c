"""Interface between the training loop of a run and the method that trains the model.

A ``Method`` trains on one worker. ``Attached`` is the method of all strategies of this package. A
``Baseline`` has the settings of something that strategies are compared with, and its ``start``
creates the ``Method``. A *task* is what one worker trains: model, optimizer, loss, data, schedule.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from typing_extensions import override

from offbeat.lab.recipes import Task
from offbeat.strategies import Strategy
from offbeat.synchronizer import Synchronizer
from offbeat.telemetry import Stats


class Method(ABC):
    """Trains the model of a task on one worker, batch by batch."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of batches that this worker has trained on."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Training seconds of this worker so far: computing and waiting, without evaluations."""

    @property
    def step_seconds(self) -> float | None:
        """Duration of a step that is final only after ``finish``, or None.

        If it is not None, the final value replaces all earlier training seconds by step · duration.
        """
        return None

    @property
    @abstractmethod
    def stats(self) -> Stats:
        """Totals of this worker, such as its waiting time. A total that is not measured is zero."""

    @abstractmethod
    def train(self, batch: Any) -> None:
        """Train on one batch, whose tensors are on the model's device."""

    @abstractmethod
    def consensus(self) -> AbstractContextManager[None]:
        """Give all workers the same model, for an evaluation inside the context. A collective.

        At the end of the context, each worker gets its own model back. The time in the context does
        not count as training time.
        """

    @abstractmethod
    def finish(self) -> None:
        """End the training and leave the same model on all workers. A collective."""


class Attached(Method):
    """Trains a task with a strategy of this package.

    Args:
        task: Task whose model the strategy is attached to.
        lr_scale: Factor on the learning rate.
        sync: The synchronizer that ``attach`` returned.
    """

    def __init__(self, task: Task, lr_scale: float, sync: Synchronizer) -> None:
        self._task, self._lr_scale, self.sync = task, lr_scale, sync

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
        task, sync = self._task, self.sync
        with task.scaled_lr(self._lr_scale):
            loss = task.loss(task.model, batch)
            loss.backward()
            if task.clip_norm is not None:
                sync.clip_grad_norm_(task.clip_norm)
            sync.record(loss=loss.detach())
            task.optimizer.step()
        task.advance()

    @override
    def consensus(self) -> AbstractContextManager[None]:
        return self.sync.consensus()

    @override
    def finish(self) -> None:
        self.sync.finish()


SAVING = ("checkpoints", "save_every", "resume")
"""Fields of ``Job`` about checkpoints. Only methods with a ``Synchronizer`` support them."""


class Baseline(ABC):
    """Settings of training that is not a strategy for ``attach``, to compare strategies with.

    Subclasses are frozen dataclasses. ``start`` creates the ``Method`` that trains.
    """

    name: ClassVar[str]
    """Name on the command line, such as ``torch:ddp``."""
    simulated: ClassVar[bool]
    """True if the baseline can also run in the simulator."""
    refused: ClassVar[tuple[str, ...]] = ("wire", "injection", "log", *SAVING)
    """Fields of ``Job`` that the baseline does not support."""

    @classmethod
    def require(cls) -> None:
        """Raise unless the packages that the baseline needs are installed.

        Raises:
            ImportError: a package is missing. The message says how to install it.
        """
        return

    @abstractmethod
    def start(
        self,
        task: Task,
        lr_scale: float,
        under: Callable[[Strategy], Synchronizer],
        batches: Callable[[], Iterable[Any]],
        timeout_seconds: float,
    ) -> Method:
        """Start training on this worker. A collective.

        Args:
            task: The task, on its device.
            lr_scale: Factor on the learning rate.
            under: Function that attaches a strategy to the task, for baselines based on a strategy.
            batches: Function that returns a new iterable over this worker's batches, beginning with
                the first one, on the model's device.
            timeout_seconds: Time-out of operations between workers.
        """
