"""BatchNorm statistics of a model whose parameters were averaged, measured anew."""

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
    """Replace the running statistics of BatchNorm by those of ``model`` on some batches.

    The mean of the workers' running statistics is not that of the mean model: each was measured
    with other parameters. The difference matters when workers were far apart. For each layer with
    running statistics, over K batches:

        running_mean = 1/K Σ mean(batch k)
        running_var  = 1/K Σ var(batch k)        unbiased, as in training

    Everything but these layers is in evaluation mode meanwhile (no Dropout), no gradients are
    computed, and all modes and momenta are as before afterwards. A model without such layers is
    left alone, and ``loader`` is not read. After an error the statistics are the old ones.

    It is no collective: each worker changes its own model alone. Call it inside ``consensus()`` to
    evaluate with the new statistics; they are gone with the block. Call it after ``finish()`` to
    keep them, on all workers with the same batches or on the one that saves the model.

    Args:
        model: The model.
        loader: Batches of training data, as the model gets them in training.
        batches: K ≥ 1, how many to use; all, if there are fewer.
        forward: Called with the model and a batch, calls the model. None gives it the batch, or its
            first element if it is a tuple or a list, on the device of the statistics.

    Raises:
        TypeError: ``batches`` is not an integer, or a batch is none that ``forward=None`` takes.
        ValueError: ``batches`` is smaller than 1, or the loader is empty.
    """
    require_integer("batches", batches, least=1)
    found = (module for module in model.modules() if isinstance(module, _LAYERS))
    layers = {layer: layer.running_mean for layer in found if layer.running_mean is not None}
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
            layer.momentum = None  # torch's sign for the mean over all batches
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
