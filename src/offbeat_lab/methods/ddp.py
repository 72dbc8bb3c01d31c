"""Methods of torch as references: DDP and post-local SGD."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
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


@dataclass(frozen=True, kw_only=True)
class DDP(Peer):
    """DDP: average the gradients in every step, optionally quantized by a communication hook.

    Args:
        hook: Quantization of the gradients, "fp16" or "bf16". None: no quantization.
    """

    name: ClassVar[str] = "torch:ddp"
    hook: Literal["fp16", "bf16"] | None = None

    @override
    def loop(self, task: Task) -> TrainingLoop:
        module = DistributedDataParallel(task.model)
        if self.hook is not None:
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
    def loop(self, task: Task) -> TrainingLoop:
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
