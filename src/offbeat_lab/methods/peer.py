"""Base classes of *peers*: training methods of torch and other packages.

A peer runs the code of its package, not offbeat's. It trains a *task*: model, optimizer, loss, data
and schedule. ``Peer`` holds the settings of the method, and ``TrainingLoop`` runs the training.
"""

import importlib.util
import os
import socket
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from offbeat import OffbeatError, Stats, Strategy, Synchronizer
from offbeat.extend import Replica, address_of, check_settings
from offbeat_lab.evaluation import explain_failures
from offbeat_lab.methods.base import Method, Reference
from offbeat_lab.recipes import Task
from offbeat_lab.recipes.base import device_of
from offbeat_lab.timing.step_time import now


@dataclass(frozen=True, kw_only=True)
class Peer(Reference):
    """Settings of a method of torch or another package. It runs on real processes only."""

    simulated: ClassVar[bool] = False
    package: ClassVar[str] = "torch"
    """Name of the package that must be installed."""
    needs_cpu: ClassVar[bool] = False
    """True if the method trains on the CPU only."""

    def __post_init__(self) -> None:
        check_settings(self)

    @classmethod
    @override
    def require(cls) -> None:
        if importlib.util.find_spec(cls.package) is None:
            raise ImportError(
                f"{cls.name} needs the package {cls.package}: "
                f"pip install {cls.package}, or 'offbeat[peers]' for all of them"
            )

    @override
    def start(
        self,
        task: Task,
        under: Callable[[Strategy], Synchronizer],
        batches: Callable[[], Iterable[Any]],
        timeout_seconds: float,
    ) -> "TrainingLoop":
        device = device_of(task.model)
        if self.needs_cpu and device.type != "cpu":
            raise OffbeatError(
                f"{self.name} runs here on the CPU only, and this worker trains on {device}: start "
                "without torchrun, or leave it out"
            )
        with explain_failures(f"failed in the start of {self.name}"):
            return self.loop(task, timeout_seconds)

    @abstractmethod
    def loop(self, task: Task, timeout_seconds: float) -> "TrainingLoop":
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
                self._optimize()
        self._step += 1
        self._seconds = time.perf_counter() - self._began
        task.advance()

    def _optimize(self) -> None:
        self._task.optimizer.step()

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
            self._close()

    def _average(self) -> None:
        """Average the parameters if they may differ, and copy the buffers of rank 0."""
        with torch.no_grad():
            if self._differ:
                for _, parameter in self._replica.parameters:
                    dist.all_reduce(parameter.data)
                    parameter.div_(dist.get_world_size())
            for buffer in self._task.model.buffers():
                dist.broadcast(buffer, src=0)

    def _close(self) -> None:
        """Release the resources of the method. A collective."""

    def _now(self) -> float:
        return now(device_of(self._task.model))


def worker_address() -> str:
    """Return the IPv4 address at which the other workers reach this one.

    It is the address of the network interface that the variable ``GLOO_SOCKET_IFNAME`` names (not
    on Windows). Otherwise it is the address from which packets to ``MASTER_ADDR`` are sent.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface and (address := address_of(interface)):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends nothing; it only selects the route.
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
        return str(probe.getsockname()[0])
