"""The squared L2 norm of many tensors, read once."""

from collections.abc import Iterable

import torch
from torch import Tensor

_SMALL = 2**15  # elements; smaller gradients share one call, which costs as much as reading 20,000
_LARGE = 2**18  # from here on the CPU norms _ROWS rows: torch norms whole tensors in one thread
_ROWS = 8


def squared_norm(gradients: Iterable[Tensor]) -> float:
    """‖g‖²: the squared L2 norm over all ``gradients`` together, accumulated in float32 or wider.

    Reads each gradient once. Sparse gradients are coalesced first.
    """
    parts: list[Tensor] = []
    small: dict[tuple[torch.dtype, int], list[Tensor]] = {}  # by dtype and device
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        count = values.numel()
        if count >= _SMALL:
            parts.append(_norm(values))
        elif count:
            small.setdefault((values.dtype, values.get_device()), []).append(values.reshape(-1))
    parts += [_norm(torch.cat(group)) for group in small.values()]
    if not parts:
        return 0.0
    devices = {part.device for part in parts}
    if len(devices) > 1 or parts[0].device.type == "cpu":
        return sum(value * value for value in (part.item() for part in parts))  # may be ∞
    return float(torch.stack([part.double() for part in parts]).square().sum().item())


def _norm(values: Tensor) -> Tensor:
    dtype = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else None
    count = values.numel()
    if count >= _LARGE and not count % _ROWS and values.is_cpu and values.is_contiguous():
        values = torch.linalg.vector_norm(values.view(_ROWS, -1), dim=1, dtype=dtype)
    norm: Tensor = torch.linalg.vector_norm(values, dtype=dtype)
    return norm
