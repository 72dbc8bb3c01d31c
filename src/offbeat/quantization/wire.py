"""The wire: the precision at which the workers send, and quantized sums of gradients.

*Error feedback* means that the quantization error of one sum is added to the next sum of the same
tensor. The wire stores the errors of gradients. Those of models stay in the models
(``message.py``).
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from offbeat.arguments import Precision as Precision
from offbeat.arguments import require_choice
from offbeat.quantization.base import Codec
from offbeat.quantization.codecs import CODECS
from offbeat.quantization.kernels import BLOCK, kernels
from offbeat.quantization.two_stage_sum import add_chunks, start_two_stages
from offbeat.transport.communicator import Communicator
from offbeat.transport.handle import Handle
from offbeat.transport.team import Team


def require_precision(precision: object) -> None:
    """Raise ValueError if ``precision`` is not the name of a precision."""
    require_choice("wire", precision, get_args(Precision))


@dataclass
class ErrorFeedback:
    """Quantization errors of one stream, which the next sum adds.

    Attributes:
        sent: Errors of the first stage: float32, one row per chunk.
        summed: Errors of the second stage, in this worker's chunk: float32, 1-D.
    """

    sent: Tensor
    summed: Tensor


class Wire:
    """Precision of the messages between the workers, and sums of gradients at this precision.

    The constructor is a collective, unless ``precision`` is "float32" or there is one worker.

    Args:
        team: The workers.
        precision: "float32" sends tensors unchanged. "bfloat16", "int8", "int4" and "int2" quantize
            them.

    Attributes:
        precision: The precision.
        twin: Communicator of second stages, without accounting. None if the wire is exact.
        errors: The quantization errors of each stream.
    """

    def __init__(self, team: Team, precision: Precision = "float32") -> None:
        require_precision(precision)
        self._team, self.precision = team, precision
        self.errors: dict[str, ErrorFeedback] = {}
        self.twin: Communicator | None = None
        if not self.exact:
            kernels()  # compile now, not in the first step
            self.twin = team.communicator.twin()

    @property
    def exact(self) -> bool:
        """True if no sum is quantized: at float32, or with a single worker."""
        return self.precision == "float32" or self._team.size == 1

    def saves(self, elements: int, itemsize: int) -> bool:
        """Return True if quantizing a tensor, which pads it to whole blocks, saves bytes."""
        if self.exact:
            return False
        blocks = self._team.size * self._chunk_blocks(elements)
        return blocks * CODECS[self.precision].block_bytes < elements * itemsize

    def _chunk_blocks(self, elements: int) -> int:
        """Return the number of blocks in each worker's chunk."""
        return -(-elements // (BLOCK * self._team.size))

    def sum(
        self,
        tensor: Tensor,
        *,
        stream: str,
        what: str,
        contribute: bool = True,
    ) -> Handle[Tensor]:
        """Start to replace ``tensor`` by its sum over the workers. ``wait`` of the result ends it.

        A small tensor is sent exactly if quantization would not save bytes.

        Args:
            tensor: 1-D, floating point, with the same shape and dtype on all workers.
            stream: Name under which the same tensor is summed repeatedly, equal on all workers. The
                quantization errors are stored under this name.
            what: Name of the operation in errors.
            contribute: False sets ``tensor`` to zeros and sends zeros. This worker's errors of
                earlier sums are then kept for a later sum.
        """
        if not contribute:
            tensor.zero_()
        if not self.saves(tensor.numel(), tensor.dtype.itemsize):
            return self._team.communicator.sum(tensor, what=what)
        errors, codec = self._errors_of(stream, tensor), CODECS[self.precision]()
        workers, chunk = errors.sent.shape
        shape = workers, chunk // BLOCK, codec.block_bytes
        sent = torch.zeros(shape, dtype=torch.uint8, device=tensor.device)
        if contribute:
            for rank, (row, rows) in enumerate(zip(errors.sent, sent, strict=True)):
                numbers = tensor[rank * chunk : (rank + 1) * chunk]
                row[: numbers.numel()].add_(numbers)
                codec.encode(row, rows)
        total = self._start(sent, errors.summed, codec, contribute=contribute, what=what)

        def decode(sums: Tensor) -> Tensor:
            codec.decode(sums.view(-1, codec.block_bytes)[: -(-tensor.numel() // BLOCK)], tensor)
            return tensor

        return total.then(decode)

    def _start(
        self, sent: Tensor, errors: Tensor, codec: Codec, *, contribute: bool, what: str
    ) -> Handle[Tensor]:
        assert self.twin is not None
        shape = sent.shape[1:]

        def add_up(received: Tensor) -> Tensor:
            out = torch.zeros(shape, dtype=torch.uint8, device=errors.device)
            # If all workers sent zeros, the sum is zero, too, and the errors are for a later sum.
            if contribute or bool(received.any()):
                add_chunks(received, errors, codec, codec, out)
            return out.view(-1)

        return start_two_stages(
            sent, add_up, self._team, self.twin, sum_bytes=shape.numel(), what=what
        )

    # -- error feedback --------------------------------------------------------------------------

    def _errors_of(self, stream: str, tensor: Tensor) -> ErrorFeedback:
        shape = self._team.size, self._chunk_blocks(tensor.numel()) * BLOCK
        errors, device = self.errors.get(stream), tensor.device
        if errors is None:
            sent = torch.zeros(shape, dtype=torch.float32, device=device)
            errors = self.errors[stream] = ErrorFeedback(sent, torch.zeros_like(sent[0]))
        elif errors.sent.device != device:  # loaded from a checkpoint
            errors.sent, errors.summed = errors.sent.to(device), errors.summed.to(device)
        if errors.sent.shape != shape:
            raise ValueError(
                f"stream {stream!r} of the wire holds quantization errors of shape "
                f"{tuple(errors.sent.shape)}, but a tensor of {tensor.numel()} elements needs "
                f"{shape}: use one stream per tensor, and resume with the same number of workers"
            )
        return errors
