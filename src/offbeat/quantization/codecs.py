"""Codecs, which quantize float32 numbers into bytes and back. ``CODECS`` is the table of all.

A codec quantizes *blocks* of 512 numbers to *rows* of bytes; see ``block_format.py``. So a range of
blocks is a range of rows, and any range can be encoded, sent or decoded by itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import inf
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.block_format import (
    BLOCK,
    SMALLEST_SCALE,
    TERNARY_BYTES,
    TERNARY_THRESHOLD,
)
from offbeat.quantization.kernels import kernels_for

PIECE_BLOCKS = 256  # blocks in a piece: 512 KiB of float32, and as much scratch memory


def pieces(rows: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and the numbers of each piece of encoded blocks.

    A CPU processes one piece after the other, because it fits into the cache. On a GPU there is a
    single piece.
    """
    blocks = len(rows)
    step = PIECE_BLOCKS if rows.is_cpu else max(1, blocks)
    for start in range(0, blocks, step):
        stop = min(start + step, blocks)
        yield slice(start, stop), slice(start * BLOCK, stop * BLOCK)


class Codec(ABC):
    """Quantizes blocks to rows of bytes, as ``block_format.py`` defines them.

    The compiled loops of ``kernels.py`` process contiguous float32 tensors on the CPU, if numba is
    installed. Torch operations process all others. Both decode a row to the same bits.

    Attributes:
        bits: Bits of an integer: 8, 4, or 2 for −1, 0 and 1.
        block_bytes: Bytes of a row, a multiple of 4: a scale of 4 bytes and the packed integers.
    """

    bits: ClassVar[int]
    block_bytes: ClassVar[int]

    def encode(self, values: Tensor, rows: Tensor, *, keep_error: bool = True) -> None:
        """rows ← Q(values);  values ← values − Q(values), the quantization error.

        Args:
            values: float32, 1-D, a whole number of blocks. Overwritten.
            rows: Output: uint8, [blocks, ``block_bytes``].
            keep_error: False leaves undefined contents in ``values``, which is faster.
        """
        loops = kernels_for(values)
        if loops is not None:
            loops.encode(values.numpy(), rows.numpy(), self.bits, keep_error)
            return
        for some_rows, numbers in pieces(rows):
            scale, packed = _split(rows[some_rows])
            x = values[numbers].view(-1, BLOCK)
            integers = self._quantize(x, scale)
            if keep_error:  # the error of a block whose scale is NaN is 0
                decoded = integers.to(torch.float32).mul_(scale)  # rounded, unlike in ``addcmul``
                x.sub_(decoded).nan_to_num_(0.0, 0.0, 0.0)
            self._pack(integers, packed)

    def decode(self, rows: Tensor, values: Tensor, *, add: bool = False) -> None:
        """values ← decoded numbers, or values + decoded numbers with ``add``.

        ``values`` is float32, 1-D, and may end inside a block.
        """
        loops = kernels_for(values)
        if loops is not None:
            loops.decode(values.numpy(), rows.numpy(), self.bits, add)
            return
        for some_rows, numbers in pieces(rows):
            part, (scale, packed) = values[numbers], _split(rows[some_rows])
            decoded = (self._unpack(packed) * scale).view(-1)[: part.numel()]
            if add:  # the product is rounded before the sum, as in the compiled loop
                part.add_(decoded)
            else:
                part.copy_(decoded)

    def _quantize(self, x: Tensor, scale: Tensor) -> Tensor:
        """Return blocks ``x`` as int8 integers, and set their scales."""
        largest = x.abs().amax(-1, keepdim=True)
        # A tensor, because CUDA divides by a Python number less exactly than a CPU does.
        torch.div(largest, torch.full_like(largest, 2 ** (self.bits - 1) - 1), out=scale)
        inverse = scale.reciprocal()
        inverse.masked_fill_((scale < SMALLEST_SCALE) | ~scale.isfinite(), 0.0)
        _mark_exceptions(scale)
        return torch.mul(x, inverse).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)

    @abstractmethod
    def _pack(self, integers: Tensor, packed: Tensor) -> None:
        """Pack int8 integers, one row per block, into ``packed``. Overwrites ``integers``."""

    @abstractmethod
    def _unpack(self, packed: Tensor) -> Tensor:
        """Return the integers, one row per block."""


