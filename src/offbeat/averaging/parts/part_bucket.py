"""Buckets of a part of the model: parameters and floating-point buffers in one staging tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.averaging.buckets import Bucket, add_clamped, as_real, unpack


class PartBucket(Bucket):
    """A bucket whose first tensors are parameters and the others floating-point buffers.

    Args:
        parameters: Parameters of one dtype and device.
        buffers: Buffers of the same dtype and device.
    """

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        super().__init__([*parameters, *buffers])
        self.parameters, self.buffers = list(parameters), list(buffers)
        self._split = self.elements - sum(
            as_real(b).numel() for b in buffers
        )  # of the first buffer

    def replace(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Use other tensors of the same shapes."""
        self.parameters, self.buffers = list(parameters), list(buffers)
        self.tensors = [*parameters, *buffers]

    @property
    def parameter_values(self) -> Tensor:
        """The staged values of the parameters."""
        return self.parameters_of(self.flat)

    @property
    def buffer_values(self) -> Tensor:
        """The staged values of the buffers."""
        return self.flat[self._split :]

    def parameters_of(self, flat: Tensor) -> Tensor:
        """Return the parameters' part of a flat tensor of this bucket."""
        return flat[: self._split]

    def buffers_of(self, flat: Tensor) -> Tensor:
        """Return the buffers' part of a flat tensor of this bucket."""
        return flat[self._split :]

    def copy_parameters(self, dtype: torch.dtype | None = None) -> Tensor:
        """Copy the parameters to a new flat tensor.

        Args:
            dtype: Dtype of the new tensor. None: that of the staging tensor.
        """
        self.pack()
        return self.parameter_values.to(dtype or self.flat.dtype, copy=True)

    def copy_buffers(self) -> Tensor:
        """Copy the buffers to a new flat tensor, which may be empty."""
        self.pack()
        return self.buffer_values.clone()

    def write_buffers(self, sent: Tensor | None, weight: float) -> None:
        """Replace the buffers by their mean, or shift them by the mean minus the sent values.

        Args:
            sent: Values that this worker has sent, if it has taken steps since then. None: it has
                taken no steps.
            weight: Σ w, by which the staged values are divided.
        """
        if not self.buffers:
            return
        if sent is None:
            unpack(self.buffer_values, self.buffers, weight)
        else:
            add_clamped(self.buffers, self.buffer_values / weight, sent)
