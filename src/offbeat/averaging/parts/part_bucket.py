"""Buckets of a part of the model.

A part is a group of parameters that is averaged separately, and may include floating-point buffers.
A bucket copies them into one flat *staging tensor*, which is summed over the workers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.averaging.buckets import Bucket, add_clamped, as_real, unpack


class PartBucket(Bucket):
    """A bucket of parameters, followed by floating-point buffers.

    Args:
        parameters: Parameters of one dtype and device.
        buffers: Buffers of the same dtype and device.
    """

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        super().__init__([*parameters, *buffers])
        self.parameters, self.buffers = list(parameters), list(buffers)
        # Offset of the first buffer in the staging tensor.
        self._split = self.elements - sum(as_real(b).numel() for b in buffers)

    def replace(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        """Use other tensors with the same shapes from now on."""
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
        """Return the parameters' section of ``flat``, which has the staging tensor's layout."""
        return flat[: self._split]

    def buffers_of(self, flat: Tensor) -> Tensor:
        """Return the buffers' section of ``flat``, which has the staging tensor's layout."""
        return flat[self._split :]

    def copy_parameters(self, dtype: torch.dtype | None = None) -> Tensor:
        """Copy the parameters to a new flat tensor. Overwrites the staging tensor.

        Args:
            dtype: Dtype of the new tensor. None: the dtype of the staging tensor.
        """
        self.pack()
        return self.parameter_values.to(dtype or self.flat.dtype, copy=True)

    def copy_buffers(self) -> Tensor:
        """Copy the buffers to a new flat tensor, maybe empty. Overwrites the staging tensor."""
        self.pack()
        return self.buffer_values.clone()

    def write_buffers(self, sent: Tensor | None, weight: float) -> None:
        """Write the mean of the buffers over the workers.

        The staging tensor holds the sum Σ w·b over the workers. The mean is this sum divided by
        ``weight``. If ``sent`` is None, the buffers become the mean. Otherwise each buffer changes
        by mean − sent, but at most to the mean (see ``add_clamped``). So changes since the launch
        are kept.

        Args:
            sent: Values of this worker at the launch, 1-D. None if it has taken no step since then.
            weight: Σ w, the sum of the workers' weights.
        """
        if not self.buffers:
            return
        if sent is None:
            unpack(self.buffer_values, self.buffers, weight)
        else:
            add_clamped(self.buffers, self.buffer_values / weight, sent)
