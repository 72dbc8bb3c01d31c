"""Codecs to integers of 8, 4 or 2 bits with one scale for each block."""

from functools import cache
from math import inf
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.base import Codec, pieces
from offbeat.quantization.kernels import BLOCK, SMALLEST_SCALE, TERNARY, THRESHOLD, kernels_for

_ROUNDING = 1.5 * 2.0**23
"""Adding this to a small float32 rounds it to an integer, because the sum has no fraction bits.

The lowest bits of the sum are the integer in two's complement.
"""


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
    """

    bits: ClassVar[int]
    block_bytes: ClassVar[int]

    @override
    def encode(self, values: Tensor, rows: Tensor, *, keep_error: bool = True) -> None:
        loops = kernels_for(values)
        if loops is not None:
            loops.encode(values.numpy(), rows.numpy(), self.bits, keep_error)
            return
        for some_rows, numbers in pieces(rows):
            scale, packed = self._split(rows[some_rows])
            x = values[numbers].view(-1, BLOCK)
            if self.bits == 2:
                self._encode_ternary(x, scale, packed, keep_error)
                continue
            inverse, finite = self._set_scale(x.abs().amax(-1, keepdim=True), scale)
            if not keep_error:
                # int8 takes the lowest byte of each sum, which is the integer.
                rounding = x.new_full((BLOCK,), _ROUNDING)
                torch.addcmul(rounding, x, inverse, out=x)
                self._pack(x.view(torch.int32).to(torch.int8), packed)
                continue
            rounded = torch.mul(x, inverse).round_()
            x.addcmul_(rounded, scale, value=-1)
            if not finite:
                x.nan_to_num_(0.0, 0.0, 0.0)
                rounded.nan_to_num_(0.0, 0.0, 0.0)  # blocks whose scale is NaN
            self._pack(rounded.to(torch.int8), packed)

    @override
    def decode(self, rows: Tensor, values: Tensor, *, add: bool = False) -> None:
        loops = kernels_for(values)
        if loops is not None:
            loops.decode(values.numpy(), rows.numpy(), self.bits, add)
            return
        # ``unit`` removes the factor of ``_unpack``. ``scale * unit`` is exact: ``unit`` is a power
        # of two, and a scale is never so small that the product loses bits (SMALLEST_SCALE).
        unit = 1.0 if self.bits == 2 else 2.0 ** (self.bits - 8)
        for some_rows, numbers in pieces(rows):
            part, (scale, packed) = values[numbers], self._split(rows[some_rows])
            out = part
            if add or part.numel() % BLOCK:
                out = part.new_empty(len(scale) * BLOCK)
            out.view(-1, BLOCK).copy_(self._unpack(packed)).mul_(scale * unit)
            if add:  # the product is rounded before the sum, as in the compiled loop
                part.add_(out[: part.numel()])
            elif out is not part:
                part.copy_(out[: part.numel()])

    def _encode_ternary(self, x: Tensor, scale: Tensor, packed: Tensor, keep_error: bool) -> None:
        """Encode blocks ``x`` to −1, 0 and 1, and set their scales."""
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
        self._pack(integers, packed)

    def _set_scale(self, largest: Tensor, scale: Tensor) -> tuple[Tensor, bool]:
        """scale ← the scale of each block, given the largest absolute value of each block.

        Returns:
            The inverse scales (0 for the scales 0 and NaN), and True if all scales are known to be
            finite.
        """
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
        return inverse, finite

    def _pack(self, integers: Tensor, packed: Tensor) -> None:
        """Pack int8 integers into ``packed``. Overwrites ``integers``.

        The last dimension holds the numbers of a block. The int32 operations process four bytes at
        a time.
        """
        if self.bits == 8:
            packed.copy_(integers)
            return
        if self.bits == 2:
            digits = torch.zeros_like(packed, dtype=torch.int16)
            for k, column in enumerate((integers + 1).split(TERNARY, dim=-1)):
                digits[..., : column.shape[-1]] += column.to(torch.int16) * 3 ** (4 - k)
            # (13·d + 242) // 243 without a division, exact for d < 3⁵.
            packed.view(torch.uint8).copy_(
                digits + (digits * 13 + 242).to(torch.int32) * 135 // 2**15
            )
            return
        words, mask, device = packed.view(torch.int32), 2**self.bits - 1, packed.device
        first, *others = integers.view(torch.int32).chunk(8 // self.bits, dim=-1)
        torch.bitwise_and(first, _in_each_byte(mask, device), out=words)
        for i, column in enumerate(others, start=1):
            shift = i * self.bits
            column.bitwise_left_shift_(_int32(shift, device))
            words.bitwise_or_(column.bitwise_and_(_in_each_byte(mask << shift, device)))

    def _unpack(self, packed: Tensor) -> Tensor:
        """Return the integers. Those of 4 bits are in the highest bits of their bytes, times 16."""
        if self.bits == 8:
            return packed
        if self.bits == 2:
            fields = packed.view(torch.uint8).to(torch.int16)
            columns = [(fields * 3**k & 255) * 3 // 256 - 1 for k in range(5)]
            return torch.cat(columns, dim=-1)[..., :BLOCK]
        words, highest, device = packed.view(torch.int32), 8 - self.bits, packed.device
        mask = _in_each_byte(2**self.bits - 1 << highest, device)
        integers = torch.empty(len(packed), BLOCK, dtype=torch.int8, device=device)
        for i, column in enumerate(integers.view(torch.int32).chunk(8 // self.bits, dim=-1)):
            torch.bitwise_left_shift(words, _int32(highest - i * self.bits, device), out=column)
            column.bitwise_and_(mask)
        return integers

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


@cache
def _int32(value: int, device: torch.device) -> Tensor:
    """Return a constant tensor, which is faster in operations than a Python number."""
    return torch.tensor(value, dtype=torch.int32, device=device)


def _in_each_byte(bits: int, device: torch.device) -> Tensor:
    """Return the int32 with these bits in each of its bytes."""
    return _int32(int.from_bytes(bytes([bits] * 4), "little", signed=True), device)


class Int8(IntegerCodec):
    """Integers from −127 to 127."""

    bits = 8
    block_bytes = BLOCK + 4


class Int4(IntegerCodec):
    """Integers from −7 to 7."""

    bits = 4
    block_bytes = BLOCK // 2 + 4


class Int2(IntegerCodec):
    """The integers −1, 0 and 1."""

    bits = 2
    block_bytes = TERNARY + 4
