"""Base class of the codecs, which quantize float32 numbers into bytes and back.

A codec quantizes blocks of ``BLOCK`` (512) numbers. It computes in float32, on the device of its
tensors. On a CPU, a long tensor is processed in *pieces* of 256 blocks, which fit into the cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from offbeat.quantization.kernels import BLOCK

PIECE_BLOCKS = 256  # blocks in a piece: 512 KiB of float32, and as much scratch memory


class Codec(ABC):
    """Quantizes float32 numbers into bytes and back.

    The encoded bytes are called the *payload*. A method may process only a part of the payload. The
    argument ``start`` is then the index, among all numbers of the payload, of the first number of
    the part. It is a multiple of ``BLOCK``.
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

        Errors that would not be finite are 0, such as that of a number that is NaN.

        Args:
            values: float32, 1-D, a whole number of blocks. Overwritten.
            payload: uint8, 1-D, ``block_bytes`` for each block. The whole payload.
            plus: Floating point, 1-D. If it is shorter than ``values``, zeros stand for the missing
                numbers. If it is longer, the rest is ignored. None: zeros.
            start: Index of the first number in the payload.
            keep_error: False leaves undefined contents in ``values``, which is faster.
        """

    @abstractmethod
    def decode(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        """values ← decoded numbers. ``values`` has any float type and may end inside a block."""

    @abstractmethod
    def add(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        """values ← values + decoded numbers. ``values`` is float32 and has whole blocks."""


def piece_elements(elements: int, device: torch.device) -> int:
    """Return the number of elements in a piece, a multiple of ``BLOCK``.

    On a CPU a piece has ``PIECE_BLOCKS`` blocks. On a GPU one piece holds the whole tensor.

    Args:
        elements: Number of elements of the tensor.
        device: Device of the tensor.
    """
    if device.type == "cpu":
        return PIECE_BLOCKS * BLOCK
    return max(BLOCK, -(-elements // BLOCK) * BLOCK)


def pieces(values: Tensor) -> Iterator[slice]:
    """Yield the slice of each piece of ``values``, in order."""
    elements = values.numel()
    step = piece_elements(elements, values.device)
    for start in range(0, elements, step):
        yield slice(start, min(start + step, elements))


def add_piece(part: Tensor, plus: Tensor | None, piece: slice) -> None:
    """part ← part + plus[piece]. If ``plus`` is None or too short, missing numbers count as 0."""
    if plus is not None and piece.start < plus.numel():
        addend = plus[piece]
        part[: addend.numel()].add_(addend)
