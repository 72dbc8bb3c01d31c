"""Codecs for placeholder tensors: payloads that have a size and take no memory.

The planner simulates models that are too large to hold (see
``offbeat.transport.placeholder_tensors``).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.codecs import CODECS, Codec
from offbeat.quantization.decoding import Numbers
from offbeat.quantization.payloads import SECOND, Coding
from offbeat.transport.placeholder_tensors import blank


class _Blank(Codec):
    """A codec without arithmetic: it encodes nothing and decodes zeros."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes  # type: ignore[misc]

    @override
    def encode(
        self, values: Tensor, payload: Tensor, plus: Tensor | None = None, *, start: int = 0
    ) -> None:
        pass

    @override
    def round(self, values: Tensor, payload: Tensor, *, start: int = 0) -> None:
        pass

    @override
    def decode(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        values.zero_()

    @override
    def add(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        pass


class BlankCoding(Coding):
    """The codecs of a precision, whose payloads are blank."""

    def __init__(self, precision: str) -> None:
        super().__init__(precision)
        self.first = _Blank(self.first.block_bytes)
        self.second = _Blank(CODECS[SECOND.get(precision, precision)].block_bytes)

    @override
    def encode(self, tensor: Tensor, errors: Tensor) -> Tensor:
        return self.payload(errors.numel(), errors.device)

    @override
    def round(self, update: Numbers, workers: int, chunk: int) -> Tensor:
        return self.payload(workers * chunk, update.device)

    @override
    def add_up(self, received: Tensor, workers: int, errors: Tensor) -> Tensor:
        return self.summed(errors)

    @override
    def memory(self, size: int, device: torch.device) -> Tensor:
        return blank(size)

    @override
    def chunks(self, payload: Tensor, workers: int) -> Sequence[Tensor]:
        return [payload[: payload.numel() // workers]] * workers

    @override
    def errors(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return blank(*shape, dtype=torch.float32)

    @override
    def zeros(self, payload: Tensor) -> Tensor:
        return payload

    @override
    def copy(self, errors: Tensor, before: Tensor | None) -> Tensor:
        return blank(*errors.shape, dtype=errors.dtype) if before is None else before
