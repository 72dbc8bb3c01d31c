"""Fewer bytes for the same numbers: what each codec rounds to, and how a payload is laid out.

Numbers travel in blocks of ``BLOCK``. All work is done in float32, on the device of the tensors, a
piece that fits into the processor's cache at a time.
The file is long because a block's layout and the loops of torch and of numba over it go together.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.kernels import BLOCK, SMALLEST, Kernels, kernels

_PIECE_BLOCKS = 256  # half a MiB of float32, and as much scratch
_ROUNDING = 1.5 * 2.0**23
"""A float32 of this size has no fraction: adding it rounds to nearest even, in the low bits."""


class Codec(ABC):
    """A rounding of float32 numbers and its bytes.

    ``start`` is the first of a payload's numbers that is meant, a multiple of ``BLOCK``.
    """

    block_bytes: ClassVar[int]
    """Bytes of the payload of one block."""

    @abstractmethod
    def encode(
        self, values: Tensor, payload: Tensor, plus: Tensor | None = None, *, start: int = 0
    ) -> None:
        """payload ← values + plus, rounded; values ← what the rounding took away.

        Where a value is not finite, what is left is 0.

        Args:
            values: float32, 1-D, a multiple of ``BLOCK`` long.
            payload: uint8, 1-D, ``block_bytes`` for each block.
            plus: Floating point, 1-D; missing numbers are 0, more than ``values`` has are ignored.
            start: Where in the payload.
        """

    @abstractmethod
    def round(self, values: Tensor, payload: Tensor, *, start: int = 0) -> None:
        """As ``encode``, for who keeps the error elsewhere; ``values`` are of no use afterwards."""

    @abstractmethod
    def decode(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        """Values ← payload; ``values`` may end inside the last block, and be of any float type."""

    @abstractmethod
    def add(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        """Values ← values + payload; ``values`` as for ``encode``."""


class BFloat16(Codec):
    """Each number with 8 significant bits, rounded to nearest even. Not finite ones stay so."""

    block_bytes = 2 * BLOCK

    @override
    def encode(
        self, values: Tensor, payload: Tensor, plus: Tensor | None = None, *, start: int = 0
    ) -> None:
        rounded = payload.view(torch.bfloat16)[start:]
        for piece in pieces(values):
            part, to = values[piece], rounded[piece]
            _add(part, plus, piece)
            to.copy_(part)
            part.sub_(to)
            # Asking a GPU would wait for it. Of numbers that are finite the sum may be infinite.
            if part.device.type != "cpu" or not isfinite(part.sum().item()):
                part.nan_to_num_(0.0, 0.0, 0.0)

    @override
    def round(self, values: Tensor, payload: Tensor, *, start: int = 0) -> None:
        payload.view(torch.bfloat16)[start : start + values.numel()].copy_(values)

    @override
    def decode(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        values.copy_(payload.view(torch.bfloat16)[start : start + values.numel()])

    @override
    def add(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        rounded = payload.view(torch.bfloat16)[start:]
        for piece in pieces(values):
            values[piece].add_(rounded[piece])


class Integers(Codec):
    """Blocks of integers from −L to L times one float32, the block's largest / L.

        L = 2^(bits − 1) − 1            127, 7 or 1
        |error| ≤ largest / (2·L), but for float32 rounding

    A block with a number that is not finite decodes to NaN throughout. Payload: all scales, then
    the integers.

    In ``kernels`` if that is there; what is decoded has the same bits.
    """

    bits: ClassVar[int]
    block_bytes: ClassVar[int]

    def __init__(self) -> None:
        self._kept: dict[int, _Scratch] = {}
        self._known: dict[torch.device, _Constants] = {}

    @override
    def encode(
        self, values: Tensor, payload: Tensor, plus: Tensor | None = None, *, start: int = 0
    ) -> None:
        for piece in pieces(values):
            part = values[piece]
            _add(part, plus, piece)
            if self._compiled(part, payload, start + piece.start, "encode", True):
                continue
            x, scratch = part.view(-1, BLOCK), self._scratch(part)
            scale, packed = self._split(payload, start + piece.start, part.numel())
            torch.abs(x, out=scratch.numbers)
            inverse, finite = self._scale(scratch.numbers.amax(1, keepdim=True), scale)
            torch.mul(x, inverse, out=scratch.numbers).round_()
            x.addcmul_(scratch.numbers, scale, value=-1)
            if not finite:
                x.nan_to_num_(0.0, 0.0, 0.0)
                scratch.numbers.nan_to_num_(0.0, 0.0, 0.0)  # where the scale is NaN
            self._pack(scratch.numbers, packed, scratch)

    @override
    def round(self, values: Tensor, payload: Tensor, *, start: int = 0) -> None:
        for piece in pieces(values):
            if self._compiled(values[piece], payload, start + piece.start, "encode", False):
                continue
            x = values[piece].view(-1, BLOCK)
            scratch = self._scratch(values[piece])
            scale, packed = self._split(payload, start + piece.start, x.numel())
            torch.abs(x, out=scratch.numbers)
            inverse, _ = self._scale(scratch.numbers.amax(1, keepdim=True), scale)
            torch.addcmul(self._constants(x).rounding, x, inverse, out=x)
            self._pack(x.view(torch.int32), packed, scratch)

    @override
    def decode(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        for piece in pieces(values):
            part = values[piece]
            if self._compiled(part, payload, start + piece.start, "decode", False):
                continue
            scratch = self._scratch(part)
            scale, packed = self._split(payload, start + piece.start, part.numel())
            direct = part.dtype == torch.float32 and part.numel() % BLOCK == 0
            x = part.view(-1, BLOCK) if direct else scratch.numbers
            x.copy_(self._unpack(packed, scratch)).mul_(self._step(scale))
            if not direct:
                part.copy_(x.view(-1)[: part.numel()])

    @override
    def add(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        for piece in pieces(values):
            part = values[piece]
            if self._compiled(part, payload, start + piece.start, "decode", True):
                continue
            scratch = self._scratch(part)
            scale, packed = self._split(payload, start + piece.start, part.numel())
            scratch.numbers.copy_(self._unpack(packed, scratch)).mul_(self._step(scale))
            part.view(-1, BLOCK).add_(scratch.numbers)  # rounded twice, as in the kernel

    def _compiled(
        self,
        part: Tensor,
        payload: Tensor,
        start: int,
        name: Literal["encode", "decode"],
        how: bool,
    ) -> bool:
        """Let a compiled loop do it; False if there is none for these numbers.

        ``how`` is whether ``encode`` keeps the error in ``part``, and whether ``decode`` adds.
        """
        loops = compiled(part)
        if loops is None:
            return False
        raw = payload.numpy()  # of which views cost less than of tensors
        first, last = start // BLOCK, -(-(start + part.numel()) // BLOCK)
        size = self.block_bytes - 4
        offset = raw.size // self.block_bytes * 4
        scales = raw[4 * first : 4 * last].view(np.float32)
        packed = raw[offset + size * first : offset + size * last]
        loop = loops.encode if name == "encode" else loops.decode
        loop(part.numpy(), scales, packed, self.bits, how)
        return True

    def _scale(self, largest: Tensor, scale: Tensor) -> tuple[Tensor, bool]:
        """Scale ← that of blocks with these largest absolute values.

        Returns:
            Its inverse, and whether all numbers are known to be finite. Both are 0 where the scale
            is tiny; where it is not finite it is NaN, and its inverse 0.
        """
        torch.div(largest, self._constants(scale).most, out=scale)
        inverse = scale.reciprocal()
        usual = finite = False  # asking a GPU would wait for it
        if scale.device.type == "cpu":
            low, high = scale.aminmax()
            finite = high.item() < inf  # not, if one is NaN
            usual = finite and low.item() >= SMALLEST
        if not usual:
            tiny = scale < SMALLEST
            inverse.masked_fill_(tiny | ~scale.isfinite(), 0.0)
            scale.masked_fill_(tiny, 0.0).add_(scale - scale)  # ∞ becomes NaN
        return inverse, finite

    def _pack(self, numbers: Tensor, packed: Tensor, scratch: "_Scratch") -> None:
        """Packed ← the integers, in two's complement of so many bits.

        Byte j of a block holds its numbers j, j + B, j + 2·B, …, where a block has B bytes, from
        the lowest bits up; so all work is on contiguous memory, four bytes at a time.

        Args:
            numbers: Whole ones: float32, or int32 of which the lowest byte counts.
            packed: int8, by blocks.
            scratch: For the work.
        """
        scratch.integers.copy_(numbers)
        words, constants = packed.view(torch.int32), self._constants(packed)
        first, *others = scratch.words
        torch.bitwise_and(first, constants.fields[0], out=words)
        for i, part in enumerate(others, start=1):
            part.bitwise_left_shift_(constants.shifts[i]).bitwise_and_(constants.fields[i])
            words.bitwise_or_(part)

    def _unpack(self, packed: Tensor, scratch: "_Scratch") -> Tensor:
        """The integers, times 2^(8 − bits): each is in the highest bits of its byte."""
        words, constants = packed.view(torch.int32), self._constants(packed)
        highest = constants.fields[-1]
        *others, last = scratch.words
        for part, shift in zip(others, reversed(constants.shifts), strict=False):
            torch.bitwise_left_shift(words, shift, out=part)
            part.bitwise_and_(highest)
        torch.bitwise_and(words, highest, out=last)
        return scratch.integers

    def _step(self, scale: Tensor) -> Tensor:
        """What to multiply ``_unpack``'s integers by. Exact: a scale is 0 or not that small."""
        return scale * self._constants(scale).unit

    def _constants(self, like: Tensor) -> "_Constants":
        known = self._known.get(like.device)
        if known is None:
            known = self._known[like.device] = _Constants.of(self.bits, like.device)
        return known

    def _scratch(self, part: Tensor) -> "_Scratch":
        """For a piece's blocks; on a CPU the same memory every time."""
        blocks = -(-part.numel() // BLOCK)
        if part.device.type != "cpu":
            return _Scratch.new(blocks, 8 // self.bits, part.device)
        if blocks not in self._kept:
            most = _Scratch.new(_PIECE_BLOCKS, 8 // self.bits, part.device)
            whole = self._kept.setdefault(_PIECE_BLOCKS, most)
            self._kept[blocks] = whole.of(blocks)
        return self._kept[blocks]

    def _split(self, payload: Tensor, start: int, elements: int) -> tuple[Tensor, Tensor]:
        """Views of a stretch of a payload: its scales, and its integers by blocks."""
        first, last = start // BLOCK, -(-(start + elements) // BLOCK)
        size, offset = self.block_bytes - 4, payload.numel() // self.block_bytes * 4
        scales = payload[4 * first : 4 * last].view(torch.float32)
        packed = payload[offset + size * first : offset + size * last].view(torch.int8)
        return scales.view(-1, 1), packed.view(-1, size)


@dataclass(frozen=True)
class _Scratch:
    """Memory to work in.

    Attributes:
        numbers: float32, a row for each block.
        integers: int8, likewise.
        words: The same memory as int32, cut into a byte's numbers.
    """

    numbers: Tensor
    integers: Tensor
    words: tuple[Tensor, ...]

    @classmethod
    def new(cls, blocks: int, a_byte: int, device: torch.device) -> "_Scratch":
        """For so many blocks, of which so many numbers share a byte."""
        integers = torch.empty(blocks, BLOCK, dtype=torch.int8, device=device)
        return cls(
            torch.empty(blocks, BLOCK, device=device),
            integers,
            integers.view(torch.int32).chunk(a_byte, dim=1),
        )

    def of(self, blocks: int) -> "_Scratch":
        """For the first blocks: the same memory."""
        words = tuple(part[:blocks] for part in self.words)
        return _Scratch(self.numbers[:blocks], self.integers[:blocks], words)


@dataclass(frozen=True)
class _Constants:
    """Numbers as tensors: a plain one costs a call more than the work on a piece of bytes.

    Attributes:
        most: L.
        unit: 2^(bits − 8).
        rounding: A row of ``_ROUNDING``.
        shifts: int32, in bits, of each of a byte's numbers.
        fields: int32, the bits that each of them has in all bytes.
    """

    most: Tensor
    unit: Tensor
    rounding: Tensor
    shifts: tuple[Tensor, ...]
    fields: tuple[Tensor, ...]

    @classmethod
    def of(cls, bits: int, device: torch.device) -> "_Constants":
        """For integers of so many bits."""
        shifts = range(0, 8, bits)
        fields = [_in_each_byte(2**bits - 1 << shift) for shift in shifts]
        return cls(
            torch.tensor(2.0 ** (bits - 1) - 1, device=device),
            torch.tensor(2.0 ** (bits - 8), device=device),
            torch.full((1, BLOCK), _ROUNDING, device=device),
            tuple(torch.tensor(shift, dtype=torch.int32, device=device) for shift in shifts),
            tuple(torch.tensor(field, dtype=torch.int32, device=device) for field in fields),
        )


class Int8(Integers):
    """1 + 4/512 bytes a number."""

    bits = 8
    block_bytes = BLOCK + 4

    @override
    def _pack(self, numbers: Tensor, packed: Tensor, scratch: _Scratch) -> None:
        packed.copy_(numbers)

    @override
    def _unpack(self, packed: Tensor, scratch: _Scratch) -> Tensor:
        return packed

    @override
    def _step(self, scale: Tensor) -> Tensor:
        return scale


class Int4(Integers):
    """1/2 + 4/512 bytes a number: −7 to 7 times a seventh of the block's largest."""

    bits = 4
    block_bytes = BLOCK // 2 + 4


class Int2(Integers):
    """1/4 + 4/512 bytes a number: −1, 0 or 1 times the block's largest."""

    bits = 2
    block_bytes = BLOCK // 4 + 4


CODECS: dict[str, type[Codec]] = {"bfloat16": BFloat16, "int8": Int8, "int4": Int4, "int2": Int2}


def compiled(*tensors: Tensor) -> Kernels | None:
    """The loops for these numbers; None if there are none."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
            return None
    return kernels()


def piece_elements(elements: int, device: torch.device) -> int:
    """How many of so many numbers to work on at a time: whole blocks; on a GPU all of them."""
    most = _PIECE_BLOCKS * BLOCK
    return most if device.type == "cpu" else max(BLOCK, -(-elements // BLOCK) * BLOCK)


def pieces(values: Tensor) -> Iterator[slice]:
    """Slices of ``values`` that begin with a block and fit into the cache."""
    elements = values.numel()
    step = piece_elements(elements, values.device)
    for start in range(0, elements, step):
        yield slice(start, min(start + step, elements))


def _in_each_byte(bits: int) -> int:
    """The int32 with these bits in each of its bytes."""
    return int.from_bytes(bytes([bits] * 4), "little", signed=True)


def _add(part: Tensor, plus: Tensor | None, piece: slice) -> None:
    """Part ← part + plus[piece], as far as ``plus`` goes."""
    if plus is not None and piece.start < plus.numel():
        more = plus[piece]
        part[: more.numel()].add_(more)
