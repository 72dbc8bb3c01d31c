"""The table of all codecs, ``CODECS``, and the bfloat16 codec."""

from math import isfinite

import torch
from torch import Tensor
from typing_extensions import override

from offbeat.quantization.base import Codec, pieces
from offbeat.quantization.integers import Int2, Int4, Int8
from offbeat.quantization.kernels import BLOCK


class BFloat16(Codec):
    """Rounds to bfloat16, to nearest even. NaN and infinity are encoded as such."""

    block_bytes = 2 * BLOCK

    @override
    def encode(self, values: Tensor, rows: Tensor, *, keep_error: bool = True) -> None:
        for some_rows, numbers in pieces(rows):
            part = values[numbers]
            rounded = part.to(torch.bfloat16)
            rows[some_rows].view(torch.bfloat16).copy_(rounded.view(-1, BLOCK))
            if keep_error:
                part.sub_(rounded)
                # The error of a number that is not finite, or overflows in bfloat16, is not finite.
                # If the sum is finite, so are all errors. On a GPU, reading the sum would block.
                if part.device.type != "cpu" or not isfinite(part.sum().item()):
                    part.nan_to_num_(0.0, 0.0, 0.0)

    @override
    def decode(self, rows: Tensor, values: Tensor, *, add: bool = False) -> None:
        decoded = rows.view(torch.bfloat16).reshape(-1)[: values.numel()]
        if add:
            values.add_(decoded)
        else:
            values.copy_(decoded)


CODECS: dict[str, type[Codec]] = {"bfloat16": BFloat16, "int8": Int8, "int4": Int4, "int2": Int2}
