"""Buckets: tensors of one dtype and device that are copied into one flat tensor to be sent.

The workers sum the flat *staging tensors* of their buckets. ``pack`` copies (*stages*) the tensors
into the staging tensor, and ``unpack`` copies the result back. ``unpack`` writes in place, because
the optimizer and the modules hold references to the tensors.

Tensors are staged, and therefore summed, in their own dtype, with three exceptions: float16 and
bfloat16 are staged in float32, complex tensors as pairs of reals, and bool tensors in uint8.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

BUCKET_BYTES = 8 * 2**20  # default limit for the size of a bucket


# -- tensors and their flat copy -------------------------------------------------------------------


def as_real(tensor: Tensor) -> Tensor:
    """Return ``tensor`` itself, or a view of a complex tensor as pairs of reals."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def staging_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of the staging tensor for ``tensor``."""
    if tensor.is_complex():
        return as_real(tensor).dtype
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return torch.uint8 if tensor.dtype == torch.bool else tensor.dtype


def staged_bytes(tensor: Tensor) -> int:
    """Return the size of ``tensor`` in a staging tensor, in bytes."""
    return as_real(tensor.detach()).numel() * staging_dtype(tensor).itemsize


def pack(tensors: Sequence[Tensor], flat: Tensor, weight: float = 1.0) -> None:
    """flat ← weight · tensors, concatenated. With weight 0 a NaN becomes 0, too.

    The tensors have one dtype and the device of ``flat``.
    """
    if weight == 0:
        flat.zero_()
        return
    with torch.no_grad():
        parts = [as_real(t.detach()).reshape(-1) for t in tensors]
        if flat.dtype == torch.uint8:
            parts = [part.to(torch.uint8) for part in parts]
        torch.cat(parts, out=flat)
        if weight != 1:
            flat.mul_(weight)


def pack_mixed(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """flat ← tensors, concatenated. The tensors may have different dtypes and devices."""
    with torch.no_grad():
        for tensor, part in _with_parts(tensors, flat):
            part.copy_(tensor)


def unpack(flat: Tensor, tensors: Sequence[Tensor], divisor: float = 1.0) -> None:
    """tensors ← flat / divisor, in place, each cast to its own dtype. Integers need divisor 1.

    Here and in all other means, a sum is multiplied by the rounded reciprocal of the divisor. That
    is how CUDA divides by a number, and a CPU must give the same bits.
    """
    with torch.no_grad():
        for tensor, part in _with_parts(tensors, flat):
            if divisor == 1:
                tensor.copy_(part)
            else:
                torch.mul(part, 1 / divisor, out=tensor)


def add_to(tensors: Sequence[Tensor], flat: Tensor, scale: float) -> None:
    """tensors ← tensors + scale · flat, in place, computed in the dtype of ``flat``."""
    with torch.no_grad():
        for tensor, part in _with_parts(tensors, flat):
            part = part.to(tensor.device)
            if tensor.dtype == part.dtype:
                tensor.add_(part, alpha=scale)
            else:
                tensor.copy_(tensor.to(part.dtype).add_(part, alpha=scale))


def add_clamped(tensors: Sequence[Tensor], mean: Tensor, sent: Tensor) -> None:
    """tensors ← tensors + (mean − sent), but no element moves beyond its mean or away from it.

    Adding mean − sent without this limit could make a running variance of BatchNorm negative. With
    it the result lies between the old variance and the mean variance.

    Args:
        tensors: Buffers, changed in place.
        mean: Mean over the workers of the values that they have sent, 1-D.
        sent: Values that this worker has sent, 1-D.
    """
    with torch.no_grad():
        current = torch.empty_like(mean)
        pack(tensors, current)
        shifted = current + (mean - sent)
        lower, upper = torch.minimum(current, mean), torch.maximum(current, mean)
        clamped = torch.minimum(torch.maximum(shifted, lower), upper)
        # A value that has not changed since it was sent is set to the mean directly. For infinite
        # values, as in an attention mask, the formula would give ∞ − ∞ = NaN. A NaN becomes the
        # mean, too.
        replaced = (current == sent) | current.isnan() | sent.isnan()
        unpack(torch.where(replaced, mean, clamped), tensors)


def _with_parts(tensors: Sequence[Tensor], flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor, viewed as real numbers, and its part of ``flat`` in the same shape."""
    offset = 0
    for tensor in tensors:
        target = as_real(tensor.detach())
        yield target, flat[offset : offset + target.numel()].view(target.shape)
        offset += target.numel()


# -- buckets ---------------------------------------------------------------------------------------


class Bucket:
    """Tensors of one dtype and device, with a staging tensor that is allocated at its first use.

    Args:
        tensors: The tensors, read and written in place.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self._flat: Tensor | None = None

    @property
    def flat(self) -> Tensor:
        """The staging tensor, 1-D."""
        if self._flat is None:
            first = self.tensors[0]
            elements = sum(as_real(t.detach()).numel() for t in self.tensors)
            self._flat = torch.empty(elements, dtype=staging_dtype(first), device=first.device)
        return self._flat

    def pack(self, weight: float = 1.0) -> Tensor:
        """Stage ``weight`` times the tensors. Returns ``flat``."""
        pack(self.tensors, self.flat, weight)
        return self.flat

    def unpack(self, divisor: float = 1.0) -> None:
        """Write the staged values divided by ``divisor`` into the tensors, in place."""
        unpack(self.flat, self.tensors, divisor)

    def release(self) -> None:
        """Free the staging tensor. The next use allocates it again."""
        self._flat = None


def group_tensors(
    tensors: Iterable[Tensor],
    bucket_bytes: float = BUCKET_BYTES,
    first_bucket_bytes: float = 0,
) -> list[list[Tensor]]:
    """Group tensors by dtype and device into lists, in the given order.

    Args:
        tensors: The tensors.
        bucket_bytes: Largest size of a list in bytes, counted in the dtype of the staging tensor. A
            list with a single tensor may be larger.
        first_bucket_bytes: If not 0, the first list is instead full once it holds at least this
            number of bytes.
    """
    groups: list[list[Tensor]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        size = staged_bytes(tensor)
        group, filled = open_groups.get(key, (None, 0))
        if first_bucket_bytes and group is not None and group is groups[0]:
            full = filled >= first_bucket_bytes
        else:
            full = filled + size > bucket_bytes
        if group is None or full:
            group, filled = [], 0
            groups.append(group)
        group.append(tensor)
        open_groups[key] = (group, filled + size)
    return groups


def make_buckets(tensors: Iterable[Tensor], bucket_bytes: float = BUCKET_BYTES) -> list[Bucket]:
    """Return the groups of ``group_tensors`` as buckets. Tensors without elements are left out."""
    return [Bucket(g) for g in group_tensors((t for t in tensors if t.numel()), bucket_bytes)]
