"""Interface between the training loop of a run and the method that trains: strategy or baseline."""

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
        """Number of batches so far."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Training seconds of this worker so far: computing and waiting, without evaluation."""

    @property
    def step_seconds(self) -> float | None:
        """Seconds of every step, if the method determines them at the end of the run; else None."""
        return None

    @property
    @abstractmethod
    def stats(self) -> Stats:
        """Totals of this worker. Fields that the method does not measure are zero."""

    @abstractmethod
    def train(self, batch: Any) -> None:
        """Train on one batch, which is on the model's device."""

    @abstractmethod
    def consensus(self) -> AbstractContextManager[None]:
        """Let all workers hold the model to evaluate inside the context. A collective.

        Does not count as training time.
        """

    @abstractmethod
    def finish(self) -> None:
        """End the training with the same model on all workers. A collective."""


class Attached(Method):
    """A strategy of this package, attached to the model of a task.

    Args:
        task: The task.
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
"""Fields of ``Job`` that need the state of a synchronizer."""


class Baseline(ABC):
    """A method that strategies are compared with and that ``attach`` does not support.

    Subclasses are frozen dataclasses of settings.
    """

    name: ClassVar[str]
    """Name in the text form."""
    simulated: ClassVar[bool]
    """True if the method can also run in virtual time."""
    refused: ClassVar[tuple[str, ...]] = ("wire", "injection", "log", *SAVING)
    """Fields of ``Job`` that the method does not support."""

    @classmethod
    def require(cls) -> None:
        """Raise unless the method can run on this machine.

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
            under: Function that attaches a strategy to the task with the options of the job.
            batches: Function that returns this worker's batches from the first one on, on the
                model's device.
            timeout_seconds: Time-out of operations between workers.
        """
