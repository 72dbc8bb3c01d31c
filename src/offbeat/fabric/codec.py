"""Fewer bytes for the same numbers: what each codec rounds to, and how a payload is laid out.

Numbers travel in blocks of ``BLOCK``. All work is done in float32, on the device of the tensors, a
piece that fits into the processor's cache at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import inf
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

BLOCK = 512
"""Numbers a block; integers of a block share one scale."""
SMALLEST = 2.0**-100
"""A smaller scale counts as zero: its inverse would overflow."""
_PIECE_BLOCKS = 512  # 1 MiB of float32, and as much scratch


class Codec(ABC):
    """A rounding of float32 numbers and its bytes."""

    block_bytes: ClassVar[int]
    """Bytes of the payload of one block."""

    @abstractmethod
    def encode(self, values: Tensor, payload: Tensor, plus: Tensor | None = None) -> None:
        """payload ← values + plus, rounded; values ← what the rounding took away.

        Where a value is not finite, what is left is 0.

        Args:
            values: float32, 1-D, a multiple of ``BLOCK`` long.
            payload: uint8, 1-D, ``block_bytes`` for each block.
            plus: Floating point, 1-D; missing numbers are 0, more than ``values`` has are ignored.
        """

    @abstractmethod
    def decode(self, payload: Tensor, values: Tensor) -> None:
        """Values ← payload; ``values`` may end inside the last block, and be of any float type."""

    @abstractmethod
    def add(self, payload: Tensor, values: Tensor) -> None:
        """Values ← values + payload; ``values`` as for ``encode``."""


class BFloat16(Codec):
    """Each number with 8 significant bits, rounded to nearest even. Not finite ones stay so."""

    block_bytes = 2 * BLOCK

    @override
    def encode(self, values: Tensor, payload: Tensor, plus: Tensor | None = None) -> None:
        rounded = payload.view(torch.bfloat16)
        for piece in _pieces(values):
            part = values[piece]
            _add(part, plus, piece)
            rounded[piece].copy_(part)
            part.sub_(rounded[piece]).nan_to_num_(0.0, 0.0, 0.0)

    @override
    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.copy_(payload.view(torch.bfloat16)[: values.numel()])

    @override
    def add(self, payload: Tensor, values: Tensor) -> None:
        values.add_(payload.view(torch.bfloat16))


class Integers(Codec):
    """Blocks of integers from −L to L times one float32, the block's largest / L.

        L = 2^(bits − 1) − 1            127, 7 or 1
        |error| ≤ largest / (2·L), but for float32 rounding

    A block with a number that is not finite decodes to NaN throughout. Payload: all scales, then
    the integers.
    """

    bits: ClassVar[int]
    block_bytes: ClassVar[int]

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None
        self._most = 2 ** (self.bits - 1) - 1

    @override
    def encode(self, values: Tensor, payload: Tensor, plus: Tensor | None = None) -> None:
        scales, packed = self._split(payload)
        for piece in _pieces(values):
            part = values[piece]
            _add(part, plus, piece)
            x, blocks = part.view(-1, BLOCK), _blocks(piece)
            scratch, integers = self._scratch(x)
            scale = torch.abs(x, out=scratch).amax(1).div_(self._most)
            inverse = scale.reciprocal()
            # Asking a GPU would wait for it.
            plain = x.device.type == "cpu" and bool((scale >= SMALLEST).all() & (scale < inf).all())
            if not plain:
                inverse.masked_fill_((scale < SMALLEST) | ~scale.isfinite(), 0.0)
                scale.masked_fill_(scale < SMALLEST, 0.0).add_(scale - scale)  # ∞ becomes NaN
            torch.mul(x, inverse[:, None], out=scratch).round_()
            scales[blocks].copy_(scale)
            x.addcmul_(scratch, scale[:, None], value=-1)
            if not plain:
                x.nan_to_num_(0.0, 0.0, 0.0)
                scratch.nan_to_num_(0.0, 0.0, 0.0)  # where the scale is NaN
            self._pack(scratch, integers, packed[blocks])

    @override
    def decode(self, payload: Tensor, values: Tensor) -> None:
        scales, packed = self._split(payload)
        for piece in _pieces(values):
            part, blocks = values[piece], _blocks(piece)
            x = self._unpack(packed[blocks], *self._scratch(packed[blocks]))
            if part.numel() == x.numel():
                torch.mul(x, scales[blocks, None], out=part.view(-1, BLOCK))
            else:
                part.copy_(x.mul_(scales[blocks, None]).view(-1)[: part.numel()])

    @override
    def add(self, payload: Tensor, values: Tensor) -> None:
        scales, packed = self._split(payload)
        for piece in _pieces(values):
            blocks = _blocks(piece)
            x = self._unpack(packed[blocks], *self._scratch(packed[blocks]))
            values[piece].view(-1, BLOCK).addcmul_(x, scales[blocks, None])

    def _pack(self, rounded: Tensor, integers: Tensor, packed: Tensor) -> None:
        """Packed ← the integers in ``rounded``, which is scratch memory, too.

        Less than 8 bits: byte j of a block holds its numbers j, j + B, j + 2·B, … plus L, where a
        block has B bytes, from the lowest bits up; so all work is on contiguous memory.
        """
        integers.copy_(rounded.add_(self._most))
        first, *others = integers.chunk(8 // self.bits, dim=1)
        packed.copy_(first)
        for number, part in enumerate(others, start=1):
            packed.bitwise_or_(part.bitwise_left_shift_(self.bits * number))

    def _unpack(self, packed: Tensor, scratch: Tensor, integers: Tensor) -> Tensor:
        """The integers as float32, in ``scratch``."""
        parts = integers.chunk(8 // self.bits, dim=1)
        for number, part in enumerate(parts):
            torch.bitwise_right_shift(packed, self.bits * number, out=part)
            if part is not parts[-1]:
                part.bitwise_and_(2**self.bits - 1)
        return scratch.copy_(integers).sub_(self._most)

    def _scratch(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """float32 and bytes for the blocks of ``like``; on a CPU the same memory every time."""
        count, device = like.shape[0], like.device
        if device.type != "cpu":
            scratch = torch.empty(count, BLOCK, device=device)
            return scratch, torch.empty(count, BLOCK, dtype=torch.uint8, device=device)
        if self._kept is None:
            scratch = torch.empty(_PIECE_BLOCKS, BLOCK)
            self._kept = scratch, torch.empty(_PIECE_BLOCKS, BLOCK, dtype=torch.uint8)
        return self._kept[0][:count], self._kept[1][:count]

    def _split(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a payload: its scales, and its integers by blocks."""
        blocks = payload.numel() // self.block_bytes
        scales = payload[: 4 * blocks].view(torch.float32)
        return scales, payload[4 * blocks :].view(blocks, self.block_bytes - 4)


