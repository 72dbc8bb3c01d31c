"""Norms of many tensors together, with few calls of torch."""

from collections.abc import Iterable

import torch
from torch import Tensor

# Tensors with fewer elements are concatenated and share one call of torch. A call costs about as
# much as reading 20,000 elements.
_SMALL = 2**15
# On the CPU torch computes the norm of a vector in one thread, but the norms of matrix rows in
# parallel. So a vector with at least ``_LARGE`` elements is viewed as ``_ROWS`` rows, if possible.
_LARGE, _ROWS = 2**18, 8


def squared_norm(tensors: Iterable[Tensor]) -> float:
    """Return the squared L2 norm of all tensors together, accumulated in float32 or wider.

    Sparse tensors are coalesced first.
    """
    # Unlike ``value**2``, ``value * value`` gives ∞ on overflow.
    return sum((value * value for value in _norms(tensors, 2)), start=0.0)


def absolute_sum(tensors: Iterable[Tensor]) -> float:
    """Return the sum of the absolute values of all elements, accumulated like ``squared_norm``."""
    return sum(_norms(tensors, 1), start=0.0)


def no_nan(tensors: Iterable[Tensor]) -> Tensor | bool:
    """Return False if a tensor contains NaN. Does not wait for a GPU: the result is there."""
    parts = _norm_tensors(tensors, 2)
    if len({part.device for part in parts}) == 1:
        return torch.stack([part.double() for part in parts]).isnan().logical_not().all()
    return not any(bool(part.isnan()) for part in parts)


def _norms(tensors: Iterable[Tensor], order: int) -> list[float]:
    """Return the ``_norm_tensors`` as numbers."""
    parts = _norm_tensors(tensors, order)
    devices = {part.device for part in parts}
    if len(devices) > 1 or not parts or parts[0].device.type == "cpu":
        return [part.item() for part in parts]
    norms: list[float] = torch.stack([part.double() for part in parts]).tolist()
    return norms


def _norm_tensors(tensors: Iterable[Tensor], order: int) -> list[Tensor]:
    """Return norms of ``tensors`` or of groups of them: L2 for the ``order`` 2, L1 for 1."""
    parts: list[Tensor] = []
    small: dict[tuple[torch.dtype, int], list[Tensor]] = {}  # by dtype and device
    for tensor in tensors:
        values = tensor.coalesce().values() if tensor.is_sparse else tensor
        count = values.numel()
        if count >= _SMALL:
            parts.append(_norm(values, order))
        elif count:
            small.setdefault((values.dtype, values.get_device()), []).append(values.reshape(-1))
    return parts + [_norm(torch.cat(group), order) for group in small.values()]


def _norm(values: Tensor, order: int) -> Tensor:
    dtype = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    count = values.numel()
    if count >= _LARGE and not count % _ROWS and values.is_cpu and values.is_contiguous():
        values = torch.linalg.vector_norm(values.view(_ROWS, -1), order, dim=1, dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(values, order, dtype=dtype)
    return norm
