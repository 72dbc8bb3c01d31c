"""Inner loops of quantization and of model updates, compiled with numba if it is installed.

Each loop makes one pass over memory where torch operations make about ten.

The *global model P* is a copy of the model that must have the same bits on all workers.
``land`` applies a mean update D to it. Without numba, torch operations replace the loops. On a CPU
``land`` and ``decode`` give the same bits as these, so only some of the workers may have numba.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.quantization.block_format import (
    BLOCK,
    SMALLEST_SCALE,
    TERNARY_BYTES,
    TERNARY_THRESHOLD,
)

logger = logging.getLogger("offbeat")
Floats = NDArray[np.float32]
Rows = NDArray[np.uint8]
"""Two dimensions."""

_INFINITY_BITS = 0x7F800000  # bit pattern of float32 infinity; those of NaN are larger
_ROUNDING = np.float32(1.5 * 2.0**23)
"""Adding this to a small float32 rounds it to an integer, because the sum has no fraction bits.

The lowest bits of the sum are the integer in two's complement.
"""


def encode(values: Floats, rows: Rows, bits: int, keep_error: bool) -> None:
    """Quantize blocks to integers; see ``block_format.py``.

    Args:
        values: Numbers of whole blocks.
        rows: Output, one row per block.
        bits: Bits of an integer: 8, 4 or 2.
        keep_error: True replaces ``values`` by the quantization errors. False does not change them.
    """
    levels, mask = np.float32(2 ** (bits - 1) - 1), 2**bits - 1
    count, width = (5, TERNARY_BYTES) if bits == 2 else (8 // bits, BLOCK * bits // 8)
    digits = np.empty(TERNARY_BYTES, np.int32)
    raw = values.view(np.int32)
    shifted = np.empty(BLOCK, np.float32)
    integers = shifted.view(np.int32)
    absolutes = np.empty(BLOCK, np.float32)
    patterns = absolutes.view(np.int32)
    folded = np.empty(BLOCK, np.float32)
    for block in range(values.size // BLOCK):
        start = block * BLOCK
        # Of two absolute values, the larger one has the larger bit pattern, read as an integer.
        largest = np.int32(0)
        for i in range(start, start + BLOCK):
            absolute = np.int32(raw[i] & 0x7FFFFFFF)
            largest = absolute if absolute > largest else largest
        finite = largest < np.int32(_INFINITY_BITS)
        scale = np.array([largest], np.int32).view(np.float32)[0] / levels
        threshold = np.float32(0)
        if bits == 2 and finite:
            for i in range(BLOCK):
                patterns[i] = raw[start + i] & 0x7FFFFFFF
            # First pass: the mean of all absolute values, which gives the threshold. Second pass:
            # the sum of the values at or above the threshold, divided by BLOCK.
            for chosen in range(2):
                for i in range(BLOCK):
                    kept = absolutes[i] >= threshold
                    folded[i] = absolutes[i] * np.float32(1 / BLOCK) if kept else np.float32(0)
                length = BLOCK // 2
                while length:
                    low, high = folded[:length], folded[length : 2 * length]
                    for i in range(length):
                        low[i] += high[i]
                    length //= 2
                if chosen == 0:
                    threshold = folded[0] * np.float32(TERNARY_THRESHOLD)
            number = np.int32(0)
            for i in range(BLOCK):
                number += np.int32(absolutes[i] >= threshold)
            scale = min(folded[0] / (np.float32(number) / np.float32(BLOCK)), scale)
        if not finite:
            scale = np.float32(np.nan)
        elif not scale >= np.float32(SMALLEST_SCALE):  # also true for 0/0, if no number is chosen
            scale = np.float32(0)
        usual = finite and scale > np.float32(0)
        inverse = np.float32(1) / scale if usual else np.float32(0)
        row = rows[block]
        row[:4].view(np.float32)[0] = scale
        if not usual:
            for i in range(BLOCK):
                integers[i] = np.int32(0)
        elif bits == 2:
            for i in range(BLOCK):
                value = values[start + i]
                integers[i] = np.int32(value >= threshold) - np.int32(value <= -threshold)
        else:
            for i in range(BLOCK):
                shifted[i] = values[start + i] * inverse + _ROUNDING
        fields = row[4 : 4 + width]
        if bits == 2:
            for j in range(width):
                digits[j] = integers[j] + np.int32(1)
            for k in range(1, count):
                part = integers[k * width : (k + 1) * width]  # the last one is shorter
                for j in range(width):
                    digits[j] *= np.int32(3)
                for j in range(part.size):
                    digits[j] += part[j] + np.int32(1)
            for j in range(width):
                # d·256/243, rounded up; see ``block_format``. 135/2¹⁵ is 1/243, exact enough here.
                d = digits[j]
                more = (d * np.int32(13) + np.int32(242)) * np.int32(135) >> np.int32(15)
                fields[j] = np.uint8(d + more)
        else:
            for j in range(width):
                fields[j] = np.uint8(integers[j] & mask)
            for k in range(1, count):
                part, up = integers[k * width : (k + 1) * width], k * bits
                for j in range(width):
                    fields[j] |= np.uint8((part[j] & mask) << up)
        if not keep_error:
            continue
        if not finite:
            for i in range(BLOCK):
                values[start + i] = np.float32(0)
        elif usual and bits == 2:
            for i in range(BLOCK):
                values[start + i] -= np.float32(integers[i]) * scale
        elif usual:
            for i in range(BLOCK):
                values[start + i] -= (shifted[i] - _ROUNDING) * scale


def decode(values: Floats, rows: Rows, bits: int, add: bool) -> None:
    """Decode ``rows``, the output of ``encode``.

    Args:
        values: Output. May end inside the last block.
        rows: One row per block.
        bits: Bits of an integer: 8, 4 or 2.
        add: True adds the numbers to ``values``. False replaces ``values``.
    """
    ternary = bits == 2
    count, width = (5, TERNARY_BYTES) if ternary else (8 // bits, BLOCK * bits // 8)
    # Each integer is shifted to the highest bits of a byte, which gives the byte its sign. ``unit``
    # removes the factor 2^(8 − bits) of this shift.
    highest = 0xFF << (8 - bits) & 0xFF
    unit = np.float32(1 if ternary else 2.0 ** (bits - 8))
    for block in range(rows.shape[0]):
        row, end = rows[block], min(values.size, (block + 1) * BLOCK)
        step, packed = row[:4].view(np.float32)[0] * unit, row[4 : 4 + width]
        for k in range(count):
            up, power, start = 8 - bits - k * bits, np.int32(3**k), block * BLOCK + k * width
            length = min(width, max(0, end - start))
            part, fields = values[start : start + length], packed[:length]
            if ternary:
                for j in range(length):
                    digit = (fields[j] * power & np.int32(255)) * np.int32(3) >> np.int32(8)
                    number = np.float32(digit - np.int32(1)) * step
                    part[j] = part[j] + number if add else number
            elif add:
                for j in range(length):
                    part[j] += np.float32(np.int8(fields[j] << up & highest)) * step
            else:
                for j in range(length):
                    part[j] = np.float32(np.int8(fields[j] << up & highest)) * step


def land(
    shift: Floats,
    sent: Floats,
    weight: float,
    shared: Floats,
    velocity: Floats,
    momentum: float,
    direct: float,
    lookahead: float,
    squares: NDArray[np.float64],
) -> None:
    """Move P by D, the mean of the updates.

        v ← momentum·v + D
        Δ = direct·D + lookahead·v
        P ← P + Δ
        shift ← Δ − u        for the local model, which already contains u

    Args:
        shift: The sum of the updates, weight·D. Overwritten. May end inside a block.
        sent: u, this worker's update.
        weight: Sum of the weights of all workers.
        shared: P. Updated in place.
        velocity: v, updated in place. If the array is empty, Δ = direct·D.
        momentum: Factor of the old v.
        direct: Factor of D in Δ.
        lookahead: Factor of v in Δ.
        squares: Two elements, to which ‖D‖² and ‖u‖² are added.
    """
    keep, near, forward = np.float32(momentum), np.float32(direct), np.float32(lookahead)
    inverse = np.float32(1.0 / weight)
    folded = np.zeros(BLOCK, np.float32)
    for start in range(0, shift.size, BLOCK):
        stop = min(start + BLOCK, shift.size)
        mean, own, base = shift[start:stop], sent[start:stop], shared[start:stop]
        for i in range(mean.size):
            mean[i] *= inverse
        for index in range(2):
            values = mean if index == 0 else own
            for i in range(values.size):
                folded[i] = values[i] * values[i]
            for i in range(values.size, BLOCK):
                folded[i] = np.float32(0)
            # The second half is added to the first half, again and again, which compiles to vector
            # instructions, unlike a running sum.
            half = BLOCK // 2
            while half:
                low, high = folded[:half], folded[half : 2 * half]
                for i in range(half):
                    low[i] += high[i]
                half //= 2
            squares[index] += folded[0]
        if velocity.size:
            moving = velocity[start:stop]
            for i in range(mean.size):
                new = mean[i] + keep * moving[i]
                moving[i] = new
                mean[i] = near * mean[i] + forward * new
        else:
            for i in range(mean.size):
                mean[i] = near * mean[i]
        # A separate loop, because a loop over five arrays does not compile to vector instructions.
        for i in range(mean.size):
            base[i] += mean[i]
            mean[i] = mean[i] - own[i]


@dataclass(frozen=True)
class Kernels:
    """The compiled functions. Each has the arguments of the Python function of the same name."""

    encode: Callable[..., None]
    decode: Callable[..., None]
    land: Callable[..., None]


@cache
def kernels() -> Kernels | None:
    """Return the compiled functions. None if numba is missing or ``OFFBEAT_KERNELS=0`` is set.

    Also None, with a warning, if numba cannot be imported or cannot compile. For example, its
    import fails if the script has replaced ``builtins.print``. Compiling takes some seconds. The
    compiled code is stored on disk if possible.
    """
    if os.environ.get("OFFBEAT_KERNELS") == "0" or find_spec("numba") is None:
        return None
    try:
        return _compiled_kernels()
    except Exception as error:
        logger.warning(
            "numba fails (%s: %s), so slower torch operations quantize the messages: import numba "
            "at the top of the script, or set OFFBEAT_KERNELS=0",
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return None


def _compiled_kernels() -> Kernels:
    import numba

    floats, rows, number = numba.float32[::1], numba.uint8[:, ::1], numba.float64
    codec_signature = numba.void(floats, rows, numba.int64, numba.boolean)
    land_signature = numba.void(
        *(floats, floats, number, floats, floats, number, number, number, numba.float64[::1])
    )
    return Kernels(
        _compiled(encode, codec_signature),
        _compiled(decode, codec_signature),
        _compiled(land, land_signature),
    )


def kernels_for(*tensors: Tensor) -> Kernels | None:
    """Return ``kernels()`` if all tensors are contiguous float32 tensors on the CPU, else None."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
            return None
    return kernels()


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Return a copy on ``device`` of ``numbers``, which are on the CPU. Does not wait for a GPU."""
    if device.type == "cuda":  # the host would wait for a copy from memory that is not pinned
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def _compiled(function: Callable[..., None], signature: Any) -> Callable[..., None]:
    import numba

    # The numpy error model makes a division by zero infinite, as in torch. With nogil, the threads
    # of the network run at the same time.
    options: Any = {"nogil": True, "error_model": "numpy"}
    try:
        return cast("Callable[..., None]", numba.njit(signature, cache=True, **options)(function))
    except RuntimeError:  # the compiled code cannot be stored, for lack of a writable directory
        return cast("Callable[..., None]", numba.njit(signature, **options)(function))
