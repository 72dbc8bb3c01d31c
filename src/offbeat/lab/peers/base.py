"""What peers have in common: an ordinary training loop on the wall's clock, and what is refused."""

import importlib.util
import os
import socket
import struct
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from offbeat.arguments import check_settings
from offbeat.errors import CommunicationError, OffbeatError
from offbeat.lab.method import SAVING, Baseline, Method
from offbeat.lab.recipes import Task
from offbeat.lab.recipes.base import device_of
from offbeat.strategies import Strategy
from offbeat.synchronizer import Synchronizer
from offbeat.telemetry import Stats

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


@dataclass(frozen=True, kw_only=True)
class Peer(Baseline):
    """A method of somebody else's. Real processes only."""

    simulated: ClassVar[bool] = False
    refused: ClassVar[tuple[str, ...]] = (
        "wire",
        "injection",
        "log",
        *SAVING,
    )
    package: ClassVar[str] = "torch"
    """What it needs to be installed."""

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
        lr_scale: float,
        under: Callable[[Strategy], Synchronizer],
        batches: Callable[[], Iterable[Any]],
        timeout_seconds: float,
    ) -> "Loop":
        with explained(f"the start of {self.name}"):
            return self.loop(task, lr_scale, timeout_seconds)

    @abstractmethod
    def loop(self, task: Task, lr_scale: float, timeout_seconds: float) -> "Loop":
        """Wrap the model. A collective."""

    def require_cpu(self, task: Task) -> None:
        """Raise unless the model is on the CPU, where alone this peer was made to work here.

        Raises:
            OffbeatError: it is not.
        """
        device = device_of(task.model)
        if device.type != "cpu":
            raise OffbeatError(
                f"{self.name} runs here on the CPU only, and this worker trains on {device}: start "
                "without torchrun, or leave it out"
            )


class Loop(Method):
    """An ordinary training loop around a model, with the wall's clock.

    Args:
        name: For errors.
        task: What is trained.
        lr_scale: Factor on the learning rate.
        module: The task's model, perhaps wrapped.

    Attributes:
        differ: Whether the workers' models differ between steps, so that their mean is evaluated.
    """

    differ = False

    def __init__(self, name: str, task: Task, lr_scale: float, module: nn.Module) -> None:
        self._name, self._task, self._lr_scale, self._module = name, task, lr_scale, module
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
        """Steps and seconds: a peer does not tell how long it waits, and what it sends."""
        return Stats(steps=self._step, details={"seconds": self._seconds})

    @override
    def train(self, batch: Any) -> None:
        with explained(f"batch {self._step + 1} of {self._name}"):
            batches = self._learn(batch)
        self._step += 1
        self._seconds = time.perf_counter() - self._began
        for _ in range(batches):  # the schedule counts batches
            self._task.advance()

    def _learn(self, batch: Any) -> int:
        """Train on a batch. Returns for how many batches the optimizer has stepped."""
        self._task.loss(self._module, batch).backward()
        self._take_step()
        return 1

    def _take_step(self) -> None:
        task = self._task
        with task.scaled_lr(self._lr_scale):
            if task.clip_norm is not None:
                nn.utils.clip_grad_norm_(task.model.parameters(), task.clip_norm)
            self._optimize()

    def _optimize(self) -> None:
        self._task.optimizer.step()

    @override
    @contextmanager
    def consensus(self) -> Iterator[None]:
        """The mean of the models, if they differ, with rank 0's buffers."""
        began = self._now()
        tensors = [*self._task.model.parameters(), *self._task.model.buffers()]
        own = [tensor.detach().clone() for tensor in tensors]
        self._agree("an evaluation")
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, own, strict=True):
                    tensor.copy_(value)
            self._began += self._now() - began

    @override
    def finish(self) -> None:
        before = self._now()
        self._agree("the end")
        self._seconds += self._now() - before
        with explained(f"the end of {self._name}"):
            self._close()

    def _agree(self, when: str) -> None:
        """x ← mean(x), and rank 0's buffers."""
        model = self._task.model
        with explained(f"{when} of {self._name}"), torch.no_grad():
            if self.differ:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.div_(dist.get_world_size())
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def _close(self) -> None:
        """Give back what the method holds. A collective, and not timed."""

    def _now(self) -> float:
        device = device_of(self._task.model)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what was queued belongs to the training
        return time.perf_counter()


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Say where a run-time error comes from: others' words name neither rank nor operation.

    Raises:
        CommunicationError: for a RuntimeError or a TimeoutError that is not Offbeat's own.
    """
    try:
        yield
    except OffbeatError:
        raise
    except (RuntimeError, TimeoutError) as error:
        text = " ".join(str(error).split())
        raise CommunicationError(
            f"rank {dist.get_rank()} failed in {what}: {text}. If it waited for the others, one of "
            "them has failed or took longer than the time-out, which --timeout raises"
        ) from error


def own_address() -> str:
    """The address at which the other workers reach this one.

    That of the interface that gloo was told to use; else of the one on the way to torchrun's
    master.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        if interface:
            import fcntl  # not on Windows

            asked = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(one.fileno(), _SIOCGIFADDR, asked)[20:24])
        one.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        return str(one.getsockname()[0])
