"""Base class of the codecs, which quantize float32 numbers into bytes and back.

A codec quantizes *blocks* of 512 numbers (``BLOCK``). On a CPU it processes a long tensor in
*pieces* of 256 blocks, which fit into the cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from offbeat.quantization.kernels import BLOCK

PIECE_BLOCKS = 256  # blocks in a piece: 512 KiB of float32, and as much scratch memory


class Codec(ABC):
    """Quantizes float32 numbers into a *payload* of bytes, and decodes them.

    A payload may be encoded or decoded in several calls. Each call handles some of the numbers,
    beginning with number ``start`` of the payload, a multiple of ``BLOCK``.
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
        """payload ← Q(s) with s = values + plus;  values ← s − Q(s), the quantization error.

        An error that would be NaN or infinite is set to 0.

        Args:
            values: float32, 1-D, a whole number of blocks. Overwritten.
            payload: The whole payload: uint8, 1-D, ``block_bytes`` for each of its blocks. On a GPU
                it may have two dimensions, one row for each of several payloads of equal length,
                whose numbers follow each other in ``values``.
            plus: Floating point, 1-D, of any length: padded with zeros, or cut, to the length of
                ``values``. None means zeros.
            start: Index in the payload of the first number of ``values``.
            keep_error: False leaves undefined contents in ``values``, which is faster.
        """

    @abstractmethod
    def decode(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        """values ← decoded numbers. ``values`` has any float type and any length.

        ``payload`` is that of ``encode``. With two dimensions, it is decoded as a whole.
        """

    @abstractmethod
    def add(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        """values ← values + decoded numbers. ``values`` is float32, a whole number of blocks."""


def piece_elements(elements: int, device: torch.device) -> int:
    """Return the number of elements in a piece of a tensor of ``elements``, in whole blocks.

    On a GPU one piece holds the whole tensor.
    """
    if device.type == "cpu":
        return PIECE_BLOCKS * BLOCK
    return max(BLOCK, -(-elements // BLOCK) * BLOCK)


def pieces(values: Tensor) -> Iterator[slice]:
    """Yield the slice of each piece of ``values``."""
    elements = values.numel()
    step = piece_elements(elements, values.device)
    for start in range(0, elements, step):
        yield slice(start, min(start + step, elements))


def add_piece(part: Tensor, plus: Tensor | None, piece: slice) -> None:
    """part ← part + plus[piece]. Numbers that ``plus`` lacks count as 0."""
    if plus is not None and piece.start < plus.numel():
        addend = plus[piece]
        part[: addend.numel()].add_(addend)
