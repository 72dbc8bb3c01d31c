"""Recalibration of BatchNorm statistics after parameters were averaged."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.arguments import require_integer

_LAYERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def recalibrate_batchnorm(
    model: nn.Module,
    loader: Iterable[Any],
    batches: int,
    *,
    forward: Callable[[nn.Module, Any], object] | None = None,
) -> None:
    """Recompute the running statistics of all BatchNorm layers of ``model`` on some batches.

    The mean of the workers' running statistics is not the statistics of the mean model, because
    each worker measured them with other parameters. The difference matters if the workers' models
    were far apart. For each layer with running statistics, over K batches:

        running_mean = 1/K Σ mean(batch k)
        running_var  = 1/K Σ var(batch k)        unbiased, as in training

    All other modules run in evaluation mode (no Dropout), and no gradients are computed. Modes and
    momenta are restored afterwards. Without BatchNorm layers ``loader`` is not read. After an error
    the old statistics are restored.

    Not a collective: each worker changes its own model only. Call it inside ``consensus()`` to
    evaluate with the new statistics; they are discarded at the end of the context. Call it after
    ``finish()`` to keep them, either on all workers with the same batches, or only on the worker
    that saves the model.

    Args:
        model: The model.
        loader: Batches of training data, as the model receives them in training.
        batches: Largest number of batches to use, K ≥ 1.
        forward: Function that calls the model, given the model and a batch. None: the model is
            called with the batch, or with its first element if the batch is a tuple or list, moved
            to the device of the statistics.

    Raises:
        TypeError: ``batches`` is not an integer; or ``forward`` is None and a batch does not begin
            with a tensor.
        ValueError: ``batches`` is smaller than 1, or the loader is empty.
    """
    require_integer("batches", batches, least=1)
    candidates = (module for module in model.modules() if isinstance(module, _LAYERS))
    layers = {layer: layer.running_mean for layer in candidates if layer.running_mean is not None}
    if not layers:
        return
    device = next(iter(layers.values())).device
    old = [[buffer.clone() for buffer in layer.buffers(recurse=False)] for layer in layers]
    modes = [(module, module.training) for module in model.modules()]
    momenta = [layer.momentum for layer in layers]
    used = 0
    try:
        model.eval()
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # a cumulative mean over all batches
            layer.train()
        with torch.no_grad():
            for batch in itertools.islice(loader, batches):
                if forward is None:
                    model(_input_of(batch).to(device))
                else:
                    forward(model, batch)
                used += 1
        if not used:
            raise ValueError("the loader gave no batch to measure the statistics on")
    except BaseException:
        for layer, buffers in zip(layers, old, strict=True):
            for buffer, value in zip(layer.buffers(recurse=False), buffers, strict=True):
                buffer.copy_(value)
        raise
    finally:
        for module, training in modes:
            module.training = training
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _input_of(batch: Any) -> Tensor:
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(first, Tensor):
        raise TypeError(
            f"a batch is a {type(batch).__name__} that does not begin with a tensor: say with "
            "forward=lambda model, batch: ... how it enters the model"
        )
    return first
