"""Methods of torch as references: DDP and post-local SGD."""

from dataclasses import dataclass
from typing import ClassVar, Literal

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

from offbeat.extend import setting
from offbeat_lab.methods.peer import Peer, TrainingLoop
from offbeat_lab.recipes import Task

_ONE_BUCKET_MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DDP(Peer):
    """DDP: average the gradients in every step, optionally compressed by a communication hook.

    Args:
        hook: Compression of the gradients: "fp16" or "bf16" quantization, or "powersgd" (low-rank
            matrices). None: no compression.
        rank: Rank of PowerSGD's matrices (≥ 1). None: 1.
        warmup_steps: Number of steps without compression before PowerSGD starts (≥ 2). None: a
            tenth of the run (torch's recommendation), at least 2.
    """

    name: ClassVar[str] = "torch:ddp"
    hook: Literal["fp16", "bf16", "powersgd"] | None = None
    rank: int | None = setting(None, least=1)
    warmup_steps: int | None = setting(None, least=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rank", "warmup_steps"):
            if getattr(self, name) is not None and self.hook != "powersgd":
                raise ValueError(f"{self.name}: {name} needs hook=powersgd")

    @override
    def loop(self, task: Task, timeout_seconds: float) -> TrainingLoop:
        # With several buckets, gloo mixes up the PowerSGD hook's collectives of different buckets.
        megabytes = _ONE_BUCKET_MB if self.hook == "powersgd" else None
        module = DistributedDataParallel(task.model, bucket_cap_mb=megabytes)
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
        return TrainingLoop(self.name, task, module)


def _bf16(
    state: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP checks for this annotation
) -> torch.futures.Future[torch.Tensor]:
    """Call torch's bf16 hook under another name.

    Without NCCL, DDP rejects a hook with the name ``bf16_compress_hook``, although it works.
    """
    return default_hooks.bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class PostLocal(Peer):
    """Post-local SGD: DDP during a warm-up, then local steps and periodic averages of the models.

    torch's ``PeriodicModelAverager`` averages the models. After the warm-up no gradients are
    averaged, not even inside a machine (``post_local_gradient_allreduce=False``).

    Args:
        period: Number H of steps between two averages of the models (≥ 2).
        warmup_steps: Number W of steps at the start in which gradients are averaged (≥ 0). The
            models are averaged after step W + 1, W + 1 + H, W + 1 + 2H, ….
    """

    name: ClassVar[str] = "torch:postlocal"
    period: int = setting(least=2)
    warmup_steps: int = setting(0, least=0)

    @override
    def loop(self, task: Task, timeout_seconds: float) -> TrainingLoop:
        module = DistributedDataParallel(task.model)
        state = PostLocalSGDState(
            process_group=None,
            subgroup=None,
            start_localSGD_iter=self.warmup_steps,
            post_local_gradient_allreduce=False,
        )
        module.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(self.period, warmup_steps=self.warmup_steps)
        parameters = list(task.model.parameters())
        task.optimizer.register_step_post_hook(lambda *_: averager.average_parameters(parameters))
        return TrainingLoop(self.name, task, module, differ=True)
