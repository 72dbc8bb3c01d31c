"""Cut a model into parts of about equal bytes."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from offbeat.averaging.buckets import as_real, staged_bytes, staging_dtype


def cut_by_tensors(
    tensors: Sequence[Tensor], parts: int, sizes: Sequence[float] | None = None
) -> list[list[Tensor]]:
    """Cut a list of tensors into non-empty parts of about equal bytes. No tensor is divided.

    Part i of n ends at the tensor boundary that is nearest to i/n of all bytes. Boundaries that
    would leave a part empty are not considered.

    Args:
        tensors: The tensors, in order.
        parts: Number of parts, at most the number of tensors.
        sizes: Bytes of each tensor. None: the bytes that it has in a sum, where float16 and
            bfloat16 become float32.
    """
    if sizes is None:
        sizes = [staged_bytes(tensor) for tensor in tensors]
    ends: list[float] = [0, *itertools.accumulate(sizes)]
    cuts = [0]
    for part in range(1, parts):
        target = ends[-1] * part / parts
        candidates = range(cuts[-1] + 1, len(sizes) - parts + part + 1)
        cuts.append(min(candidates, key=lambda cut: abs(ends[cut] - target)))
    return [list(tensors[a:b]) for a, b in itertools.pairwise([*cuts, len(sizes)])]


def cut_by_bytes(tensors: Sequence[Tensor], parts: int) -> list[Callable[[], list[Tensor]]]:
    """Cut a list of tensors into parts of about equal bytes, which may begin inside a tensor.

    A tensor that is not contiguous in memory is not divided, so parts may differ by its size.

    Args:
        tensors: The tensors, in order. Empty tensors are left out.
        parts: Number of parts (≥ 1). The result may have fewer parts.

    Returns:
        A function for each part, which returns tensors or views into them. The views
        are made again if a tensor's memory has changed, because its module was moved.
    """
    sizes = [staged_bytes(tensor) for tensor in tensors]
    total, done = sum(sizes), 0  # done: bytes of the tensors before the current one
    slices: list[list[_Slice]] = [[] for _ in range(parts)]
    for tensor, size in zip(tensors, sizes, strict=True):
        numbers = as_real(tensor.detach())
        itemsize = staging_dtype(tensor).itemsize
        start = 0
        while start < numbers.numel():
            position = done + start * itemsize
            part = min(parts - 1, position * parts // total)
            # Number of elements that still fit into the part, rounded up.
            free = -(-(total * (part + 1) // parts - position) // itemsize)
            stop = numbers.numel()
            if part < parts - 1 and numbers.is_contiguous():
                stop = min(stop, start + max(1, free))
            slices[part].append(_Slice(tensor, start, stop))
            start = stop
        done += size
    return [_Views(group) for group in slices if group]


@dataclass(frozen=True)
class _Slice:
    """The numbers [start, stop) of a tensor, in memory order. A complex element is two numbers."""

    tensor: Tensor
    start: int
    stop: int

    def view(self) -> Tensor:
        numbers = as_real(self.tensor.detach())
        if self.stop - self.start == numbers.numel():
            return numbers
        return numbers.view(-1)[self.start : self.stop]


class _Views:
    """Function that returns the views of slices. It makes them again if a tensor has moved."""

    def __init__(self, slices: list[_Slice]) -> None:
        self._slices = slices
        self._addresses: list[int] = []
        self._views: list[Tensor] = []

    def __call__(self) -> list[Tensor]:
        addresses = [piece.tensor.data_ptr() for piece in self._slices]
        if addresses != self._addresses:
            self._addresses, self._views = addresses, [piece.view() for piece in self._slices]
        return self._views
