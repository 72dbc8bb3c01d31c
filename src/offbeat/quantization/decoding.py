"""Vectors that are decoded piece by piece when they are read.

A quantized sum arrives as *payloads*, the bytes that a codec has encoded. It may be divided into
*chunks*, each with its own payloads. A reader that takes one piece after another saves the memory
of the whole tensor.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.base import Codec
from offbeat.quantization.integers import IntegerCodec
from offbeat.quantization.kernels import BLOCK
from offbeat.transport.handle import Handle


@dataclass(frozen=True)
class PackedPayloads:
    """Encoded elements of one chunk of a vector, as arguments of ``kernels.land``.

    Attributes:
        rows: The integer payloads of the whole chunk, one per row. The vector is the sum of the
            decoded rows, added in their order.
        bits: Bits of an integer: 8, 4 or 2.
        first: Index, within each payload, of the block that contains the first element.
        count: Number of elements.
    """

    rows: NDArray[np.uint8]
    bits: int
    first: int
    count: int


class LazyVector(ABC):
    """A 1-D vector whose elements are computed when they are read.

    Attributes:
        elements: Number of elements.
        dtype: Floating-point type of the elements, before quantization.
        device: Device of the elements.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.elements, self.dtype, self.device = elements, dtype, device

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor that holds the vector."""
        return self.elements * self.dtype.itemsize

    @abstractmethod
    def read(self, values: Tensor, start: int = 0) -> None:
        """Fill ``values`` with the elements from index ``start`` on, a multiple of ``BLOCK``."""

    def packed(self, start: int, limit: int) -> PackedPayloads | None:
        """Return the payloads of up to ``limit`` elements, which end with a chunk at the latest.

        ``start`` is the index of the first element, a multiple of ``BLOCK``. The result is None if
        the vector is not stored as integer payloads on the CPU.
        """
        return None

    def to_tensor(self) -> Tensor:
        """Return all elements in a new tensor."""
        self.read(values := self.empty_tensor())
        return values

    def empty_tensor(self) -> Tensor:
        """Return an uninitialized tensor for all elements."""
        return torch.empty(self.elements, dtype=self.dtype, device=self.device)


class TensorVector(LazyVector):
    """A vector whose elements are those of a 1-D tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.numel(), tensor.dtype, tensor.device)
        self._tensor = tensor

    @override
    def read(self, values: Tensor, start: int = 0) -> None:
        values.copy_(self._tensor[start : start + values.numel()])


class PayloadVector(LazyVector):
    """A vector of encoded chunks, each of which is the sum of one or more payloads.

    Args:
        codec: Codec of the payloads.
        chunks: Payloads of each chunk, decoded and added in this order.
        chunk_elements: Elements per chunk with padding, a multiple of ``BLOCK``.
        like: A vector with the number of elements, dtype and device of this vector.
    """

    def __init__(
        self,
        codec: Codec,
        chunks: Sequence[Sequence[Tensor]],
        chunk_elements: int,
        like: LazyVector,
    ) -> None:
        super().__init__(like.elements, like.dtype, like.device)
        self._codec, self._chunks, self._chunk_elements = codec, chunks, chunk_elements
        self._rows: dict[int, NDArray[np.uint8]] = {}  # by chunk: its payloads in one array

    @override
    def read(self, values: Tensor, start: int = 0) -> None:
        if self.device.type != "cpu" and values.numel() == self.elements:
            self._read_all(values)
            return
        done = 0
        while done < values.numel():
            chunk, offset = divmod(start + done, self._chunk_elements)
            part = values[done : done + self._chunk_elements - offset]
            self._read_chunk(self._chunks[chunk], part, offset)
            done += part.numel()

    def _read_all(self, values: Tensor) -> None:
        """Fill ``values`` with all elements, in few operations, as is fast on a GPU."""
        elements = len(self._chunks) * self._chunk_elements
        total = torch.empty(elements, dtype=torch.float32, device=values.device)
        first, *others = (torch.stack(payloads) for payloads in zip(*self._chunks, strict=True))
        self._codec.decode(first, total)
        for payload in others:
            self._codec.add(payload, total)
        values.copy_(total[: values.numel()])

    def _read_chunk(self, payloads: Sequence[Tensor], values: Tensor, start: int) -> None:
        first, *others = payloads
        total = values
        if others and (values.dtype != torch.float32 or values.numel() % BLOCK):
            # ``Codec.add`` needs float32 and whole blocks.
            blocks = -(-values.numel() // BLOCK)
            total = torch.empty(blocks * BLOCK, dtype=torch.float32, device=values.device)
        self._codec.decode(first, total, start=start)
        for payload in others:
            self._codec.add(payload, total, start=start)
        if total is not values:
            values.copy_(total[: values.numel()])

    @override
    def packed(self, start: int, limit: int) -> PackedPayloads | None:
        if not isinstance(self._codec, IntegerCodec) or self.device.type != "cpu":
            return None
        chunk, offset = divmod(start, self._chunk_elements)
        payloads = self._chunks[chunk]
        if len(payloads) == 1:
            rows = payloads[0].numpy()[None]
        else:
            if chunk not in self._rows:
                self._rows[chunk] = torch.stack(list(payloads)).numpy()
            rows = self._rows[chunk]
        count = min(limit, self._chunk_elements - offset, self.elements - start)
        return PackedPayloads(rows, self._codec.bits, offset // BLOCK, count)


class UpdateSum(Handle[LazyVector]):
    """Handle of a sum in flight over the workers; the result of ``Wire.sum_updates``.

    Args:
        total: Handle of the sum.
        sent: This worker's contribution, after quantization. Its update minus ``sent`` is the
            quantization error.
    """

    def __init__(self, total: Handle[LazyVector], sent: LazyVector) -> None:
        self._total, self.sent = total, sent

    @override
    def done(self) -> bool:
        return self._total.done()

    @override
    def wait(self) -> LazyVector:
        return self._total.wait()
