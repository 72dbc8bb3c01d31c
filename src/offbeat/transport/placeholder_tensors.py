"""Placeholder tensors: small tensors that stand for large ones, and the bytes that they stand for.

A simulation may exchange a model of billions of numbers without holding it (see ``offbeat.plan``).
Its model then has a few thousand numbers, and each stands for ``Host.scale`` numbers. Three rules
say how many bytes a tensor stands for:

* float32 is model data: each number counts ``scale`` times.
* Other dtypes stand for themselves: decisions travel in float64 or int64.
* A blank tensor has the full size already: all of its elements share one address.
"""

import torch
from torch import Tensor


def bytes_of(tensor: Tensor, scale: float, tail: int = 0) -> int:
    """Bytes that ``tensor`` stands for.

    Args:
        tensor: Any tensor that is sent or kept.
        scale: ``Host.scale``.
        tail: Numbers at its end that stand for themselves.
    """
    if scale == 1 or tensor.dtype != torch.float32 or is_blank(tensor):
        return tensor.nbytes
    return round((tensor.numel() - tail) * scale + tail) * tensor.itemsize


def blank(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """A tensor of this shape in eight bytes of memory, which cannot be written.

    The eight bytes hold its size, for ``kept_bytes``.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.full((1,), size, dtype=torch.int64).view(dtype)[:1].expand(*shape)


def blanks(like: Tensor, count: int) -> list[Tensor]:
    """As many blank tensors like ``like``, in one allocation."""
    parts = blank(count, *like.shape, dtype=like.dtype)
    return [parts[0]] * count


def is_blank(tensor: Tensor) -> bool:
    """True for what ``blank`` has made, and for views of it."""
    return tensor.numel() > 1 and not any(tensor.stride())


def kept_bytes(tensor: Tensor, scale: float) -> int:
    """Bytes of memory that the storage of ``tensor`` stands for.

    Copies of model data may be in a half type. One in float64 would be taken for a decision.
    """
    storage = tensor.untyped_storage()
    if is_blank(tensor):
        return int(torch.empty(0, dtype=torch.int64).set_(storage).item())
    size = storage.nbytes()
    scaled = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return round(size * scale) if scaled else size
