"""Bounds of the quantization error, computed without the codecs, and numbers to quantize."""

import torch
from torch import Tensor

from offbeat.quantization.block_format import BLOCK


def values(seed: int, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers whose magnitude varies by many orders along the tensor."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(elements, generator=generator, dtype=torch.float64)
    return (x * torch.logspace(-6, 3, elements, dtype=torch.float64)).to(dtype)


def largest(x: Tensor) -> Tensor:
    """Return, for each element, the largest absolute value of its block."""
    blocks = [part.abs().max().expand(part.numel()) for part in x.double().split(BLOCK)]
    return torch.cat(blocks)


def most(x: Tensor, precision: str) -> Tensor:
    """Return, for each element, the largest allowed quantization error of ``x``."""
    if precision == "int2":  # neither 0 nor a mean is further away
        return largest(x) * (1 + 1e-4) + 1e-28
    levels = {"int8": 127, "int4": 7}[precision]
    return largest(x) / (2 * levels) * (1 + 1e-4) + 1e-28
