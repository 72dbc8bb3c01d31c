"""Torch's own methods: DistributedDataParallel, its hooks, post-local SGD, accumulation."""

import inspect
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from offbeat.arguments import setting
from offbeat.lab.peers.base import Loop, Peer
from offbeat.lab.recipes import Task

_ONE_BUCKET_MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class OverDDP(Peer):
    """A method that wraps the model in DistributedDataParallel.

    Args:
        sync_buffers: Whether each forward pass begins with a broadcast of rank 0's buffers
            (BatchNorm's statistics), as is the default of DistributedDataParallel.
    """

    sync_buffers: bool = True

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
class DDP(OverDDP):
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
    def loop(self, task: Task, lr_scale: float, timeout_seconds: float) -> Loop:
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
class PostLocal(OverDDP):
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
    def loop(self, task: Task, lr_scale: float, timeout_seconds: float) -> Loop:
        module = self.wrap(task)
        state = PostLocalSGDState(
            process_group=None,
            subgroup=None,
            start_localSGD_iter=self.warmup_steps,
            post_local_gradient_allreduce=False,
        )
        module.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(self.period, warmup_steps=self.warmup_steps)
        return _Averaging(self.name, task, lr_scale, module, averager)


class _Averaging(Loop):
    """Models are averaged after a step, if it is time."""

    differ = True

    def __init__(
        self,
        name: str,
        task: Task,
        lr_scale: float,
        module: DistributedDataParallel,
        averager: PeriodicModelAverager,
    ) -> None:
        super().__init__(name, task, lr_scale, module)
        self._averager = averager

    @override
    def _optimize(self) -> None:
        super()._optimize()
        self._averager.average_parameters(self._task.model.parameters())


@dataclass(frozen=True, kw_only=True)
class Accumulate(OverDDP):
    """Gradient accumulation: DDP with ``no_sync``, one step for many batches.

    The optimizer steps with the mean gradient of ``steps`` batches of all workers, at the learning
    rate of the first of them; what remains at the end makes a shorter one.

    Args:
        steps: Batches of a step (≥ 1).
    """

    name: ClassVar[str] = "torch:accumulate"
    steps: int = setting(least=1)

    @override
    def loop(self, task: Task, lr_scale: float, timeout_seconds: float) -> Loop:
        return _Accumulating(self.name, task, lr_scale, self.wrap(task), self.steps)


class _Accumulating(Loop):
    """The optimizer takes the mean gradient of ``window`` batches."""

    def __init__(
        self,
        name: str,
        task: Task,
        lr_scale: float,
        module: DistributedDataParallel,
        window: int,
    ) -> None:
        super().__init__(name, task, lr_scale, module)
        self._wrapped, self._window = module, window

    @override
    def _learn(self, batch: Any) -> int:
        task = self._task
        begun = self._step % self._window
        batches = min(self._window, task.steps - self._step + begun)  # of this step
        last = begun == batches - 1
        with nullcontext() if last else self._wrapped.no_sync():
            (task.loss(self._wrapped, batch) / batches).backward()
        if not last:
            return 0
        self._take_step()
        return batches
