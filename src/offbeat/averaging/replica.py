"""Replica: the tensors of one worker's model, and which of them are averaged.

Parameters, floating-point buffers and complex buffers are averaged. Of signed integer buffers, such
as BatchNorm's batch counter, the maximum over the workers is taken. All other buffers, such as
masks, are copied from rank 0 in a consensus.
"""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from offbeat.averaging.buckets import BUCKET_BYTES, Bucket, make_buckets

Contents = Literal["averaged", "parameters", "buffers"]
_COUNTERS = (torch.int8, torch.int16, torch.int32, torch.int64)


class Replica:
    """One worker's copy of a model.

    Args:
        model: The model.
        trainable: The parameters to average, with or without a gradient.
        scale: ``Host.scale``.

    Attributes:
        parameters: Name and tensor of each averaged parameter, sorted by name. Tied parameters
            appear once.
    """

    def __init__(
        self, model: nn.Module, trainable: Iterable[nn.Parameter], scale: float = 1.0
    ) -> None:
        self._model, self._bucket_bytes = model, BUCKET_BYTES / scale
        chosen = {id(p) for p in trainable}
        self.parameters = sorted(
            ((name, p) for name, p in model.named_parameters() if id(p) in chosen),
            key=lambda item: item[0],
        )
        self._buckets: dict[Contents, tuple[list[Tensor], list[Bucket]]] = {}

    def describe(self) -> list[str]:
        """Return a line of text for each tensor of the model, to be compared between workers."""
        averaged = {id(p) for _, p in self.parameters}
        lines = [
            f"parameter {name!r}: shape {tuple(p.shape)}, {p.dtype}, "
            f"{'averaged' if id(p) in averaged else 'frozen'}"
            for name, p in self._model.named_parameters()
        ]
        lines += [
            f"buffer {name!r}: shape {tuple(b.shape)}, {b.dtype}"
            for name, b in self._model.named_buffers()
        ]
        return lines

    def replaced(self) -> list[str]:
        """Return the names of averaged parameters that the model no longer contains."""
        current = {id(p) for p in self._model.parameters()}
        return [name for name, p in self.parameters if id(p) not in current]

    def versions(self) -> list[int]:
        """Return the version counter of each averaged parameter, which grows with each write."""
        return [p._version for _, p in self.parameters]

    # -- tensors ---------------------------------------------------------------------------------

    def everything(self) -> list[Tensor]:
        """Return all parameters and buffers, including frozen parameters."""
        return [*self._model.parameters(), *self._model.buffers()]

    def float_buffers(self) -> list[Tensor]:
        """Return the floating-point and complex buffers, which are averaged."""
        return [b for b in self._buffers() if b.is_floating_point() or b.is_complex()]

    def integer_buffers(self) -> list[Tensor]:
        """Return the signed integer buffers, of which the maximum is taken."""
        return [b for b in self._buffers() if b.dtype in _COUNTERS]

    def other_buffers(self) -> list[Tensor]:
        """Return all other buffers, which ``consensus`` and ``finish`` copy from rank 0."""
        done = {id(b) for b in (*self.float_buffers(), *self.integer_buffers())}
        return [b for b in self._buffers() if id(b) not in done]

    def _buffers(self) -> list[Tensor]:
        return [buffer for _, buffer in sorted(self._model.named_buffers(), key=lambda b: b[0])]

    def averaged(self) -> list[Tensor]:
        """Return all tensors that a mean of models replaces."""
        return [*(p for _, p in self.parameters), *self.float_buffers()]

    def _synchronized(self) -> list[Tensor]:
        """Return all tensors that a consensus may change."""
        return [*self.averaged(), *self.integer_buffers(), *self.other_buffers()]

    # -- buckets and snapshots -------------------------------------------------------------------

    def buckets(self, kind: Contents = "averaged") -> list[Bucket]:
        """Return buckets of the averaged tensors.

        The buckets are kept for the next call, unless a module has replaced a buffer since then.

        Args:
            kind: "parameters", "buffers" (the floating-point and complex ones), or "averaged" for
                both.
        """
        tensors: list[Tensor] = [] if kind == "buffers" else [p for _, p in self.parameters]
        if kind != "parameters":
            tensors += self.float_buffers()
        previous, buckets = self._buckets.get(kind, ([], []))
        if [id(t) for t in previous] != [id(t) for t in tensors]:
            buckets = make_buckets(tensors, self._bucket_bytes)
            self._buckets[kind] = (tensors, buckets)
        return buckets

    def forget_buckets(self) -> None:
        """Make new buckets at the next use.

        Required after operations were abandoned: a backend may still write into their staging
        tensors.
        """
        self._buckets.clear()

    def snapshot(self) -> list[Tensor]:
        """Return copies of all tensors that a consensus may change, in total one model."""
        return [t.detach().clone() for t in self._synchronized()]

    def restore(self, snapshot: Sequence[Tensor]) -> None:
        """Copy the values of a ``snapshot`` back, in place."""
        with torch.no_grad():
            for target, value in zip(self._synchronized(), snapshot, strict=True):
                target.detach().copy_(value)
