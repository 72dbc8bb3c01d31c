"""A view of tensors as one flat vector, which is read and changed in pieces."""

import itertools
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.averaging.buckets import as_real, staging_dtype
from offbeat.quantization.decoding import LazyVector


class FlatView:
    """The elements of several tensors as one vector, one tensor after the other.

    Args:
        tensors: At least one tensor; all have the same dtype and device. A tensor that is not
            contiguous is copied, and needs a call of ``write_back`` after changes.

    Attributes:
        elements: Number of elements of all tensors. A complex element counts as two.
        device: Device of the tensors.
        dtype: Dtype for computations with the elements: float32 for half-precision tensors.
        contiguous: True if all tensors are contiguous. The view then has no copies.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [as_real(t.detach()) for t in tensors]
        self._flat = [t.reshape(-1) for t in self._tensors]
        self._ends = list(itertools.accumulate(t.numel() for t in self._flat))
        self.elements, self.device = self._ends[-1], self._flat[0].device
        self.dtype = staging_dtype(tensors[0])
        self.contiguous = all(t.is_contiguous() for t in self._tensors)
        self._pieces: dict[tuple[int, int], list[Tensor]] = {}  # results of ``pieces``

    def pieces(self, start: int, elements: int) -> list[Tensor]:
        """Return 1-D slices of the tensors that cover ``elements`` elements from ``start`` on."""
        found = self._pieces.get((start, elements))
        if found is None:  # the same ones are used in every launch
            index, end = bisect_right(self._ends, start), start + elements
            found = self._pieces[start, elements] = []
            while start < end:
                first = self._ends[index] - self._flat[index].numel()
                found.append(self._flat[index][start - first : end - first])
                start, index = self._ends[index], index + 1
        return found

    def read(self, values: Tensor, start: int) -> None:
        """Fill ``values``, of the view's ``dtype``, with the elements from ``start`` on."""
        torch.cat(self.pieces(start, values.numel()), out=values)

    def add(self, values: Tensor, start: int) -> None:
        """Add ``values`` to the elements from ``start`` on, computed in the dtype of ``values``."""
        pieces = self.pieces(start, values.numel())
        for piece, part in zip(pieces, values.split([p.numel() for p in pieces]), strict=True):
            piece.add_(part)

    def write_back(self) -> None:
        """Write the changes to the tensors that are not contiguous."""
        if self.contiguous:
            return
        for tensor, flat in zip(self._tensors, self._flat, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))


class Difference(LazyVector):
    """The elementwise difference ``view − base``, computed when it is read.

    ``base`` is 1-D and has as many elements as ``view``.
    """

    def __init__(self, view: FlatView, base: Tensor) -> None:
        super().__init__(view.elements, view.dtype, view.device)
        self._view, self._base = view, base

    @override
    def read(self, values: Tensor, start: int = 0) -> None:
        exact = values
        if values.dtype != self.dtype:
            exact = torch.empty(values.numel(), dtype=self.dtype, device=self.device)
        self._view.read(exact, start)
        torch.sub(exact, self._base[start : start + values.numel()], out=values)
