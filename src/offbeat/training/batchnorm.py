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

    Averaging the models of several workers also averages their running statistics. That mean
    differs from the statistics of the mean model, because each worker measured its statistics with
    its own parameters. The difference matters if the workers' models were far apart. For each layer
    with running statistics, over the K batches that are used:

        running_mean = 1/K Σ mean(batch k)
        running_var  = 1/K Σ var(batch k)        unbiased, as in training

    All other modules run in evaluation mode (no Dropout), and no gradients are computed. Afterwards
    each module returns to its mode (``train()`` or ``eval()``), and each layer to its momentum.
    After an error the old statistics are restored. ``loader`` is read only if a layer has running
    statistics.

    Not a collective, unless the model has ``SyncBatchNorm`` layers: each worker changes only its
    own model. Inside ``consensus()``, for example for an evaluation, the new statistics are
    discarded when the context ends. After ``finish()`` they remain. Then call this function on all
    workers with the same batches, or only on the worker that saves the model.

    Args:
        model: The model.
        loader: Batches of training data, as the model receives them in training.
        batches: Largest number of batches to use (≥ 1).
        forward: Function of the model and a batch that runs the model on the batch. None: the model
            receives the batch, or the first element of a batch that is a tuple or list, after
            a move to the device of the statistics.

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
            f"a batch is a {type(batch).__name__} that does not begin with a tensor: say with "
            "forward=lambda model, batch: ... how it enters the model"
        )
    return inputs
