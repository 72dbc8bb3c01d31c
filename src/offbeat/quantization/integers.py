"""Codecs to integers of 8, 4 or 2 bits with one scale for each block."""

from functools import cache
from math import inf
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.base import Codec, add_piece, pieces
from offbeat.quantization.kernels import BLOCK, SMALLEST_SCALE, kernels_for

_ROUNDING = 1.5 * 2.0**23
"""A float32 of this size has no fraction bits: adding it rounds to nearest even in the low bits."""


class IntegerCodec(Codec):
    """Quantizes each block to integers from −L to L and one float32 scale.

        L = 2^(bits − 1) − 1            127, 7 or 1
        scale = (largest absolute value of the block) / L
        |error| ≤ scale / 2, apart from float32 rounding

    A block with a number that is not finite has the scale NaN, so all of it decodes to NaN. A block
    whose scale is below ``SMALLEST_SCALE`` has the scale 0, and its numbers are the error.

    Payload: the scales of all blocks, then the integers of all blocks, packed in two's complement.
    Byte j of a block of B bytes holds the numbers j, j + B, j + 2·B, …, from the lowest bits up, so
    that packing works on contiguous memory.

    Uses the compiled loops of ``kernels.py`` where they apply and torch operations elsewhere. A
    payload decodes to the same bits with both.
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
            x = part.view(-1, BLOCK)
            scale, packed = self._split(payload, start + piece.start, part.numel())
            inverse, finite = self._set_scale(x.abs().amax(1, keepdim=True), scale)
            if not keep_error:
                # The integers are the lowest bytes of the sums.
                rounding = torch.full((1, BLOCK), _ROUNDING, device=x.device)
                torch.addcmul(rounding, x, inverse, out=x)
                self._pack(x.view(torch.int32).to(torch.int8), packed)
                continue
            rounded = torch.mul(x, inverse).round_()
            x.addcmul_(rounded, scale, value=-1)
            if not finite:
                x.nan_to_num_(0.0, 0.0, 0.0)
                rounded.nan_to_num_(0.0, 0.0, 0.0)  # blocks with scale NaN
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
                blocks = torch.empty(-(-part.numel() // BLOCK) * BLOCK, device=part.device)
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
        """Run a compiled loop on a piece. Return False if none applies to this tensor.

        Args:
            part: The piece.
            payload: The whole payload.
            start: Position of the piece in the payload.
            name: The loop.
            flag: Last argument of the loop: ``keep_error`` of encode, ``add`` of decode.
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

    def _set_scale(self, largest: Tensor, scale: Tensor) -> tuple[Tensor, bool]:
        """scale ← the scales of blocks with these largest absolute values.

        Returns:
            The inverse scales, and True if all scales are known to be finite. A scale below
            ``SMALLEST_SCALE`` becomes 0 and one that is not finite becomes NaN; the inverse of
            both is 0.
        """
        # Not a Python number, by which CUDA would divide with other bits than a CPU.
        levels = torch.full_like(largest, 2 ** (self.bits - 1) - 1)
        torch.div(largest, levels, out=scale)
        inverse = scale.reciprocal()
        usual = finite = False  # on a GPU reading the extremes would block
        if scale.device.type == "cpu":
            low, high = scale.aminmax()
            finite = high.item() < inf  # False if a scale is NaN
            usual = finite and low.item() >= SMALLEST_SCALE
        if not usual:
            tiny = scale < SMALLEST_SCALE
            inverse.masked_fill_(tiny | ~scale.isfinite(), 0.0)
            scale.masked_fill_(tiny, 0.0).add_(scale - scale)  # ∞ becomes NaN
        return inverse, finite

    def _pack(self, integers: Tensor, packed: Tensor) -> None:
        """packed ← the int8 integers, four bytes in one operation. One row for each block.

        Overwrites ``integers``.
        """
        if self.bits == 8:
            packed.copy_(integers)
            return
        words, mask, device = packed.view(torch.int32), 2**self.bits - 1, packed.device
        first, *others = integers.view(torch.int32).chunk(8 // self.bits, dim=1)
        torch.bitwise_and(first, _in_each_byte(mask, device), out=words)
        for i, column in enumerate(others, start=1):
            shift = i * self.bits
            column.bitwise_left_shift_(_int32(shift, device))
            words.bitwise_or_(column.bitwise_and_(_in_each_byte(mask << shift, device)))

    def _decode_blocks(self, payload: Tensor, start: int, values: Tensor) -> None:
        """values ← the numbers of a range of a payload. ``values`` is float32 in whole blocks."""
        scale, packed = self._split(payload, start, values.numel())
        highest = 8 - self.bits
        # The product is exact: a scale is 0 or far from the smallest float32.
        values.view(-1, BLOCK).copy_(self._unpack(packed)).mul_(scale * 2.0**-highest)

    def _unpack(self, packed: Tensor) -> Tensor:
        """Return the integers as int8, times 2^(8 − bits): each in the highest bits of its byte."""
        if self.bits == 8:
            return packed
        words, highest, device = packed.view(torch.int32), 8 - self.bits, packed.device
        mask = _in_each_byte(2**self.bits - 1 << highest, device)
        integers = torch.empty(len(packed), BLOCK, dtype=torch.int8, device=device)
        for i, column in enumerate(integers.view(torch.int32).chunk(8 // self.bits, dim=1)):
            torch.bitwise_left_shift(words, _int32(highest - i * self.bits, device), out=column)
            column.bitwise_and_(mask)
        return integers

    def _split(self, payload: Tensor, start: int, elements: int) -> tuple[Tensor, Tensor]:
        """Return views of a range of a payload: scales (float32) and packed integers (int8).

        Both have one row for each block.
        """
        first, last = start // BLOCK, -(-(start + elements) // BLOCK)
        size, offset = self.block_bytes - 4, payload.numel() // self.block_bytes * 4
        scales = payload[4 * first : 4 * last].view(torch.float32)
        packed = payload[offset + size * first : offset + size * last].view(torch.int8)
        return scales.view(-1, 1), packed.view(-1, size)


@cache
def _int32(value: int, device: torch.device) -> Tensor:
    """Return a constant. With a Python number the operations above take longer."""
    return torch.tensor(value, dtype=torch.int32, device=device)


def _in_each_byte(bits: int, device: torch.device) -> Tensor:
    """Return the int32 with these bits in each of its bytes."""
    return _int32(int.from_bytes(bytes([bits] * 4), "little", signed=True), device)


class Int8(IntegerCodec):
    """1 + 4/512 bytes per number: −127 to 127, times 1/127 of the largest of the block."""

    bits = 8
    block_bytes = BLOCK + 4


class Int4(IntegerCodec):
    """1/2 + 4/512 bytes per number: −7 to 7, times 1/7 of the largest of the block."""

    bits = 4
    block_bytes = BLOCK // 2 + 4


class Int2(IntegerCodec):
    """1/4 + 4/512 bytes per number: −1, 0 or 1, times the largest of the block."""

    bits = 2
    block_bytes = BLOCK // 4 + 4
