"""Buckets of a part of the model: parameters, and floating-point buffers that travel with them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.averaging.buckets import Bucket, add_clamped, unpack


class PartBucket(Bucket):
    """A bucket whose first tensors are parameters and the others floating-point buffers.

    Args:
        parameters: Parameters, of one dtype and device.
        buffers: Buffers, of the same dtype and device.
    """

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        super().__init__([*parameters, *buffers])
        self.parameters, self.buffers = list(parameters), list(buffers)
        self._split = self.elements - sum(_elements_of(b) for b in buffers)

    def find(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Use these tensors, of the same shapes, from now on."""
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
        """The part of a flat tensor of this bucket that stands for the parameters."""
        return flat[: self._split]

    def buffers_of(self, flat: Tensor) -> Tensor:
        """The part of a flat tensor of this bucket that stands for the buffers."""
        return flat[self._split :]

    def copy_parameters(self, dtype: torch.dtype | None = None) -> Tensor:
        """The parameters in a new flat tensor of ``dtype``; None is that of the staging tensor."""
        self.pack()
        return self.parameter_values.to(dtype or self.flat.dtype, copy=True)

    def copy_buffers(self) -> Tensor:
        """The buffers in a new flat tensor; empty if there are none."""
        self.pack()
        return self.buffer_values.clone()

    def write_buffers(self, own: Tensor | None, weight: float) -> None:
        """Replace the buffers by their mean, or shift them by it.

        Args:
            own: What this worker has sent, if it has taken steps since; None if not.
            weight: Σ w, by which the staged values are divided.
        """
        if not self.buffers:
            return
        if own is None:
            unpack(self.buffer_values, self.buffers, weight)
        else:
            add_clamped(self.buffers, self.buffer_values / weight, own)


def _elements_of(tensor: Tensor) -> int:
    """Number of real numbers in ``tensor``."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)
