"""Base class of the codecs, which quantize float32 numbers into bytes and back.

A codec quantizes *blocks* of 512 numbers (``BLOCK``). An encoded block is a *row* of bytes. So a
range of blocks is a range of rows, and any range can be encoded, sent or decoded by itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from offbeat.quantization.kernels import BLOCK

PIECE_BLOCKS = 256  # blocks in a piece: 512 KiB of float32, and as much scratch memory


class Codec(ABC):
    """Quantizes float32 numbers into rows of bytes, and decodes them.

    ``rows`` is always uint8 with the shape [blocks, ``block_bytes``].
    """

    block_bytes: ClassVar[int]
    """Bytes of one encoded block, a multiple of 4."""

    @abstractmethod
    def encode(self, values: Tensor, rows: Tensor, *, keep_error: bool = True) -> None:
        """rows ← Q(values);  values ← values − Q(values), the quantization error.

        An error that would be NaN or infinite is set to 0.

        Args:
            values: float32, 1-D, a whole number of blocks. Overwritten.
            rows: Output.
            keep_error: False leaves undefined contents in ``values``, which is faster.
        """

    @abstractmethod
    def decode(self, rows: Tensor, values: Tensor, *, add: bool = False) -> None:
        """values ← decoded numbers, or values + decoded numbers with ``add``.

        ``values`` is float32, 1-D, and may end inside a block.
        """


def pieces(rows: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and the numbers of each piece of encoded blocks.

    A CPU processes one piece after the other, because it fits into the cache. On a GPU there is a
    single piece.
    """
    blocks = len(rows)
    step = PIECE_BLOCKS if rows.is_cpu else max(1, blocks)
    for start in range(0, blocks, step):
        stop = min(start + step, blocks)
        yield slice(start, stop), slice(start * BLOCK, stop * BLOCK)
