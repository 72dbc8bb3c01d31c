"""Codecs to integers of 8, 4 or 2 bits with one scale for each block."""

from abc import abstractmethod
from math import inf
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.base import Codec, pieces
from offbeat.quantization.kernels import BLOCK, SMALLEST_SCALE, TERNARY, THRESHOLD, kernels_for


class IntegerCodec(Codec):
    """Quantizes each block to integers from −L to L and one float32 scale.

        L = 2^(bits − 1) − 1            127, 7 or 1
        scale = (largest absolute value of the block) / L
        |error| ≤ scale / 2, plus float32 rounding errors

    With 2 bits most numbers would become 0, and the result would have less than a third of the
    squared norm of the block. So the threshold and the scale differ with 2 bits. A number becomes
    ±scale if its absolute value is at least ``THRESHOLD`` times the mean absolute value of its
    block, else 0. The scale is the mean absolute value of the numbers that do not
    become 0, which has the least squared error.

    Two kinds of blocks are exceptions:

    - A block with NaN or infinity gets the scale NaN. It decodes to NaN, and its errors are 0.
    - A block whose scale would be below ``SMALLEST_SCALE`` gets the scale 0. It decodes to zeros,
      and its errors are the numbers themselves.

    A row contains the scale and then the integers. If the integers take B bytes, byte j of them
    holds the numbers j, j + B, j + 2·B, …, so packing works on contiguous memory. With 8 and 4 bits
    they are packed in two's complement, from the lowest bits up.

    With 2 bits a byte holds five integers, increased by 1, as the digits of a number d < 3⁵, the
    highest digit first. The byte is f = d·256/243, rounded up. So f/256 is the fraction 0.d₀d₁d₂…
    in base 3, and digit k is ⌊3·(3ᵏ·f mod 256)/256⌋, which needs no division.

    The compiled loops of ``kernels.py`` process contiguous float32 tensors on the CPU, if numba is
    installed. Torch operations process all others. Both decode a row to the same bits.

    Attributes:
        bits: Bits of an integer: 8, 4, or 2 for −1, 0 and 1.
        block_bytes: Bytes of a row: a scale of 4 bytes and the packed integers.
        unit: Factor of the numbers that ``_unpack`` returns.
    """

    bits: ClassVar[int]
    block_bytes: ClassVar[int]
    unit: ClassVar[float] = 1.0

    @override
    def encode(self, values: Tensor, rows: Tensor, *, keep_error: bool = True) -> None:
        loops = kernels_for(values)
        if loops is not None:
            loops.encode(values.numpy(), rows.numpy(), self.bits, keep_error)
            return
        for some_rows, numbers in pieces(rows):
            scale, packed = self._split(rows[some_rows])
            x = values[numbers].view(-1, BLOCK)
            self._pack(self._quantize(x, scale, keep_error), packed)

    @override
    def decode(self, rows: Tensor, values: Tensor, *, add: bool = False) -> None:
        loops = kernels_for(values)
        if loops is not None:
            loops.decode(values.numpy(), rows.numpy(), self.bits, add)
            return
        for some_rows, numbers in pieces(rows):
            part, (scale, packed) = values[numbers], self._split(rows[some_rows])
            out = part
            if add or part.numel() % BLOCK:
                out = part.new_empty(len(scale) * BLOCK)
            # ``scale * unit`` is exact: ``unit`` is a power of two, and a scale is never so small
            # that the product loses bits (SMALLEST_SCALE).
            out.view(-1, BLOCK).copy_(self._unpack(packed)).mul_(scale * self.unit)
            if add:  # the product is rounded before the sum, as in the compiled loop
                part.add_(out[: part.numel()])
            elif out is not part:
                part.copy_(out[: part.numel()])

    def _quantize(self, x: Tensor, scale: Tensor, keep_error: bool) -> Tensor:
        """Return blocks ``x`` as int8 integers, and set their scales. ``x`` ← the errors."""
        largest = x.abs().amax(-1, keepdim=True)
        # A tensor, because CUDA divides by a Python number less exactly than a CPU does.
        levels = torch.full_like(largest, 2 ** (self.bits - 1) - 1)
        torch.div(largest, levels, out=scale)
        inverse = scale.reciprocal()
        usual = finite = False  # unknown on a GPU, where reading the extremes would block
        if scale.device.type == "cpu":
            low, high = scale.aminmax()
            finite = high.item() < inf  # False if a scale is NaN
            usual = finite and low.item() >= SMALLEST_SCALE
        if not usual:
            inverse.masked_fill_((scale < SMALLEST_SCALE) | ~scale.isfinite(), 0.0)
            _mark_exceptions(scale)
        rounded = torch.mul(x, inverse).round_()
        if not finite:
            rounded.nan_to_num_(0.0, 0.0, 0.0)
        if keep_error:
            x.addcmul_(rounded, scale, value=-1)
            if not finite:
                x.nan_to_num_(0.0, 0.0, 0.0)  # blocks whose scale is NaN
        return rounded.to(torch.int8)

    @abstractmethod
    def _pack(self, integers: Tensor, packed: Tensor) -> None:
        """Pack int8 integers, one row per block, into ``packed``. Overwrites ``integers``."""

    @abstractmethod
    def _unpack(self, packed: Tensor) -> Tensor:
        """Return the integers divided by ``unit``, one row per block."""

    @staticmethod
    def _split(rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the scales (float32, one column) and of the packed integers (int8)."""
        return rows[:, :4].view(torch.float32), rows[:, 4:].view(torch.int8)


def _mark_exceptions(scale: Tensor) -> None:
    """Replace scales that are too small by 0, and infinity by NaN."""
    scale.masked_fill_(scale < SMALLEST_SCALE, 0.0).add_(scale - scale)  # ∞ − ∞ = NaN


def _block_means(x: Tensor) -> Tensor:
    """Return the mean of each block, with the additions in the order of the compiled loop."""
    folded = x * (1 / BLOCK)
    while folded.shape[-1] > 1:
        low, high = folded.chunk(2, -1)
        folded = low + high
    return folded


class Int8(IntegerCodec):
    """Integers from −127 to 127."""

    bits = 8
    block_bytes = BLOCK + 4

    @override
    def _pack(self, integers: Tensor, packed: Tensor) -> None:
        packed.copy_(integers)

    @override
    def _unpack(self, packed: Tensor) -> Tensor:
        return packed


class Int4(IntegerCodec):
    """Integers from −7 to 7."""

    bits = 4
    block_bytes = BLOCK // 2 + 4
    unit = 1 / 16  # integers are unpacked to the highest bits of a byte, which gives them a sign

    @override
    def _pack(self, integers: Tensor, packed: Tensor) -> None:
        low, high = integers.chunk(2, dim=-1)
        torch.mul(high, 16, out=packed).add_(low.bitwise_and_(15))

    @override
    def _unpack(self, packed: Tensor) -> Tensor:
        return torch.cat([packed << 4, packed & -16], dim=-1)


class Int2(IntegerCodec):
    """The integers −1, 0 and 1."""

    bits = 2
    block_bytes = TERNARY + 4

    @override
    def _quantize(self, x: Tensor, scale: Tensor, keep_error: bool) -> Tensor:
        absolute = x.abs()
        threshold = _block_means(absolute).mul_(THRESHOLD)
        chosen = absolute >= threshold
        mean = _block_means(absolute * chosen)
        mean.div_(chosen.sum(-1, keepdim=True, dtype=torch.float32).div_(BLOCK))
        # 0/0 if the means of the tiniest numbers were rounded up. Other rounding must not make the
        # scale larger than all numbers.
        mean.nan_to_num_(0.0, posinf=inf)
        torch.minimum(mean, absolute.amax(-1, keepdim=True), out=scale)
        _mark_exceptions(scale)
        integers = x.sign().to(torch.int8).mul_(chosen)
        integers.masked_fill_((scale == 0) | scale.isnan(), 0)
        if keep_error:
            x.addcmul_(integers.to(torch.float32), scale, value=-1)
            x.nan_to_num_(0.0, 0.0, 0.0)
        return integers

    @override
    def _pack(self, integers: Tensor, packed: Tensor) -> None:
        digits = torch.zeros_like(packed, dtype=torch.int16)
        for k, column in enumerate((integers + 1).split(TERNARY, dim=-1)):
            digits[..., : column.shape[-1]] += column.to(torch.int16) * 3 ** (4 - k)
        # (13·d + 242) // 243 without a division, exact for d < 3⁵.
        packed.view(torch.uint8).copy_(digits + (digits * 13 + 242).to(torch.int32) * 135 // 2**15)

    @override
    def _unpack(self, packed: Tensor) -> Tensor:
        fields = packed.view(torch.uint8).to(torch.int16)
        columns = [(fields * 3**k & 255) * 3 // 256 - 1 for k in range(5)]
        return torch.cat(columns, dim=-1)[..., :BLOCK]
