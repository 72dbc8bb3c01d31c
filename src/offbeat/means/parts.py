"""A model cut into parts of equal bytes, which may begin and end inside of a tensor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from offbeat.means.replica import as_real, staging_dtype


@dataclass(frozen=True)
class Slice:
    """Some of a tensor's numbers.

    Attributes:
        tensor: The tensor.
        start: The first of them, in the order of memory.
        stop: The one after the last.
    """

    tensor: Tensor
    start: int
    stop: int

    def view(self) -> Tensor:
        """They, sharing the tensor's memory as it is now: a module may be moved."""
        numbers = as_real(self.tensor.detach())
        if self.stop - self.start == numbers.numel():
            return numbers
        return numbers.view(-1)[self.start : self.stop]


def cut_evenly(tensors: Sequence[Tensor], parts: int) -> list[Callable[[], list[Tensor]]]:
    """Contiguous parts of equal bytes, each of which gives its tensors and pieces of tensors.

    A tensor whose numbers are not contiguous is not divided; so parts may differ by it, and be
    fewer.

    Args:
        tensors: In order; those without numbers are left out.
        parts: How many (≥ 1).
    """
    sizes = [as_real(t.detach()).numel() * staging_dtype(t).itemsize for t in tensors]
    whole, done = sum(sizes), 0
    found: list[list[Slice]] = [[] for _ in range(parts)]
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
            found[part].append(Slice(tensor, start, stop))
            start = stop
        done += size
    return [_views(slices) for slices in found if slices]


def _views(slices: list[Slice]) -> Callable[[], list[Tensor]]:
    return lambda: [one.view() for one in slices]