class Int8(Integers):
    """1 + 4/512 bytes a number."""

    bits = 8
    block_bytes = BLOCK + 4

    @override
    def _pack(self, rounded: Tensor, integers: Tensor, packed: Tensor) -> None:
        packed.view(torch.int8).copy_(rounded)

    @override
    def _unpack(self, packed: Tensor, scratch: Tensor, integers: Tensor) -> Tensor:
        return scratch.copy_(packed.view(torch.int8))


class Int4(Integers):
    """1/2 + 4/512 bytes a number: −7 to 7 times a seventh of the block's largest."""

    bits = 4
    block_bytes = BLOCK // 2 + 4


class Int2(Integers):
    """1/4 + 4/512 bytes a number: −1, 0 or 1 times the block's largest."""

    bits = 2
    block_bytes = BLOCK // 4 + 4


CODECS: dict[str, type[Codec]] = {"bfloat16": BFloat16, "int8": Int8, "int4": Int4, "int2": Int2}


def _pieces(values: Tensor) -> Iterator[slice]:
    """Slices of ``values`` that begin with a block; on a GPU a single one."""
    step = _PIECE_BLOCKS * BLOCK if values.device.type == "cpu" else max(values.numel(), 1)
    for start in range(0, values.numel(), step):
        yield slice(start, min(start + step, values.numel()))


def _blocks(piece: slice) -> slice:
    """The blocks that hold a piece of the numbers."""
    return slice(piece.start // BLOCK, -(-piece.stop // BLOCK))


def _add(part: Tensor, plus: Tensor | None, piece: slice) -> None:
    """Part ← part + plus[piece], as far as ``plus`` goes."""
    if plus is not None and piece.start < plus.numel():
        more = plus[piece]
        part[: more.numel()].add_(more)
