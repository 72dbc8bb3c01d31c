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
    """Recompute the running statistics of the BatchNorm layers of ``model`` on some batches.

    A mean model has the mean of the workers' running statistics. These are not the statistics of
    the mean model, because each worker measured them with its own parameters. The difference
    matters if the workers' models were far apart. For each layer with running statistics, and the K
    batches that are used:

        running_mean = 1/K Σ mean(batch k)
        running_var  = 1/K Σ var(batch k)        unbiased, as in training

    A layer that no batch reaches gets mean 0 and variance 1. A model without such layers is left
    as it is. All other modules run in evaluation mode (no Dropout), without gradients. Afterwards
    each module returns to its mode. After an error the old statistics are restored.

    Not a collective, unless the model has ``SyncBatchNorm`` layers. Inside ``consensus()`` the new
    statistics last until the context ends. After ``finish()`` they are permanent: call this
    function with the same batches on all workers, or only on the worker that saves the model.

    Args:
        model: The model.
        loader: Batches of training data, as the model receives them in training.
        batches: Largest number of batches to use (≥ 1).
        forward: ``forward(model, batch)`` runs the model on a batch. None: the model is called with
            the batch or, if the batch is a tuple or list, with its first element. That tensor is
            moved to the device of the model's statistics.

    Raises:
        TypeError: ``batches`` is not an integer. Or ``forward`` is None and a batch does not begin
            with a tensor.
        ValueError: ``batches`` is smaller than 1, or the loader is empty.
    """
    require_integer("batches", batches, least=1)
    candidates = (module for module in model.modules() if isinstance(module, _LAYERS))
    layers = {layer: layer.running_mean for layer in candidates if layer.running_mean is not None}
    if not layers:
        return
    device = next(iter(layers.values())).device
    before = [[buffer.clone() for buffer in layer.buffers(recurse=False)] for layer in layers]
    modes = [(module, module.training) for module in model.modules()]
    momenta = [layer.momentum for layer in layers]
    used = 0
    try:
        model.eval()
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the layer then computes the mean over all batches
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
        for layer, buffers in zip(layers, before, strict=True):
            for buffer, value in zip(layer.buffers(recurse=False), buffers, strict=True):
                buffer.copy_(value)
        raise
    finally:
        for module, training in modes:
            module.training = training
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _input_of(batch: Any) -> Tensor:
    inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if not isinstance(inputs, Tensor):
        raise TypeError(
            f"a batch is a {type(batch).__name__} that does not begin with a tensor: give "
            "forward=lambda model, batch: ..., a function that runs the model on it"
        )
    return inputs
