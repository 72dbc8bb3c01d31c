"""Codecs to integers of 8, 4 or 2 bits with one scale for each block."""

from dataclasses import dataclass
from math import inf
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.base import PIECE_BLOCKS, Codec, add_piece, pieces
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

    def __init__(self) -> None:
        self._scratch_by_blocks: dict[int, _Scratch] = {}
        self._constants_by_device: dict[torch.device, _Constants] = {}

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
            x, scratch = part.view(-1, BLOCK), self._scratch(part)
            scale, packed = self._split(payload, start + piece.start, part.numel())
            torch.abs(x, out=scratch.numbers)
            inverse, finite = self._set_scale(scratch.numbers.amax(1, keepdim=True), scale)
            if not keep_error:
                # The integers are the lowest bytes of the sums.
                torch.addcmul(self._constants(x).rounding, x, inverse, out=x)
                self._pack(x.view(torch.int32), packed, scratch)
                continue
            torch.mul(x, inverse, out=scratch.numbers).round_()
            x.addcmul_(scratch.numbers, scale, value=-1)
            if not finite:
                x.nan_to_num_(0.0, 0.0, 0.0)
                scratch.numbers.nan_to_num_(0.0, 0.0, 0.0)  # blocks with scale NaN
            self._pack(scratch.numbers, packed, scratch)

    @override
    def decode(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        for piece in pieces(values):
            part = values[piece]
            if self._run_kernel(part, payload, start + piece.start, "decode", False):
                continue
            scratch = self._scratch(part)
            scale, packed = self._split(payload, start + piece.start, part.numel())
            in_place = part.dtype == torch.float32 and part.numel() % BLOCK == 0
            x = part.view(-1, BLOCK) if in_place else scratch.numbers
            x.copy_(self._unpack(packed, scratch)).mul_(self._unit(scale))
            if not in_place:
                part.copy_(x.view(-1)[: part.numel()])

    @override
    def add(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        for piece in pieces(values):
            part = values[piece]
            if self._run_kernel(part, payload, start + piece.start, "decode", True):
                continue
            scratch = self._scratch(part)
            scale, packed = self._split(payload, start + piece.start, part.numel())
            scratch.numbers.copy_(self._unpack(packed, scratch)).mul_(self._unit(scale))
            # The product is rounded before the sum, as in the compiled loop.
            part.view(-1, BLOCK).add_(scratch.numbers)

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
        torch.div(largest, self._constants(scale).levels, out=scale)
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

    def _pack(self, numbers: Tensor, packed: Tensor, scratch: "_Scratch") -> None:
        """packed ← the integers, four bytes in one operation.

        Args:
            numbers: Integers as float32, or as int32 whose lowest byte counts.
            packed: int8, one row for each block.
            scratch: Memory for the work.
        """
        scratch.integers.copy_(numbers)
        words, constants = packed.view(torch.int32), self._constants(packed)
        first, *others = scratch.words
        torch.bitwise_and(first, constants.fields[0], out=words)
        for i, part in enumerate(others, start=1):
            part.bitwise_left_shift_(constants.shifts[i]).bitwise_and_(constants.fields[i])
            words.bitwise_or_(part)

    def _unpack(self, packed: Tensor, scratch: "_Scratch") -> Tensor:
        """Return the integers times 2^(8 − bits): each is in the highest bits of its byte."""
        words, constants = packed.view(torch.int32), self._constants(packed)
        highest = constants.fields[-1]
        *others, last = scratch.words
        for part, shift in zip(others, reversed(constants.shifts), strict=False):
            torch.bitwise_left_shift(words, shift, out=part)
            part.bitwise_and_(highest)
        torch.bitwise_and(words, highest, out=last)
        return scratch.integers

    def _unit(self, scale: Tensor) -> Tensor:
        """Return the factor from ``_unpack``'s integers to numbers.

        It is exact: a scale is 0 or large enough for the division by a power of two.
        """
        return scale * self._constants(scale).unit

    def _constants(self, like: Tensor) -> "_Constants":
        constants = self._constants_by_device.get(like.device)
        if constants is None:
            constants = _Constants.create(self.bits, like.device)
            self._constants_by_device[like.device] = constants
        return constants

    def _scratch(self, part: Tensor) -> "_Scratch":
        """Return scratch memory for a piece: on a CPU always the same memory."""
        blocks = -(-part.numel() // BLOCK)
        if part.device.type != "cpu":
            return _Scratch.allocate(blocks, 8 // self.bits, part.device)
        if blocks not in self._scratch_by_blocks:
            largest = self._scratch_by_blocks.get(PIECE_BLOCKS)
            if largest is None:
                largest = _Scratch.allocate(PIECE_BLOCKS, 8 // self.bits, part.device)
                self._scratch_by_blocks[PIECE_BLOCKS] = largest
            self._scratch_by_blocks[blocks] = largest.first(blocks)
        return self._scratch_by_blocks[blocks]

    def _split(self, payload: Tensor, start: int, elements: int) -> tuple[Tensor, Tensor]:
        """Return views of a range of a payload: scales (float32) and packed integers (int8).

        Both have one row for each block.
        """
        first, last = start // BLOCK, -(-(start + elements) // BLOCK)
        size, offset = self.block_bytes - 4, payload.numel() // self.block_bytes * 4
        scales = payload[4 * first : 4 * last].view(torch.float32)
        packed = payload[offset + size * first : offset + size * last].view(torch.int8)
        return scales.view(-1, 1), packed.view(-1, size)


@dataclass(frozen=True)
class _Scratch:
    """Scratch memory for one piece.

    Attributes:
        numbers: float32, one row for each block.
        integers: int8, one row for each block.
        words: The memory of ``integers`` as int32, divided into the columns that share a byte.
    """

    numbers: Tensor
    integers: Tensor
    words: tuple[Tensor, ...]

    @classmethod
    def allocate(cls, blocks: int, numbers_per_byte: int, device: torch.device) -> "_Scratch":
        integers = torch.empty(blocks, BLOCK, dtype=torch.int8, device=device)
        return cls(
            torch.empty(blocks, BLOCK, device=device),
            integers,
            integers.view(torch.int32).chunk(numbers_per_byte, dim=1),
        )

    def first(self, blocks: int) -> "_Scratch":
        """Return the memory of the first blocks."""
        words = tuple(part[:blocks] for part in self.words)
        return _Scratch(self.numbers[:blocks], self.integers[:blocks], words)


@dataclass(frozen=True)
class _Constants:
    """Constants as tensors on one device.

    With a Python number an operation on a piece of bytes takes longer to call than to run.

    Attributes:
        levels: L.
        unit: 2^(bits − 8).
        rounding: A row of ``_ROUNDING``.
        shifts: int32; shift in bits of each number that shares a byte.
        fields: int32; mask of each number that shares a byte, in all four bytes.
    """

    levels: Tensor
    unit: Tensor
    rounding: Tensor
    shifts: tuple[Tensor, ...]
    fields: tuple[Tensor, ...]

    @classmethod
    def create(cls, bits: int, device: torch.device) -> "_Constants":
        shifts = range(0, 8, bits)
        fields = [_in_each_byte(2**bits - 1 << shift) for shift in shifts]
        return cls(
            torch.tensor(2.0 ** (bits - 1) - 1, device=device),
            torch.tensor(2.0 ** (bits - 8), device=device),
            torch.full((1, BLOCK), _ROUNDING, device=device),
            tuple(torch.tensor(shift, dtype=torch.int32, device=device) for shift in shifts),
            tuple(torch.tensor(field, dtype=torch.int32, device=device) for field in fields),
        )


def _in_each_byte(bits: int) -> int:
    """Return the int32 with these bits in each of its bytes."""
    return int.from_bytes(bytes([bits] * 4), "little", signed=True)


class Int8(IntegerCodec):
    """1 + 4/512 bytes per number: −127 to 127, times 1/127 of the largest of the block."""

    bits = 8
    block_bytes = BLOCK + 4

    @override
    def _pack(self, numbers: Tensor, packed: Tensor, scratch: _Scratch) -> None:
        packed.copy_(numbers)

    @override
    def _unpack(self, packed: Tensor, scratch: _Scratch) -> Tensor:
        return packed

    @override
    def _unit(self, scale: Tensor) -> Tensor:
        return scale


class Int4(IntegerCodec):
    """1/2 + 4/512 bytes per number: −7 to 7, times 1/7 of the largest of the block."""

    bits = 4
    block_bytes = BLOCK // 2 + 4


class Int2(IntegerCodec):
    """1/4 + 4/512 bytes per number: −1, 0 or 1, times the largest of the block."""

    bits = 2
    block_bytes = BLOCK // 4 + 4
