"""Fewer bytes for the same numbers: what each codec rounds to, and how a payload is laid out.

Numbers travel in blocks of ``BLOCK``. All work is done in float32, on the device of the tensors, a
piece that fits into the processor's cache at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor

BLOCK = 512
"""Numbers a block; with int8 they share one scale."""
SMALLEST = 2.0**-100
"""A smaller scale counts as zero with int8: its inverse would overflow."""
_PIECE_BLOCKS = 512  # 1 MiB of float32, and as much scratch


class Codec(ABC):
    """A rounding of float32 numbers and its bytes."""

    block_bytes: int
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

    def encode(self, values: Tensor, payload: Tensor, plus: Tensor | None = None) -> None:
        """Payload ← values + plus, rounded; values ← the error."""
        rounded = payload.view(torch.bfloat16)
        for piece in _pieces(values):
            part = values[piece]
            _add(part, plus, piece)
            rounded[piece].copy_(part)
            part.sub_(rounded[piece]).nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        """Values ← payload."""
        values.copy_(payload.view(torch.bfloat16)[: values.numel()])

    def add(self, payload: Tensor, values: Tensor) -> None:
        """Values ← values + payload."""
        values.add_(payload.view(torch.bfloat16))


class Int8(Codec):
    """Blocks of integers from −127 to 127 times one float32, the block's largest / 127.

    |error| ≤ largest / 254, but for float32 rounding. A block with a number that is not finite
    decodes to NaN throughout. Payload: all scales, then all integers; 1 + 4/512 bytes a number.
    """

    block_bytes = BLOCK + 4

    def __init__(self) -> None:
        self._kept: Tensor | None = None

    def encode(self, values: Tensor, payload: Tensor, plus: Tensor | None = None) -> None:
        """Payload ← values + plus, rounded; values ← the error."""
        scales, integers = _split(payload)
        for piece in _pieces(values):
            part = values[piece]
            _add(part, plus, piece)
            x, blocks = part.view(-1, BLOCK), _blocks(piece)
            scratch = self._scratch(x)
            scale = torch.abs(x, out=scratch).amax(1).div_(127)
            inverse = scale.reciprocal()
            # Asking a GPU would wait for it.
            plain = x.device.type == "cpu" and bool((scale >= SMALLEST).all() & (scale < inf).all())
            if not plain:
                inverse.masked_fill_((scale < SMALLEST) | ~scale.isfinite(), 0.0)
                scale.masked_fill_(scale < SMALLEST, 0.0).add_(scale - scale)  # ∞ becomes NaN
            torch.mul(x, inverse[:, None], out=scratch).round_()
            integers[blocks].copy_(scratch)
            scales[blocks].copy_(scale)
            x.addcmul_(scratch, scale[:, None], value=-1)
            if not plain:
                x.nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        """Values ← payload."""
        scales, integers = _split(payload)
        for piece in _pieces(values):
            part, blocks = values[piece], _blocks(piece)
            x = self._scratch(integers[blocks]).copy_(integers[blocks])
            if part.numel() == x.numel():
                torch.mul(x, scales[blocks, None], out=part.view(-1, BLOCK))
            else:
                part.copy_(x.mul_(scales[blocks, None]).view(-1)[: part.numel()])

    def add(self, payload: Tensor, values: Tensor) -> None:
        """Values ← values + payload."""
        scales, integers = _split(payload)
        for piece in _pieces(values):
            blocks = _blocks(piece)
            x = self._scratch(integers[blocks]).copy_(integers[blocks])
            values[piece].view(-1, BLOCK).addcmul_(x, scales[blocks, None])

    def _scratch(self, like: Tensor) -> Tensor:
        """float32 of the shape of ``like``; on a CPU the same memory every time."""
        if like.device.type != "cpu":
            return torch.empty_like(like, dtype=torch.float32)
        if self._kept is None:
            self._kept = torch.empty(_PIECE_BLOCKS, BLOCK)
        return self._kept[: like.shape[0]]


CODECS: dict[str, type[Codec]] = {"bfloat16": BFloat16, "int8": Int8}


def _split(payload: Tensor) -> tuple[Tensor, Tensor]:
    """Views of an int8 payload: its scales, and its integers by blocks."""
    blocks = payload.numel() // Int8.block_bytes
    scales = payload[: 4 * blocks].view(torch.float32)
    return scales, payload[4 * blocks :].view(torch.int8).view(blocks, BLOCK)


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
