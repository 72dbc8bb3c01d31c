"""Tensors that stand for larger ones: their bytes, and payloads that take no memory.

A simulation may exchange a model of billions of numbers without holding it (see ``offbeat.plan``).
Its model then has a few thousand numbers, and each stands for ``Host.scale`` numbers. Three rules
say how many bytes a tensor stands for:

* float32 is model data: each number counts ``scale`` times.
* Other dtypes stand for themselves: decisions travel in float64 or int64.
* A blank tensor has the full size already: all of its elements share one address.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.fabric.codec import CODECS, Codec
from offbeat.fabric.coding import SECOND, Coding
from offbeat.fabric.numbers import Numbers


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


class _Blank(Codec):
    """A codec without arithmetic: it encodes nothing and decodes zeros."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes  # type: ignore[misc]

    @override
    def encode(
        self, values: Tensor, payload: Tensor, plus: Tensor | None = None, *, start: int = 0
    ) -> None:
        pass

    @override
    def round(self, values: Tensor, payload: Tensor, *, start: int = 0) -> None:
        pass

    @override
    def decode(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        values.zero_()

    @override
    def add(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        pass


class BlankCoding(Coding):
    """The codecs of a precision, whose payloads are blank."""

    def __init__(self, precision: str) -> None:
        super().__init__(precision)
        self.first = _Blank(self.first.block_bytes)
        self.second = _Blank(CODECS[SECOND.get(precision, precision)].block_bytes)

    @override
    def encode(self, tensor: Tensor, errors: Tensor) -> Tensor:
        return self.payload(errors.numel(), errors.device)

    @override
    def round(self, update: Numbers, workers: int, chunk: int) -> Tensor:
        return self.payload(workers * chunk, update.device)

    @override
    def add_up(self, received: Tensor, workers: int, errors: Tensor) -> Tensor:
        return self.summed(errors)

    @override
    def memory(self, size: int, device: torch.device) -> Tensor:
        return blank(size)

    @override
    def chunks(self, payload: Tensor, workers: int) -> Sequence[Tensor]:
        return [payload[: payload.numel() // workers]] * workers

    @override
    def errors(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return blank(*shape, dtype=torch.float32)

    @override
    def zeros(self, payload: Tensor) -> Tensor:
        return payload

    @override
    def copy(self, errors: Tensor, before: Tensor | None) -> Tensor:
        return blank(*errors.shape, dtype=errors.dtype) if before is None else before
