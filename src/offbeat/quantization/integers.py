"""Codecs to integers of 8, 4 or 2 bits with one scale for each block."""

from functools import cache
from math import inf
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.base import Codec, add_piece, pieces
from offbeat.quantization.kernels import BLOCK, SMALLEST_SCALE, THRESHOLD, kernels_for

_ROUNDING = 1.5 * 2.0**23
"""Adding this to a small float32 rounds it to an integer, because the sum has no fraction bits.

The lowest bits of the sum are the integer in two's complement.
"""


class IntegerCodec(Codec):
    """Quantizes each block to integers from −L to L and one float32 scale.

        L = 2^(bits − 1) − 1            127, 7 or 1
        scale = (largest absolute value of the block) / L
        |error| ≤ scale / 2, apart from float32 rounding

    With 2 bits, such a scale would send only the numbers above half of the largest one. Instead a
    number becomes ±scale if its absolute value is at least ``THRESHOLD`` times the mean absolute
    value of its block, else 0. The scale is the mean absolute value of the numbers that do not
    become 0, which has the least squared error.

    Two kinds of blocks are exceptions:

    - A block with NaN or infinity gets the scale NaN. It decodes to NaN, and its errors are 0.
    - A block whose scale would be below ``SMALLEST_SCALE`` gets the scale 0. It decodes to zeros,
      and its errors are the numbers themselves.

    A payload contains the scales of all blocks, then the integers of all blocks, packed in two's
    complement. If the integers of a block take B bytes, byte j holds the numbers j, j + B, j + 2·B,
    …, from the lowest bits up. So packing works on contiguous memory.

    The compiled loops of ``kernels.py`` process contiguous float32 tensors on the CPU, if numba is
    installed. Torch operations process all others. Both decode a payload to the same bits.

    Attributes:
        bits: Bits of an integer: 8, 4 or 2.
        block_bytes: Bytes of one block in a payload: a scale of 4 bytes and the packed integers.
    """

    bits: ClassVar[int]
    block_bytes: ClassVar[int]

    @override
    def encode(
        self,
        values: Tensor,
        payload: Tensor,
        plus: Tensor | None = None,
        *,
        start: int = 0,
        keep_error: bool = True,
    ) -> None:
        for piece in pieces(values):
            part = values[piece]
            add_piece(part, plus, piece)
            if self._run_kernel(part, payload, start + piece.start, "encode", keep_error):
                continue
            scale, packed = self._split(payload, start + piece.start, part.numel())
            x = part.view(*scale.shape[:2], BLOCK)
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
    def decode(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        for piece in pieces(values):
            part = values[piece]
            if self._run_kernel(part, payload, start + piece.start, "decode", False):
                continue
            if part.dtype == torch.float32 and part.numel() % BLOCK == 0:
                self._decode_blocks(payload, start + piece.start, part)
            else:
                size = -(-part.numel() // BLOCK) * BLOCK
                blocks = torch.empty(size, dtype=torch.float32, device=part.device)
                self._decode_blocks(payload, start + piece.start, blocks)
                part.copy_(blocks[: part.numel()])

    @override
    def add(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        for piece in pieces(values):
            part = values[piece]
            if not self._run_kernel(part, payload, start + piece.start, "decode", True):
                numbers = torch.empty_like(part)
                self._decode_blocks(payload, start + piece.start, numbers)
                part.add_(numbers)  # the product is rounded before the sum, as in the compiled loop

    def _run_kernel(
        self,
        part: Tensor,
        payload: Tensor,
        start: int,
        name: Literal["encode", "decode"],
        flag: bool,
    ) -> bool:
        """Run the compiled loop ``name`` on a piece. Return False if none applies to this tensor.

        ``flag`` is ``keep_error`` of the encode loop, or ``add`` of the decode loop.
        """
        loops = kernels_for(part)
        if loops is None:
            return False
        raw = payload.numpy()  # slicing an array costs less than slicing a tensor
        first, last = start // BLOCK, -(-(start + part.numel()) // BLOCK)
        size = self.block_bytes - 4
        offset = raw.size // self.block_bytes * 4
        scales = raw[4 * first : 4 * last].view(np.float32)
        packed = raw[offset + size * first : offset + size * last]
        loop = loops.encode if name == "encode" else loops.decode
        loop(part.numpy(), scales, packed, self.bits, flag)
        return True

    def _encode_ternary(self, x: Tensor, scale: Tensor, packed: Tensor, keep_error: bool) -> None:
        """Encode blocks ``x`` to −1, 0 and 1, and set their scales."""
        absolute = x.abs()
        threshold = _block_means(absolute).mul_(THRESHOLD)
        chosen = absolute >= threshold
        mean = _block_means(absolute * chosen)
        mean.div_(chosen.sum(-1, keepdim=True, dtype=torch.float32).div_(BLOCK))
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
        words, mask, device = packed.view(torch.int32), 2**self.bits - 1, packed.device
        first, *others = integers.view(torch.int32).chunk(8 // self.bits, dim=-1)
        torch.bitwise_and(first, _in_each_byte(mask, device), out=words)
        for i, column in enumerate(others, start=1):
            shift = i * self.bits
            column.bitwise_left_shift_(_int32(shift, device))
            words.bitwise_or_(column.bitwise_and_(_in_each_byte(mask << shift, device)))

    def _decode_blocks(self, payload: Tensor, start: int, values: Tensor) -> None:
        """Decode into ``values``, which is float32 and has whole blocks."""
        scale, packed = self._split(payload, start, values.numel())
        # ``unit`` removes the factor of ``_unpack``. ``scale * unit`` is exact: ``unit`` is a power
        # of two, and a scale is never so small that the product loses bits (SMALLEST_SCALE).
        unit = 2.0 ** (self.bits - 8)
        blocks = values.view(*scale.shape[:2], BLOCK)
        blocks.copy_(self._unpack(packed)).mul_(scale * unit)

    def _unpack(self, packed: Tensor) -> Tensor:
        """Return the integers times 2^(8 − bits): as int8, each in the highest bits of its byte."""
        if self.bits == 8:
            return packed
        words, highest, device = packed.view(torch.int32), 8 - self.bits, packed.device
        mask = _in_each_byte(2**self.bits - 1 << highest, device)
        integers = torch.empty(*packed.shape[:2], BLOCK, dtype=torch.int8, device=device)
        for i, column in enumerate(integers.view(torch.int32).chunk(8 // self.bits, dim=-1)):
            torch.bitwise_left_shift(words, _int32(highest - i * self.bits, device), out=column)
            column.bitwise_and_(mask)
        return integers

    def _split(self, payload: Tensor, start: int, elements: int) -> tuple[Tensor, Tensor]:
        """Return views of the scales (float32) and packed integers (int8): payload × block × …."""
        rows = payload if payload.dim() == 2 else payload[None]
        first, last = start // BLOCK, -(-(start + elements // len(rows)) // BLOCK)
        size, offset = self.block_bytes - 4, rows.shape[1] // self.block_bytes * 4
        scales = rows[:, 4 * first : 4 * last].view(torch.float32)
        packed = rows[:, offset + size * first : offset + size * last].view(torch.int8)
        return scales[..., None], packed.view(len(rows), -1, size)


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
    block_bytes = BLOCK // 4 + 4
