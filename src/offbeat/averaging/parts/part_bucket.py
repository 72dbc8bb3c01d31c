"""Buckets of a part of the model.

A bucket copies tensors into one flat *staging tensor*, which is summed over the workers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.averaging.buckets import Bucket, add_clamped, as_real, unpack
from offbeat.averaging.flat_view import FlatView


class PartBucket(Bucket):
    """A bucket of parameters, followed by floating-point buffers of the same dtype and device."""

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        super().__init__([*parameters, *buffers])
        self.parameters, self.buffers = list(parameters), list(buffers)
        self._view: FlatView | None = None
        # Offset of the first buffer in the staging tensor.
        self._split = self.elements - sum(as_real(b).numel() for b in buffers)

    def replace(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Use other tensors with the same shapes from now on."""
        self.parameters, self.buffers = list(parameters), list(buffers)
        self.tensors = [*parameters, *buffers]
        self._view = None

    @property
    def flat_view(self) -> FlatView:
        """The parameters as one vector, with their present values."""
        # A view of parameters that are not contiguous contains copies, so it is made for each use.
        if self._view is None or not self._view.contiguous:
            self._view = FlatView(self.parameters)
        return self._view

    @property
    def parameter_values(self) -> Tensor:
        """The staged values of the parameters."""
        return self.parameters_of(self.flat)

    @property
    def buffer_values(self) -> Tensor:
        """The staged values of the buffers."""
        return self.flat[self._split :]

    def parameters_of(self, flat: Tensor) -> Tensor:
        """Return the values of the parameters in ``flat``, which has the bucket's layout."""
        return flat[: self._split]

    def buffers_of(self, flat: Tensor) -> Tensor:
        """Return the values of the buffers in ``flat``, which has the bucket's layout."""
        return flat[self._split :]

    def copy_parameters(self, dtype: torch.dtype | None = None) -> Tensor:
        """Copy the parameters to a new flat tensor. Overwrites the staging tensor.

        ``dtype`` is the dtype of the new tensor. None: the dtype of the staging tensor.
        """
        self.pack()
        return self.parameter_values.to(dtype or self.flat.dtype, copy=True)

    def write_buffers(self, sent: Tensor | None, weight: float) -> None:
        """Write the mean of the buffers: the staged sum over the workers, divided by ``weight``.

        Args:
            sent: Values of the buffers when their sum was started, 1-D. The buffers keep their
                changes since then, see ``add_clamped``. None: the buffers become the mean.
            weight: Σ w, the sum of the workers' weights.
        """
        if not self.buffers:
            return
        if sent is None:
            unpack(self.buffer_values, self.buffers, weight)
        else:
            add_clamped(self.buffers, self.buffer_values * (1 / weight), sent)
