"""Payloads of a quantized sum: number of bits sent, encoding, and addition.

A *payload* is a tensor of bytes with quantized numbers. N workers divide a tensor into N *chunks*
of equal length, in whole blocks; zeros fill the end. ``two_stage_sum.py`` describes the two stages
of a sum. A sum of updates over few workers takes a single stage instead (``uses_single_stage``).
"""

from itertools import product

import torch
from torch import Tensor

from offbeat.quantization.base import Codec, piece_elements, pieces
from offbeat.quantization.codecs import CODECS
from offbeat.quantization.decoding import LazyVector
from offbeat.quantization.kernels import BLOCK

_SINGLE_STAGE_LIMIT = 1.1
"""A single stage may send up to 1.1 times the bits of two stages.

A few more bits are worth it, because one operation and one quantization are saved.
"""


def sum_bits(precision: str) -> float:
    """Return the bits per number of a sum, both stages together: 64 for "float32".

    Each of N workers sends (N − 1)/N of these bits per number, because it keeps one of N chunks.
    """
    if precision == "float32":
        return 64.0
    return 2 * _bits(precision)


def uses_single_stage(precision: str, workers: int) -> bool:
    """Return True if a quantized ``Wire.sum_updates`` over so many workers takes a single stage.

    In the single stage each worker receives the updates of all workers and adds them up. The bits
    grow with the number of workers, so only two workers use a single stage.
    """
    if precision == "float32":
        return False
    return workers * _bits(precision) <= _SINGLE_STAGE_LIMIT * sum_bits(precision)


def _bits(precision: str) -> float:
    return 8 * CODECS[precision].block_bytes / BLOCK


class StageCodecs:
    """Encodes the payloads of both stages of a sum.

    Attributes:
        precision: Precision of both stages.
        codec: Codec of both stages.
    """

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.codec: Codec = CODECS[precision]()

    def encode(self, tensor: Tensor, errors: Tensor) -> Tensor:
        """Return the first-stage payload of ``tensor`` + ``errors``.

        Args:
            tensor: Floating point, 1-D.
            errors: Quantization errors of the previous payload: float32, one row per chunk.
                Replaced by the errors of the new payload.
        """
        workers, chunk = errors.shape
        payload = self.first_payload(workers * chunk, errors.device)
        for rank, (row, part) in enumerate(zip(errors, payload.chunk(workers), strict=True)):
            self.codec.encode(row, part, plus=tensor[rank * chunk :])
        return payload

    def encode_update(self, update: LazyVector, chunks: int, chunk: int) -> Tensor:
        """Return the first-stage payload of ``update``. Quantization errors are not stored.

        Args:
            update: The vector to encode.
            chunks: Number of chunks.
            chunk: Numbers per chunk, a multiple of ``BLOCK``. Zeros follow the end of ``update``.
        """
        payload = self.first_payload(chunks * chunk, update.device)
        if update.device.type != "cpu":  # few operations on long tensors
            values = torch.empty(chunks * chunk, dtype=torch.float32, device=update.device)
            update.read(values[: update.elements])
            values[update.elements :].zero_()
            self.codec.encode(values, payload.view(chunks, -1), keep_error=False)
            return payload
        limit = piece_elements(chunk, update.device)
        rows, step = (
            max(1, limit // chunk),
            min(chunk, limit),
        )  # a piece has chunks, or a part of one
        scratch = torch.empty(min(rows, chunks) * step, dtype=torch.float32, device=update.device)
        parts = payload.chunk(chunks)
        for row, start in product(range(0, chunks, rows), range(0, chunk, step)):
            group, count = parts[row : row + rows], min(step, chunk - start)
            values, first = scratch[: len(group) * count], row * chunk + start
            present = max(0, min(values.numel(), update.elements - first))
            if present:
                update.read(values[:present], first)
            values[present:].zero_()
            for part, numbers in zip(group, values.split(count), strict=True):
                self.codec.encode(numbers, part, start=start, keep_error=False)
        return payload

    def reduce(self, received: Tensor, workers: int, errors: Tensor) -> Tensor:
        """Return the second-stage payload of the sum of the received chunks and ``errors``.

        Args:
            received: First-stage payloads of this worker's chunk from all workers, concatenated in
                the order of the ranks.
            workers: Number of workers.
            errors: Quantization errors of the previous second stage: float32, 1-D, as long as the
                chunk. Replaced by the errors of the returned payload.
        """
        payload, parts = self.second_payload(errors), received.chunk(workers)
        for piece in pieces(errors):
            for part in parts:
                self.codec.add(part, errors[piece], start=piece.start)
            self.codec.encode(errors[piece], payload, start=piece.start)
        return payload

    def first_payload(self, elements: int, device: torch.device) -> Tensor:
        """Return an uninitialized first-stage payload for ``elements`` numbers."""
        size = elements // BLOCK * self.codec.block_bytes
        return torch.empty(size, dtype=torch.uint8, device=device)

    def second_payload(self, errors: Tensor) -> Tensor:
        """Return an uninitialized second-stage payload for as many numbers as ``errors`` has."""
        size = errors.numel() // BLOCK * self.codec.block_bytes
        return torch.empty(size, dtype=torch.uint8, device=errors.device)