def _split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the scales (float32, one column) and of the packed integers (int8)."""
    return rows[:, :4].view(torch.float32), rows[:, 4:].view(torch.int8)


def _mark_exceptions(scale: Tensor) -> None:
    """Replace scales that are too small by 0, and infinity by NaN."""
    scale.masked_fill_(scale < SMALLEST_SCALE, 0.0).add_(scale - scale)  # ∞ − ∞ = NaN


class Int8(Codec):
    """Integers from −127 to 127."""

    bits = 8
    block_bytes = BLOCK + 4

    @override
    def _pack(self, integers: Tensor, packed: Tensor) -> None:
        packed.copy_(integers)

    @override
    def _unpack(self, packed: Tensor) -> Tensor:
        return packed


class Int4(Codec):
    """Integers from −7 to 7."""

    bits = 4
    block_bytes = BLOCK // 2 + 4

    @override
    def _pack(self, integers: Tensor, packed: Tensor) -> None:
        low, high = integers.chunk(2, dim=-1)
        torch.mul(high, 16, out=packed).add_(low.bitwise_and_(15))

    @override
    def _unpack(self, packed: Tensor) -> Tensor:
        return torch.cat([packed << 4, packed], dim=-1) >> 4  # a shift right keeps the sign


class Int2(Codec):
    """The integers −1, 0 and 1."""

    bits = 2
    block_bytes = TERNARY_BYTES + 4

    @override
    def _quantize(self, x: Tensor, scale: Tensor) -> Tensor:
        absolute = x.abs()
        threshold = _block_means(absolute).mul_(TERNARY_THRESHOLD)
        chosen = absolute >= threshold
        mean = _block_means(absolute * chosen)
        mean.div_(chosen.sum(-1, keepdim=True, dtype=torch.float32).div_(BLOCK))
        # 0/0 becomes 0: with the tiniest numbers, rounding can make the threshold larger than all
        # numbers. ``minimum``: rounding must not make the scale larger than all numbers.
        mean.nan_to_num_(0.0, posinf=inf)
        torch.minimum(mean, absolute.amax(-1, keepdim=True), out=scale)
        _mark_exceptions(scale)
        integers = x.sign().to(torch.int8).mul_(chosen)
        return integers.masked_fill_((scale == 0) | scale.isnan(), 0)

    @override
    def _pack(self, integers: Tensor, packed: Tensor) -> None:
        digits = torch.zeros_like(packed, dtype=torch.int16)
        for k, column in enumerate((integers + 1).split(TERNARY_BYTES, dim=-1)):
            digits[..., : column.shape[-1]] += column.to(torch.int16) * 3 ** (4 - k)
        # (13·d + 242) // 243 without a division, exact for d < 3⁵.
        packed.view(torch.uint8).copy_(digits + (digits * 13 + 242).to(torch.int32) * 135 // 2**15)

    @override
    def _unpack(self, packed: Tensor) -> Tensor:
        fields = packed.view(torch.uint8).to(torch.int16)
        columns = [(fields * 3**k & 255) * 3 // 256 - 1 for k in range(5)]
        return torch.cat(columns, dim=-1)[..., :BLOCK]


def _block_means(x: Tensor) -> Tensor:
    """Return the mean of each block, with the additions in the order of the compiled loop."""
    folded = x * (1 / BLOCK)
    while folded.shape[-1] > 1:
        low, high = folded.chunk(2, -1)
        folded = low + high
    return folded


CODECS: dict[str, type[Codec]] = {"int8": Int8, "int4": Int4, "int2": Int2}
