"""Cost of quantization: each codec, on one thread.

All times are compared with a copy of the same float32 numbers in the same run.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Result, compare, interleave
from offbeat.quantization.block_format import BLOCK
from offbeat.quantization.codecs import CODECS, PIECE_BLOCKS, Codec, pieces

MILLIONS = 8


def round_all(codec: Codec, x: Tensor, rows: Tensor) -> None:
    """Quantize piece after piece from a copy, as a launch does."""
    scratch = torch.empty(PIECE_BLOCKS * BLOCK, device=x.device)
    for some_rows, numbers in pieces(rows):
        values = scratch[: len(rows[some_rows]) * BLOCK]
        values.copy_(x[numbers])
        codec.encode(values, rows[some_rows], keep_error=False)


def codecs(repetitions: int, device: str = "cpu", benchmark: str = "codec") -> list[Result]:
    """Return the time of each codec's operations on ``device``, over that of a copy."""
    elements = MILLIONS * 2**20
    x, errors, out = torch.randn(3, elements, device=device)
    functions: dict[str, Callable[[], Any]] = {"copy": lambda: out.copy_(x)}
    for precision, kind in CODECS.items():
        made = kind()
        payload = torch.empty(elements // BLOCK, made.block_bytes, dtype=torch.uint8, device=device)
        made.encode(x.clone(), payload)
        functions |= {
            f"{precision}: round": lambda c=made, p=payload: round_all(c, x, p),
            f"{precision}: encode": lambda c=made, p=payload: c.encode(errors.copy_(x), p),
            f"{precision}: decode": lambda c=made, p=payload: c.decode(p, out),
            f"{precision}: add": lambda c=made, p=payload: c.decode(p, out, add=True),
        }
    if device == "cuda":
        functions = {name: partial(_completely, each) for name, each in functions.items()}
    seconds = interleave(functions, repetitions)
    where = "one thread" if device == "cpu" else device
    config = {"elements": elements, "repetitions": repetitions, "threads": 1, "device": device}
    found = []
    for name in functions:
        if name == "copy":
            continue
        ratio, details = compare(seconds[name], seconds["copy"])
        text = f"{name} / a copy of the float32 numbers, {where}: seconds"
        found.append(Result(benchmark, text, ratio, None, "", config, details))
    return found


def _completely(function: Callable[[], Any]) -> None:
    function()
    torch.cuda.synchronize()


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = codecs(5 if quick else 30)
    torch.set_num_threads(threads)
    return found
