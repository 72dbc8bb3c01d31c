"""Gradient clipping by the norm of the whole gradient, also if workers hold shards of it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offbeat.averaging import AttachedOptimizer, Worker
from offbeat.errors import AttachError
from offbeat.training.iteration import Iteration
from offbeat.training.optimizers import unwrapped_optimizer


def clip_grad_norm(
    iteration: Iteration, worker: Worker, max_norm: float, optimizer: Optimizer | None
) -> Tensor:
    """Implement ``Synchronizer.clip_grad_norm_``."""
    optimizers = _chosen(iteration, worker, optimizer)
    for each in optimizers:
        iteration.handle_gradients(each.index)
    squared = worker.squared_norm(g for each in optimizers for g in each.gradients())
    parameters = [p for each in optimizers for p in each.parameters if p.grad is not None]
    double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
    norm = torch.tensor(squared, dtype=torch.float64, device="cpu").sqrt()
    norm = norm if double else norm.float()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _chosen(
    iteration: Iteration, worker: Worker, optimizer: Optimizer | None
) -> Sequence[AttachedOptimizer]:
    if optimizer is not None:
        index = iteration.index_of(unwrapped_optimizer(optimizer))
        if index is None:
            raise AttachError("clip_grad_norm_() was given an optimizer that is not attached")
        return [worker.optimizers[index]]
    if iteration.partly_stepped:
        raise AttachError(
            "one optimizer has already stepped in this iteration, so its gradients are used: "
            "call clip_grad_norm_(max_norm, optimizer) with the one that is about to step"
        )
    return worker.optimizers
