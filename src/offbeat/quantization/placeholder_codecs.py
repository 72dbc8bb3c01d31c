"""Codecs for simulations of models that do not fit into memory. They quantize nothing.

A *payload* is the bytes of encoded numbers. Here payloads are *blank tensors*: they have the shape
of real payloads, so the simulator counts the right number of bytes, but occupy only eight bytes
(``offbeat.transport.placeholder_tensors``).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.base import Codec
from offbeat.quantization.decoding import LazyVector
from offbeat.quantization.payloads import StageCodecs
from offbeat.transport.placeholder_tensors import blank


class _BlankCodec(Codec):
    """Encodes nothing, and decodes every payload to zeros.

    Args:
        block_bytes: Bytes of one *block*, the payload of 512 numbers, in the replaced codec.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes  # type: ignore[misc]

    @override
    def encode(
        self,
        values: Tensor,
        payload: Tensor,
        plus: Tensor | None = None,
        *,
        start: int = 0,
        keep_error: bool = True,
    ) -> None:
        pass

    @override
    def decode(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        values.zero_()

    @override
    def add(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        pass


class BlankStageCodecs(StageCodecs):
    """Replaces ``StageCodecs``, the codecs of the two stages of a quantized sum.

    The methods return payloads and quantization errors as blank tensors of the right size, or
    return their arguments. They neither read nor change values.
    """

    def __init__(self, precision: str) -> None:
        super().__init__(precision)
        self.first = _BlankCodec(self.first.block_bytes)
        self.second = _BlankCodec(self.second.block_bytes)

    @override
    def encode(self, tensor: Tensor, errors: Tensor) -> Tensor:
        return self.first_payload(errors.numel(), errors.device)

    @override
    def encode_update(self, update: LazyVector, chunks: int, chunk: int) -> Tensor:
        return self.first_payload(chunks * chunk, update.device)

    @override
    def reduce(self, received: Tensor, workers: int, errors: Tensor) -> Tensor:
        return self.second_payload(errors)

    @override
    def empty(self, size: int, device: torch.device) -> Tensor:
        return blank(size)

    @override
    def chunks(self, payload: Tensor, workers: int) -> Sequence[Tensor]:
        return [payload[: payload.numel() // workers]] * workers

    @override
    def zero_errors(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return blank(*shape, dtype=torch.float32)

    @override
    def zero_payload(self, payload: Tensor) -> Tensor:
        return payload

    @override
    def copy_errors(self, errors: Tensor, into: Tensor | None) -> Tensor:
        return blank(*errors.shape, dtype=errors.dtype) if into is None else into
