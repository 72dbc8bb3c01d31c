"""Selects the Triton kernels on a GPU, if they give the same bits there as torch operations."""

import logging
import os
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from offbeat.quantization.block_format import BLOCK
from offbeat.quantization.codecs import CODECS, Codec

logger = logging.getLogger("offbeat")


@cache
def triton_kernels(device: torch.device, precision: str) -> Any | None:
    """Return the module ``triton_kernels.py`` for messages of ``precision``, tried on ``device``.

    Returns None on another device than a GPU, without Triton, or if ``OFFBEAT_KERNELS=0`` is set.
    Also None, with a warning, if the kernels fail or their results differ from those of the torch
    operations. Waits for the GPU.
    """
    disabled = os.environ.get("OFFBEAT_KERNELS") == "0"
    if device.type != "cuda" or disabled or find_spec("triton") is None:
        return None
    try:
        from offbeat.quantization import triton_kernels as kernels

        _try(kernels, CODECS[precision](), device)
    except Exception as error:
        logger.warning(
            "the Triton kernels fail (%s: %s), so slower torch operations are used on %s; set "
            "OFFBEAT_KERNELS=0 to silence this warning",
            type(error).__name__,
            str(error).partition("\n")[0],
            device,
        )
        return None
    return kernels


def _try(kernels: Any, codec: Codec, device: torch.device) -> None:
    """Launch each kernel once. Raise ValueError if its bits are not those of torch operations."""
    size, bits, weight = BLOCK + 100, codec.bits, 3.0
    x, shared = torch.linspace(-1, 1, size), torch.linspace(0.5, -0.7, size)
    total = torch.zeros(2 * BLOCK)
    total[:size] = x - shared
    x, shared, total = x.to(device), shared.to(device), total.to(device)
    rows = [torch.empty(2, codec.block_bytes, dtype=torch.uint8, device=device) for _ in range(4)]
    table = kernels.make_table([x[:300], x[300:]])
    finite = torch.ones(1, dtype=torch.bool, device=device)
    codec.encode(total, rows[0])  # leaves the errors in ``total``
    kernels.encode(table, None, shared, rows[1], finite, bits)
    errors = total.clone()
    for _ in range(2):
        codec.decode(rows[0], total, add=True)
    codec.encode(total, rows[2])
    kernels.add_up(torch.stack([rows[0]] * 2), errors, rows[3], bits)
    codec.decode(rows[2], change := torch.empty_like(x))
    codec.decode(rows[0], sent := torch.empty_like(x))
    change.mul_(1 / weight)
    moved, local = shared + change, x + (change - sent)
    shift = torch.empty_like(x)
    kernels.move([rows[2]], rows[0], shift, weight, shared, shared[:0], (0.0, 1.0, 0.0), bits)
    kernels.add(table, None, shift)
    pairs = (rows[:2], rows[2:], (total, errors), (moved, shared), (local, x))
    if not (bool(finite) and all(torch.equal(a, b) for a, b in pairs)):
        raise ValueError("their results differ from those of the torch operations")
