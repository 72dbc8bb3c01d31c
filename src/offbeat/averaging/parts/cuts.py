"""Cutting a model into parts of about equal bytes."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from offbeat.averaging.replica import as_real, staging_dtype


def cut_by_tensors(
    tensors: Sequence[Tensor], parts: int, sizes: Sequence[float] | None = None
) -> list[list[Tensor]]:
    """Contiguous, non-empty parts of whole tensors, of about equal bytes.

    The cuts are those nearest to 1/P, 2/P, … of all bytes.

    Args:
        tensors: In order.
        parts: P, at most the number of tensors.
        sizes: Bytes of each tensor. None: as it is summed.
    """
    if sizes is None:
        sizes = [summed_bytes(tensor) for tensor in tensors]
    before: list[float] = [0, *itertools.accumulate(sizes)]
    cuts = [0]
    for part in range(1, parts):
        target = before[-1] * part / parts
        places = range(cuts[-1] + 1, len(sizes) - parts + part + 1)
        cuts.append(min(places, key=lambda place: abs(before[place] - target)))
    return [list(tensors[a:b]) for a, b in itertools.pairwise([*cuts, len(sizes)])]


def cut_by_bytes(tensors: Sequence[Tensor], parts: int) -> list[Callable[[], list[Tensor]]]:
    """Contiguous parts of equal bytes, which may begin and end inside a tensor.

    A tensor that is not contiguous in memory is not divided, so parts may differ by its size, and
    there may be fewer of them.

    Args:
        tensors: In order; empty ones are left out.
        parts: Number of parts (≥ 1).

    Returns:
        For each part a function that returns its tensors and views into tensors. It reads the
        tensors' memory anew, because a module may be moved.
    """
    sizes = [summed_bytes(tensor) for tensor in tensors]
    whole, done = sum(sizes), 0
    found: list[list[_Slice]] = [[] for _ in range(parts)]
    for tensor, size in zip(tensors, sizes, strict=True):
        numbers = as_real(tensor.detach())
        itemsize = staging_dtype(tensor).itemsize
        start = 0
        while start < numbers.numel():
            at = done + start * itemsize
            part = min(parts - 1, at * parts // whole)
            left = -(-(whole * (part + 1) // parts - at) // itemsize)  # numbers until it is full
            stop = numbers.numel()
            if part < parts - 1 and numbers.is_contiguous():
                stop = min(stop, start + max(1, left))
            found[part].append(_Slice(tensor, start, stop))
            start = stop
        done += size
    return [_views(slices) for slices in found if slices]


def summed_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor as it is summed."""
    return as_real(tensor.detach()).numel() * staging_dtype(tensor).itemsize


@dataclass(frozen=True)
class _Slice:
    """The numbers of a tensor from ``start`` up to ``stop``, in the order of memory."""

    tensor: Tensor
    start: int
    stop: int

    def view(self) -> Tensor:
        numbers = as_real(self.tensor.detach())
        if self.stop - self.start == numbers.numel():
            return numbers
        return numbers.view(-1)[self.start : self.stop]


def _views(slices: list[_Slice]) -> Callable[[], list[Tensor]]:
    return lambda: [one.view() for one in slices]
