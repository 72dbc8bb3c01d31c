"""The seam between the loop of a run and what trains there: a strategy, or a baseline."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

from typing_extensions import override

from offbeat.lab.recipes import Task
from offbeat.strategies import Strategy
from offbeat.synchronizer import Synchronizer
from offbeat.telemetry import Stats


class Method(ABC):
    """What trains the model of a recipe on one worker, batch by batch."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Batches so far."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Training seconds of this worker so far: computing and waiting, without evaluation."""

    @property
    def step_seconds(self) -> float | None:
        """What every step counts, for a method that knows it at the end only; else None."""
        return None

    @property
    @abstractmethod
    def stats(self) -> Stats:
        """The totals of this worker, as far as they are known."""

    @abstractmethod
    def train(self, batch: Any) -> None:
        """Train on one batch, which is on the model's device."""

    @abstractmethod
    def consensus(self) -> AbstractContextManager[None]:
        """Inside, all workers hold the model that is to be evaluated; a collective, not timed."""

    @abstractmethod
    def finish(self) -> None:
        """End: all workers hold the same model. A collective."""


class Attached(Method):
    """A strategy of Offbeat's, attached to the task.

    Args:
        task: What is trained.
        lr_scale: Factor on the learning rate.
        sync: What ``attach`` gave.
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
    @contextmanager
    def consensus(self) -> Iterator[None]:
        with self.sync.consensus():
            yield

    @override
    def finish(self) -> None:
        self.sync.finish()


SAVING = ("checkpoints", "save_every", "resume")
"""Fields of ``Job`` that need a synchronizer, which has a state."""


class Baseline(ABC):
    """A method that strategies are compared with, and that ``attach`` does not know.

    Its subclasses are frozen dataclasses of settings.
    """

    name: ClassVar[str]
    """As in the text form."""
    simulated: ClassVar[bool]
    """Whether it also runs in virtual time."""
    refused: ClassVar[tuple[str, ...]]
    """Fields of ``Job`` that it cannot honour."""

    @classmethod
    def require(cls) -> None:
        """Raise unless it can run here.

        Raises:
            ImportError: a package is missing; the message says how to install it.
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
        """Begin to train on this worker. A collective.

        Args:
            task: What is trained, on its device.
            lr_scale: Factor on the learning rate.
            under: Attaches a strategy to the task, as the job says.
            batches: What this worker reads, anew each time, on the model's device.
            timeout_seconds: Of operations between workers.
        """
