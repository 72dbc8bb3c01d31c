"""Methods that others wrote and that run their own code here: torch's, to be compared with."""

import inspect
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from offbeat.arguments import check_settings, setting
from offbeat.errors import CommunicationError, OffbeatError
from offbeat.lab.method import SAVING, Baseline, Method
from offbeat.lab.recipes import Task
from offbeat.lab.recipes.base import device_of
from offbeat.strategies import Strategy
from offbeat.telemetry import Stats
from offbeat.training.synchronizer import Synchronizer

PREFIX = "torch:"
_ONE_BUCKET_MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Peer(Baseline):
    """A method of torch's. Real processes only.

    Args:
        sync_buffers: Whether each forward pass begins with a broadcast of rank 0's buffers
            (BatchNorm's statistics), as is the default of DistributedDataParallel.
    """

    simulated: ClassVar[bool] = False
    refused: ClassVar[tuple[str, ...]] = (
        "wire",
        "optimizer_state",
        "injection",
        "log",
        *SAVING,
    )
    sync_buffers: bool = True

    def __post_init__(self) -> None:
        check_settings(self)

    @override
    def start(
        self,
        task: Task,
        lr_scale: float,
        under: Callable[[Strategy], Synchronizer],
        batches: Callable[[], Iterable[Any]],
    ) -> "Loop":
        with explained(f"the start of {self.name}"):
            return self.loop(task, lr_scale)

    @abstractmethod
    def loop(self, task: Task, lr_scale: float) -> "Loop":
        """Wrap the model."""

    def wrap(self, task: Task, *, one_bucket: bool = False) -> DistributedDataParallel:
        """The model in DistributedDataParallel, as it is by default."""
        options: dict[str, Any] = {}
        if one_bucket:
            options["bucket_cap_mb"] = _ONE_BUCKET_MB
        if not self.sync_buffers:  # torch 2.13 has another name for it, and warns of the old one
            known = inspect.signature(DistributedDataParallel).parameters
            names = ("forward_sync_buffers", "broadcast_buffers")
            options[next(name for name in names if name in known)] = False
        return DistributedDataParallel(task.model, **options)


@dataclass(frozen=True, kw_only=True)
class DDP(Peer):
    """DDP: the mean gradient in every step, perhaps through a hook.

    Args:
        hook: How gradients travel: "fp16" and "bf16" rounded, "powersgd" as matrices of low rank.
        rank: Of these matrices (≥ 1); 1 unless told.
        warmup_steps: Steps before ``powersgd`` begins (≥ 2); a tenth of the run unless told, as
            torch advises.
    """

    name: ClassVar[str] = "torch:ddp"
    hook: Literal["fp16", "bf16", "powersgd"] | None = None
    rank: int | None = setting(None, least=1)
    warmup_steps: int | None = setting(None, least=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        for one in ("rank", "warmup_steps"):
            if getattr(self, one) is not None and self.hook != "powersgd":
                raise ValueError(f"{self.name} has {one} with hook=powersgd only")

    @override
    def loop(self, task: Task, lr_scale: float) -> "Loop":
        # With several buckets the hook's own collectives of one would mix with those of another.
        module = self.wrap(task, one_bucket=self.hook == "powersgd")
        if self.hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                None,
                matrix_approximation_rank=self.rank or 1,
                start_powerSGD_iter=self.warmup_steps or max(2, task.steps // 10),
            )
            module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self.hook is not None:
            half = default_hooks.fp16_compress_hook if self.hook == "fp16" else _bf16
            module.register_comm_hook(None, half)
        return Loop(self.name, task, lr_scale, module)


def _bf16(
    state: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP wants to see this very annotation
) -> torch.futures.Future[torch.Tensor]:
    """Torch's own by another name: under that one DDP refuses it without NCCL, but gloo can."""
    return default_hooks.bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class PostLocal(Peer):
    """Post-local SGD: the PeriodicModelAverager after a start with DDP.

    Every worker counts as a machine: after the warm-up no gradients are averaged.

    Args:
        period: H, steps between two means of the models (≥ 2).
        warmup_steps: W, steps at the start with the mean gradient (≥ 0). The first mean of models
            is after step W + 1.
    """

    name: ClassVar[str] = "torch:postlocal"
    period: int = setting(least=2)
    warmup_steps: int = setting(0, least=0)

    @override
    def loop(self, task: Task, lr_scale: float) -> "Loop":
        module = self.wrap(task)
        state = PostLocalSGDState(
            process_group=None,
            subgroup=None,
            start_localSGD_iter=self.warmup_steps,
            post_local_gradient_allreduce=False,
        )
        module.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(self.period, warmup_steps=self.warmup_steps)
        return Loop(self.name, task, lr_scale, module, averager=averager)


@dataclass(frozen=True, kw_only=True)
class Accumulate(Peer):
    """Gradient accumulation: DDP with ``no_sync``, one step for many batches.

    The optimizer steps with the mean gradient of ``steps`` batches of all workers, at the learning
    rate of the first of them; what remains at the end makes a shorter one.

    Args:
        steps: Batches of a step (≥ 1).
    """

    name: ClassVar[str] = "torch:accumulate"
    steps: int = setting(least=1)

    @override
    def loop(self, task: Task, lr_scale: float) -> "Loop":
        return Loop(self.name, task, lr_scale, self.wrap(task), window=self.steps)


class Loop(Method):
    """An ordinary training loop around a wrapped model, with the wall's clock.

    Args:
        name: For errors.
        task: What is trained.
        lr_scale: Factor on the learning rate.
        module: The task's model, wrapped.
        window: Batches whose mean gradient the optimizer takes.
        averager: Averages the models after a step, if it is time.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        lr_scale: float,
        module: DistributedDataParallel,
        *,
        window: int = 1,
        averager: PeriodicModelAverager | None = None,
    ) -> None:
        self._name, self._task, self._lr_scale, self._module = name, task, lr_scale, module
        self._window, self._averager = window, averager
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
        task = self._task
        begun = self._step % self._window
        batches = min(self._window, task.steps - self._step + begun)  # of this step
        last = begun == batches - 1
        with explained(f"batch {self._step + 1} of {self._name}"):
            with nullcontext() if last else self._module.no_sync():
                (task.loss(self._module, batch) / batches).backward()
            if last:
                self._take_step()
        self._step += 1
        self._seconds = time.perf_counter() - self._began
        if last:
            for _ in range(batches):  # the schedule counts batches
                task.advance()

    def _take_step(self) -> None:
        task = self._task
        with task.scaled_lr(self._lr_scale):
            if task.clip_norm is not None:
                nn.utils.clip_grad_norm_(task.model.parameters(), task.clip_norm)
            task.optimizer.step()
        if self._averager is not None:
            self._averager.average_parameters(task.model.parameters())

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

    def _agree(self, when: str) -> None:
        """x ← mean(x), and rank 0's buffers."""
        model = self._task.model
        with explained(f"{when} of {self._name}"), torch.no_grad():
            if self._averager is not None:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.div_(dist.get_world_size())
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def _now(self) -> float:
        device = device_of(self._task.model)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what was queued belongs to the training
        return time.perf_counter()


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Say where a run-time error comes from: torch's names neither rank nor operation.

    Raises:
        CommunicationError: for a RuntimeError that is not Offbeat's own.
    """
    try:
        yield
    except OffbeatError:
        raise
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise CommunicationError(
            f"rank {dist.get_rank()} failed in {what}: {text}. If it waited for the others, one of "
            "them has failed or took longer than the time-out, which --timeout raises"
        ) from error
