"""Payloads of a quantized sum: bits on the wire, and the arithmetic of both stages.

A quantized sum has two stages (``two_stage_sum.py``): each worker adds up one chunk of the tensor,
and then sends the sum of its chunk to all workers. All chunks consist of the same number of whole
blocks; zeros fill the end of the last chunks. A sum of updates may take a single stage instead
(``uses_single_stage``).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.quantization.base import Codec, piece_elements, pieces
from offbeat.quantization.codecs import CODECS
from offbeat.quantization.decoding import LazyVector
from offbeat.quantization.kernels import BLOCK

_SECOND_PRECISION = {"int2": "int4"}  # a sum of numbers with 2 bits needs more than 2 bits
_SINGLE_STAGE_LIMIT = 1.1
"""A single stage is used if it sends at most 1.1 times the bits of two stages.

It may send a few more bits, because it saves an operation and a quantization.
"""


def second_precision(precision: str) -> str:
    """Return the precision of the second stage, given that of the first."""
    return _SECOND_PRECISION.get(precision, precision)


def sum_bits(precision: str) -> float:
    """Return the bits per number of a two-stage sum, both stages together.

    Each of N workers sends (N − 1)/N of these bits, because it keeps one chunk of N.
    """
    if precision == "float32":
        return 64.0
    return _bits(precision) + _bits(second_precision(precision))


def uses_single_stage(precision: str, workers: int) -> bool:
    """Return True if a sum of updates takes a single stage.

    In the single stage each worker receives the updates of all workers and adds them up. The bits
    grow with the number of workers, so only few workers with a low precision use it.
    """
    if precision == "float32":
        return False
    return workers * _bits(precision) <= _SINGLE_STAGE_LIMIT * sum_bits(precision)


def update_bits(precision: str, workers: int) -> float:
    """Return the bits per number of a sum of updates, counted as in ``sum_bits``.

    In a single stage each worker sends its whole update to all other workers.
    """
    if uses_single_stage(precision, workers):
        return workers * _bits(precision)
    return sum_bits(precision)


def _bits(precision: str) -> float:
    return 8 * CODECS[precision].block_bytes / BLOCK


class StageCodecs:
    """The codecs of the two stages of a sum, and the payloads that they make.

    Attributes:
        precision: Name of the precision.
        first: Codec of each worker's contribution.
        second: Codec of the sum of a chunk over the workers.
    """

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.first: Codec = CODECS[precision]()
        self.second: Codec = CODECS[second_precision(precision)]()

    @property
    def largest_block_bytes(self) -> int:
        """Bytes of a block on the stage whose blocks are larger."""
        return max(self.first.block_bytes, self.second.block_bytes)

    def encode(self, tensor: Tensor, errors: Tensor) -> Tensor:
        """Return the first-stage payload of ``tensor`` + ``errors``, and update the errors.

        Args:
            tensor: Floating point, 1-D.
            errors: float32, one row for each chunk. Becomes the quantization errors of the payload.
        """
        workers, chunk = errors.shape
        payload = self.first_payload(workers * chunk, errors.device)
        for rank, (row, part) in enumerate(zip(errors, payload.chunk(workers), strict=True)):
            self.first.encode(row, part, plus=tensor[rank * chunk :])
        return payload

    def encode_update(self, update: LazyVector, chunks: int, chunk: int) -> Tensor:
        """Return the first-stage payload of ``update``: ``chunks`` chunks of ``chunk`` numbers."""
        payload = self.first_payload(chunks * chunk, update.device)
        step = min(chunk, piece_elements(chunk, update.device))
        scratch = torch.empty(step, device=update.device)
        for number, part in enumerate(payload.chunk(chunks)):
            for start in range(0, chunk, step):
                values = scratch[: chunk - start]
                present = max(0, min(values.numel(), update.elements - number * chunk - start))
                if present:
                    update.read(values[:present], number * chunk + start)
                values[present:].zero_()
                self.first.encode(values, part, start=start, keep_error=False)
        return payload

    def reduce(self, received: Tensor, workers: int, errors: Tensor) -> Tensor:
        """Return the second-stage payload of the sum of the received chunks and ``errors``.

        Args:
            received: First-stage payloads of this worker's chunk, in the order of the ranks.
            workers: Number of payloads in ``received``.
            errors: float32, 1-D, as long as the chunk. Its values are added to the sum. They are
                then replaced by the quantization errors of the returned payload.
        """
        payload, parts = self.second_payload(errors), received.chunk(workers)
        for piece in pieces(errors):
            for part in parts:
                self.first.add(part, errors[piece], start=piece.start)
            self.second.encode(errors[piece], payload, start=piece.start)
        return payload

    def first_payload(self, elements: int, device: torch.device) -> Tensor:
        """Return uninitialized memory for a first-stage payload of ``elements`` numbers."""
        return self.empty(elements // BLOCK * self.first.block_bytes, device)

    def second_payload(self, errors: Tensor) -> Tensor:
        """Return uninitialized memory for a second-stage payload as long as ``errors``."""
        return self.empty(errors.numel() // BLOCK * self.second.block_bytes, errors.device)

    # Separate methods so that the planner can override them (``placeholder_codecs.py``).

    def empty(self, size: int, device: torch.device) -> Tensor:
        """Return uninitialized memory for ``size`` bytes."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def chunks(self, payload: Tensor, workers: int) -> Sequence[Tensor]:
        """Return the equal chunks of ``payload``, one for each worker."""
        return payload.chunk(workers)

    def zero_payload(self, payload: Tensor) -> Tensor:
        """Fill ``payload`` so that it decodes to zeros, and return it."""
        return payload.zero_()

    def zero_errors(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return quantization errors of 0."""
        return torch.zeros(*shape, device=device)

    def copy_errors(self, errors: Tensor, into: Tensor | None) -> Tensor:
        """Return a copy of ``errors``, in the memory of ``into`` if that is given."""
        return errors.clone() if into is None else into.copy_(errors)
