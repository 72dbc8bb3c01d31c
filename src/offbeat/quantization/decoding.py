"""Numbers that are read a stretch at a time: from payloads, or as they are.

So a tensor that has travelled need not be decoded as a whole before it is used.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.codecs import Codec, Integers
from offbeat.quantization.kernels import BLOCK
from offbeat.transport.handle import Handle


@dataclass(frozen=True)
class Packed:
    """A stretch of payloads of integers, for the compiled loops.

    Attributes:
        rows: The payloads, to be added up in this order.
        bits: Of an integer.
        first: The block in which the stretch begins.
        count: Numbers of it.
    """

    rows: NDArray[np.uint8]
    bits: int
    first: int
    count: int


class Numbers(ABC):
    """A run of numbers.

    Attributes:
        elements: How many.
        dtype: In which they are exact, or that they were rounded from.
        device: Where they are.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.elements, self.dtype, self.device = elements, dtype, device

    @property
    def nbytes(self) -> int:
        """Bytes of as many numbers of ``dtype``."""
        return self.elements * self.dtype.itemsize

    @abstractmethod
    def read(self, values: Tensor, start: int = 0) -> None:
        """Values ← as many of the numbers, from ``start`` on, a multiple of ``BLOCK``."""

    def packed(self, start: int, most: int) -> Packed | None:
        """The payloads that hold the next numbers, at most so many; None if there are none."""
        return None

    def whole(self) -> Tensor:
        """All of them, in a new tensor."""
        self.read(values := self.new())
        return values

    def new(self) -> Tensor:
        """Memory for all of them."""
        return torch.empty(self.elements, dtype=self.dtype, device=self.device)


class Plain(Numbers):
    """Those of a 1-D tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.numel(), tensor.dtype, tensor.device)
        self._tensor = tensor

    @override
    def read(self, values: Tensor, start: int = 0) -> None:
        values.copy_(self._tensor[start : start + values.numel()])


class Coded(Numbers):
    """Those of payloads.

    Args:
        codec: Decodes them.
        payloads: One for each chunk.
        chunk: Numbers of each, but for those that the last ones lack; a multiple of ``BLOCK``.
        like: What was encoded: as many numbers, and of this dtype.
    """

    def __init__(self, codec: Codec, payloads: Sequence[Tensor], chunk: int, like: Numbers) -> None:
        super().__init__(like.elements, like.dtype, like.device)
        self._codec, self._payloads, self._chunk = codec, payloads, chunk

    @override
    def read(self, values: Tensor, start: int = 0) -> None:
        done = 0
        while done < values.numel():
            number, offset = divmod(start + done, self._chunk)
            part = values[done : done + self._chunk - offset]
            self._codec.decode(self._payloads[number], part, start=offset)
            done += part.numel()

    @override
    def packed(self, start: int, most: int) -> Packed | None:
        if not isinstance(self._codec, Integers) or self.device.type != "cpu":
            return None
        number, offset = divmod(start, self._chunk)
        count = min(most, self._chunk - offset, self.elements - start)
        rows = self._payloads[number].numpy()[None]
        return Packed(rows, self._codec.bits, offset // BLOCK, count)


class Summed(Numbers):
    """The sum of those of several payloads, in their order.

    Args:
        codec: Decodes them.
        payloads: One or more.
        like: What was encoded: as many numbers, and of this dtype.
    """

    def __init__(self, codec: Codec, payloads: Sequence[Tensor], like: Numbers) -> None:
        super().__init__(like.elements, like.dtype, like.device)
        self._codec, self._payloads = codec, payloads
        self._rows: NDArray[np.uint8] | None = None

    @override
    def read(self, values: Tensor, start: int = 0) -> None:
        first, *others = self._payloads
        whole = values
        if others and (values.dtype != torch.float32 or values.numel() % BLOCK):
            blocks = -(-values.numel() // BLOCK)
            whole = torch.empty(blocks * BLOCK, device=values.device)
        self._codec.decode(first, whole, start=start)
        for payload in others:
            self._codec.add(payload, whole, start=start)
        if whole is not values:
            values.copy_(whole[: values.numel()])

    @override
    def packed(self, start: int, most: int) -> Packed | None:
        if not isinstance(self._codec, Integers) or self.device.type != "cpu":
            return None
        if self._rows is None:
            self._rows = torch.stack(list(self._payloads)).numpy()
        count = min(most, self.elements - start)
        return Packed(self._rows, self._codec.bits, start // BLOCK, count)


class Update(Handle[Numbers]):
    """A sum of updates under way; what rounding takes from one stays with the sender.

    Args:
        total: The sum.
        sent: What this worker has put in: the same numbers as the others have got from it.
    """

    def __init__(self, total: Handle[Numbers], sent: Numbers) -> None:
        self._total, self.sent = total, sent

    @override
    def done(self) -> bool:
        return self._total.done()

    @override
    def wait(self) -> Numbers:
        return self._total.wait()
