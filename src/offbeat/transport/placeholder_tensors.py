"""Placeholder tensors: small tensors that represent large ones in a simulation.

A simulation may exchange a model of billions of elements without allocating it (see
``offbeat.plan``). Its model then has a few thousand elements, each of which represents
``Host.scale`` elements. Three rules give the number of bytes that a tensor represents:

* A float32 tensor is model data: each element counts ``scale`` times.
* A tensor of another dtype represents itself: decisions travel in float64 or int64.
* A blank tensor already has the full size: all of its elements share one address.
"""

import torch
from torch import Tensor


def bytes_of(tensor: Tensor, scale: float, tail: int = 0) -> int:
    """Return the bytes that ``tensor`` represents.

    Args:
        tensor: Tensor that is sent or stored.
        scale: ``Host.scale``.
        tail: Number of elements at its end that represent themselves.
    """
    if scale == 1 or tensor.dtype != torch.float32 or is_blank(tensor):
        return tensor.nbytes
    return round((tensor.numel() - tail) * scale + tail) * tensor.itemsize


def blank(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return a read-only tensor of this shape that occupies eight bytes of memory.

    The eight bytes store the size of the tensor, which ``kept_bytes`` reads.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((1,), size, dtype=torch.int64).view(dtype)[:1].expand(*shape)


def blanks(like: Tensor, count: int) -> list[Tensor]:
    """Return ``count`` blank tensors with the shape and dtype of ``like``, in one allocation."""
    parts = blank(count, *like.shape, dtype=like.dtype)
    return [parts[0]] * count


def is_blank(tensor: Tensor) -> bool:
    """Return True for a tensor made by ``blank``, and for a view of one."""
    return tensor.numel() > 1 and not any(tensor.stride())


def kept_bytes(tensor: Tensor, scale: float) -> int:
    """Return the bytes of memory that the storage of ``tensor`` represents.

    Half-precision tensors count as copies of model data. A copy in float64 would be mistaken for
    a decision and counted unscaled.
    """
    storage = tensor.untyped_storage()
    if is_blank(tensor):
        return int(torch.empty(0, dtype=torch.int64).set_(storage).item())
    size = storage.nbytes()
    scaled = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return round(size * scale) if scaled else size
