"""Placeholder tensors: small tensors that represent large ones in a simulation.

A simulation computes how long it takes to exchange a model of billions of parameters, without
allocating the model (see ``offbeat.plan``). It uses two kinds of placeholder:

* A *small model* of a few thousand float32 elements. Each element represents ``Host.scale``
  parameters.
* A *blank tensor*, which has the shape and thus the ``nbytes`` of the large tensor. All its
  elements share one address.

So a message in float32 represents ``scale`` times its ``nbytes``, unless the tensor is blank. All
other messages represent their ``nbytes``: most data other than the model have another dtype.
"""

import torch
from torch import Tensor


def bytes_of(tensor: Tensor, scale: float, tail: int = 0) -> int:
    """Return the size in bytes of the tensor that ``tensor`` represents.

    Args:
        tensor: Tensor that is sent.
        scale: Number of parameters that each float32 element represents (``Host.scale``).
        tail: Number of elements at the end of ``tensor`` that each represent one element.
    """
    if scale == 1 or tensor.dtype != torch.float32 or is_blank(tensor):
        return tensor.nbytes
    return round((tensor.numel() - tail) * scale + tail) * tensor.itemsize


def blank(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return a tensor of this shape that occupies eight bytes of memory. It cannot be written to.

    The eight bytes store the size of the tensor in bytes. ``storage_bytes`` reads this number.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((1,), size, dtype=torch.int64).view(dtype)[:1].expand(*shape)


def blank_list(like: Tensor, count: int) -> list[Tensor]:
    """Return a list of ``count`` blank tensors with the shape and dtype of ``like``.

    They share one storage, for which ``storage_bytes`` returns the size of all of them together.
    """
    parts = blank(count, *like.shape, dtype=like.dtype)
    return [parts[0]] * count


def is_blank(tensor: Tensor) -> bool:
    """Return True for blank tensors and views of them, if they have two or more elements."""
    return tensor.numel() > 1 and not any(tensor.stride())


def storage_bytes(tensor: Tensor, scale: float) -> int:
    """Return the bytes of memory that real training needs for the storage of ``tensor``.

    The storage of a blank tensor counts with the size of the large tensor. Other storages in
    float32, bfloat16 and float16 count as model data, ``scale`` times their own bytes. Storages of
    all other dtypes count their own bytes.

    Args:
        tensor: Tensor, or a view of one. The whole storage counts.
        scale: Number of parameters that each element of model data represents (``Host.scale``).
    """
    storage = tensor.untyped_storage()
    if is_blank(tensor):
        return int(torch.empty(0, dtype=torch.int64).set_(storage).item())
    size = storage.nbytes()
    scaled = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return round(size * scale) if scaled else size
