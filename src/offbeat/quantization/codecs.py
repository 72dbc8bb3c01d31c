"""The table of all codecs, ``CODECS``, and the bfloat16 codec."""

from math import isfinite

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.base import Codec, add_piece, pieces
from offbeat.quantization.integers import Int2, Int4, Int8
from offbeat.quantization.kernels import BLOCK


class BFloat16(Codec):
    """Rounds to bfloat16, to nearest even. NaN and infinity are encoded as such."""

    block_bytes = 2 * BLOCK

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
        numbers = payload.flatten().view(torch.bfloat16)[start:]
        for piece in pieces(values):
            part, rounded = values[piece], numbers[piece]
            add_piece(part, plus, piece)
            rounded.copy_(part)
            if keep_error:
                part.sub_(rounded)
                # The error of a number that is not finite, or overflows in bfloat16, is not finite.
                # If the sum is finite, so are all errors. On a GPU, reading the sum would block.
                if part.device.type != "cpu" or not isfinite(part.sum().item()):
                    part.nan_to_num_(0.0, 0.0, 0.0)

    @override
    def decode(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        values.copy_(payload.flatten().view(torch.bfloat16)[start : start + values.numel()])

    @override
    def add(self, payload: Tensor, values: Tensor, *, start: int = 0) -> None:
        numbers = payload.flatten().view(torch.bfloat16)[start:]
        for piece in pieces(values):
            values[piece].add_(numbers[piece])


CODECS: dict[str, type[Codec]] = {"bfloat16": BFloat16, "int8": Int8, "int4": Int4, "int2": Int2}
