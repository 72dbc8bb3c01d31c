"""What is computed for a quantised sum: a worker's payload, and that of the sum of its chunk.

A tensor is cut into one chunk for each worker, all of the same number of whole blocks; the last
ones may lack numbers. Work goes a piece at a time, so that it stays in the processor's cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.quantization.codecs import CODECS, Codec, piece_elements, pieces
from offbeat.quantization.decoding import Numbers
from offbeat.quantization.kernels import BLOCK

SECOND = {"int2": "int4"}
"""Of sums, where it is another one: a sum of numbers with few bits has more."""


_WORTH = 1.1
"""Times as many bytes are worth it to save a stage, its operation and its rounding."""


def sum_bits(precision: str) -> float:
    """Of each number of a sum, on both stages together; (N − 1)/N of them leave a worker."""
    if precision == "float32":
        return 64.0
    return _bits(precision) + _bits(SECOND.get(precision, precision))


def gathers(precision: str, workers: int) -> bool:
    """Whether everyone gets every worker's rounded update, instead of their rounded sum.

    With few workers and bits that is not much more to send.
    """
    return precision != "float32" and workers * _bits(precision) <= _WORTH * sum_bits(precision)


def update_bits(precision: str, workers: int) -> float:
    """As ``sum_bits``, of updates: gathered, each worker sends its own to all others."""
    if gathers(precision, workers):
        return workers * _bits(precision)
    return sum_bits(precision)


def _bits(precision: str) -> float:
    return 8 * CODECS[precision].block_bytes / BLOCK


class Coding:
    """The codecs of a precision.

    Attributes:
        precision: Its name.
        first: Of what the workers send.
        second: Of the sums.
    """

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.first: Codec = CODECS[precision]()
        self.second: Codec = CODECS[SECOND.get(precision, precision)]()

    @property
    def most_block_bytes(self) -> int:
        """Of a block on the stage that has more."""
        return max(self.first.block_bytes, self.second.block_bytes)

    def encode(self, tensor: Tensor, errors: Tensor) -> Tensor:
        """The payload of ``tensor`` plus ``errors``, which become those of it.

        Args:
            tensor: 1-D.
            errors: float32, a row for each worker's chunk.
        """
        workers, chunk = errors.shape
        payload = self.payload(workers * chunk, errors.device)
        for rank, (row, part) in enumerate(zip(errors, payload.chunk(workers), strict=True)):
            self.first.encode(row, part, plus=tensor[rank * chunk :])
        return payload

    def round(self, update: Numbers, workers: int, chunk: int) -> Tensor:
        """The payload of ``update``, of which each worker's chunk has so many numbers."""
        payload = self.payload(workers * chunk, update.device)
        step = min(chunk, piece_elements(chunk, update.device))
        scratch = torch.empty(step, device=update.device)
        for rank, part in enumerate(payload.chunk(workers)):
            for start in range(0, chunk, step):
                values = scratch[: chunk - start]
                there = max(0, min(values.numel(), update.elements - rank * chunk - start))
                if there:
                    update.read(values[:there], rank * chunk + start)
                values[there:].zero_()
                self.first.round(values, part, start=start)
        return payload

    def add_up(self, received: Tensor, workers: int, errors: Tensor) -> Tensor:
        """The payload of the sum of one payload of each worker, and ``errors``: those of it, then.

        Args:
            received: The payloads, one after the other.
            workers: How many.
            errors: float32, 1-D: as many numbers as each has.
        """
        payload, parts = self.summed(errors), received.chunk(workers)
        for piece in pieces(errors):
            for part in parts:
                self.first.add(part, errors[piece], start=piece.start)
            self.second.encode(errors[piece], payload, start=piece.start)
        return payload

    def payload(self, elements: int, device: torch.device) -> Tensor:
        """Memory for so many numbers on the first stage."""
        return self.memory(elements // BLOCK * self.first.block_bytes, device)

    def summed(self, errors: Tensor) -> Tensor:
        """Memory for as many numbers on the second stage."""
        return self.memory(errors.numel() // BLOCK * self.second.block_bytes, errors.device)

    def memory(self, size: int, device: torch.device) -> Tensor:
        """A payload of ``size`` bytes, not initialised."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def chunks(self, payload: Tensor, workers: int) -> Sequence[Tensor]:
        """Equal chunks of ``payload``, one for each worker."""
        return payload.chunk(workers)

    def zeros(self, payload: Tensor) -> Tensor:
        """``payload``, which then decodes to zeros."""
        return payload.zero_()

    def errors(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Quantization errors of 0."""
        return torch.zeros(*shape, device=device)

    def copy(self, errors: Tensor, before: Tensor | None) -> Tensor:
        """A copy of ``errors``, in the memory of an earlier one if there is one."""
        return errors.clone() if before is None else before.copy_(errors)
