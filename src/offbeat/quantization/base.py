"""The contract of a codec, and the pieces in which codecs work.

Numbers are quantized in blocks of ``BLOCK``. Arithmetic is in float32, on the device of the
tensors, one piece at a time. A piece fits into the processor's cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from offbeat.quantization.kernels import BLOCK

PIECE_BLOCKS = 256  # half a MiB of float32, and as much scratch memory


class Codec(ABC):
    """Quantizes float32 numbers into bytes and back.

    In all methods ``start`` is the position, in the numbers of the whole payload, of the first
    number to encode or decode. It is a multiple of ``BLOCK``.
    """

    block_bytes: ClassVar[int]
    """Bytes of one block in a payload."""

    @abstractmethod
    def encode(
        self,
        values: Tensor,
        payload: Tensor,
        plus: Tensor | None = None,
        *,
        start: int = 0,
        keep_error: bool = True,
    ) -> None:
        """payload ← Q(values + plus); values ← the quantization error, values + plus − Q(…).

        The error of a number that is not finite is 0.

        Args:
            values: float32, 1-D, a whole number of blocks. Overwritten.
            payload: uint8, 1-D, ``block_bytes`` for each block.
            plus: Floating point, 1-D. Zeros stand for missing numbers; numbers beyond the end of
                ``values`` are ignored.
            start: Position in the payload.
            keep_error: False leaves undefined contents in ``values``, which is faster.
        """

    @abstractmethod
    def decode(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        """values ← payload. ``values`` has any float type and may end inside a block."""

    @abstractmethod
    def add(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        """values ← values + payload. ``values`` is float32 and has a whole number of blocks."""


def piece_elements(elements: int, device: torch.device) -> int:
    """Return the length of a piece of a tensor of ``elements`` numbers: a whole number of blocks.

    On a GPU the whole tensor is one piece.
    """
    if device.type == "cpu":
        return PIECE_BLOCKS * BLOCK
    return max(BLOCK, -(-elements // BLOCK) * BLOCK)


def pieces(values: Tensor) -> Iterator[slice]:
    """Iterate over the slices of ``values`` that are its pieces."""
    elements = values.numel()
    step = piece_elements(elements, values.device)
    for start in range(0, elements, step):
        yield slice(start, min(start + step, elements))


def add_piece(part: Tensor, plus: Tensor | None, piece: slice) -> None:
    """part ← part + plus[piece]. Numbers that ``plus`` lacks count as 0."""
    if plus is not None and piece.start < plus.numel():
        addend = plus[piece]
        part[: addend.numel()].add_(addend)
