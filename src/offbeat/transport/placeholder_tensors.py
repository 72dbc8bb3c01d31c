"""Placeholder tensors: small tensors that represent large ones in a simulation.

A simulation computes how long it takes to exchange a model of billions of parameters, without
allocating the model (see ``offbeat.plan``). It uses two kinds of placeholder:

* A *small model* of a few thousand float32 elements. Each element represents ``Host.scale``
  parameters.
* A *blank tensor*, which has the shape and thus the ``nbytes`` of the large tensor. All its
  elements share one address.

In messages, float32 tensors that are not blank are therefore taken for model data, and their bytes
are multiplied by ``scale``. All other tensors count their ``nbytes``.
"""

import torch
from torch import Tensor


def bytes_of(tensor: Tensor, scale: float, tail: int = 0) -> int:
    """Return the size in bytes of the tensor that ``tensor`` represents.

    Args:
        tensor: Tensor that is sent.
        scale: Number of parameters that each float32 element represents (``Host.scale``).
        tail: Number of elements at the end of ``tensor`` to which ``scale`` does not apply.
    """
    if scale == 1 or tensor.dtype != torch.float32 or is_blank(tensor):
        return tensor.nbytes
    return round((tensor.numel() - tail) * scale + tail) * tensor.itemsize


def blank(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return a tensor of this shape that occupies eight bytes of memory. It must not be written to.

    The eight bytes hold the size that the tensor represents, for ``storage_bytes``.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((1,), size, dtype=torch.int64, device="cpu").view(dtype)[:1].expand(*shape)


def blank_list(like: Tensor, count: int) -> list[Tensor]:
    """Return a list of ``count`` blank tensors with the shape and dtype of ``like``.

    They share one storage. ``storage_bytes`` returns the size of all of them together.
    """
    parts = blank(count, *like.shape, dtype=like.dtype)
    return [parts[0]] * count


def is_blank(tensor: Tensor) -> bool:
    """Return True for blank tensors, and views of them, with two or more elements."""
    return tensor.numel() > 1 and not any(tensor.stride())


def storage_bytes(tensor: Tensor, scale: float) -> int:
    """Return the bytes of memory that real training needs for the storage of ``tensor``.

    For a blank tensor this is the size that it represents. Other tensors in float32, bfloat16 and
    float16 are taken for model data, whose bytes are multiplied by ``scale``.

    Args:
        tensor: Tensor, or a view of one. The whole storage counts.
        scale: Number of parameters that each element of model data represents (``Host.scale``).
    """
    storage = tensor.untyped_storage()
    if is_blank(tensor):
        return int(torch.empty(0, dtype=torch.int64, device="cpu").set_(storage).item())
    size = storage.nbytes()
    scaled = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return round(size * scale) if scaled else size
