"""Tensors seen as one flat vector, which is read and changed piece by piece without a copy."""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.averaging.replica import as_real, staging_dtype
from offbeat.quantization.decoding import LazyVector


class FlatView:
    """The numbers of several tensors, one tensor after the other.

    Args:
        tensors: Not empty, of one dtype and device. A tensor that is not contiguous is copied;
            ``write_back`` copies it back.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [as_real(t.detach()) for t in tensors]
        self._flat = [t.reshape(-1) for t in self._tensors]
        self._ends = list(itertools.accumulate(t.numel() for t in self._flat))
        self.elements, self.device = self._ends[-1], self._flat[0].device
        self.dtype = staging_dtype(tensors[0])

    def pieces(self, start: int, elements: int) -> Iterator[tuple[Tensor, slice]]:
        """Slices of the tensors that cover ``elements`` numbers from ``start``, with their places.

        A place is relative to ``start``.
        """
        number, done = bisect_right(self._ends, start), 0
        while done < elements:
            tensor = self._flat[number]
            first = start + done - (self._ends[number] - tensor.numel())
            part = tensor[first : first + elements - done]
            yield part, slice(done, done + part.numel())
            done, number = done + part.numel(), number + 1

    def add(self, values: Tensor, start: int) -> None:
        """Add ``values`` to the numbers from ``start``; half types are computed in float32."""
        for part, where in self.pieces(start, values.numel()):
            if part.dtype == values.dtype:
                part.add_(values[where])
            else:
                part.copy_(part.to(values.dtype).add_(values[where]))

    def write_back(self) -> None:
        """Copy changed numbers into the tensors that are not contiguous."""
        for tensor, flat in zip(self._tensors, self._flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))


class Difference(LazyVector):
    """s − P.

    Args:
        view: s.
        base: P, 1-D, of the same number of elements.
    """

    def __init__(self, view: FlatView, base: Tensor) -> None:
        super().__init__(view.elements, view.dtype, view.device)
        self._view, self._base = view, base

    @override
    def read(self, values: Tensor, start: int = 0) -> None:
        base = self._base[start : start + values.numel()]
        for part, where in self._view.pieces(start, values.numel()):
            torch.sub(part, base[where], out=values[where])
