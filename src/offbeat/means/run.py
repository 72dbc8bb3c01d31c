"""Tensors as one run of numbers, read and moved a stretch at a time, without a staging copy."""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.fabric.numbers import Numbers
from offbeat.means.replica import as_real, staging_dtype


class Run:
    """The numbers of tensors, one after the other.

    Args:
        tensors: Not empty, of one dtype and device. Of one whose numbers are not contiguous a copy
            is made, which ``write_back`` puts into it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [as_real(t.detach()) for t in tensors]
        self._flat = [t.reshape(-1) for t in self._tensors]
        self._ends = list(itertools.accumulate(t.numel() for t in self._flat))
        self.elements, self.device = self._ends[-1], self._flat[0].device
        self.dtype = staging_dtype(tensors[0])

    def stretches(self, start: int, elements: int) -> Iterator[tuple[Tensor, slice]]:
        """The pieces of tensors from ``start`` on, and where in the stretch each is."""
        number, done = bisect_right(self._ends, start), 0
        while done < elements:
            tensor = self._flat[number]
            first = start + done - (self._ends[number] - tensor.numel())
            part = tensor[first : first + elements - done]
            yield part, slice(done, done + part.numel())
            done, number = done + part.numel(), number + 1

    def add(self, values: Tensor, start: int) -> None:
        """Numbers ← numbers + values, from ``start`` on; half types are computed in float32."""
        for part, where in self.stretches(start, values.numel()):
            if part.dtype == values.dtype:
                part.add_(values[where])
            else:
                part.copy_(part.to(values.dtype).add_(values[where]))

    def write_back(self) -> None:
        """End what ``add`` has begun."""
        for tensor, flat in zip(self._tensors, self._flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))


class Difference(Numbers):
    """s − P.

    Args:
        run: s.
        base: P, 1-D.
    """

    def __init__(self, run: Run, base: Tensor) -> None:
        super().__init__(run.elements, run.dtype, run.device)
        self._run, self._base = run, base

    @override
    def read(self, values: Tensor, start: int = 0) -> None:
        base = self._base[start : start + values.numel()]
        for part, where in self._run.stretches(start, values.numel()):
            torch.sub(part, base[where], out=values[where])
