"""The inner loops of rounding and landing, compiled where numba is installed.

Each does in one pass over memory what takes about ten with the operations of torch. What all
workers have to compute alike (``decode``, ``move`` and ``land``) gives the same bits as those do,
so that not all of them need numba.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK = 512
"""Numbers a block; integers of a block share one scale."""
SMALLEST = 2.0**-100
"""A smaller scale counts as zero: its inverse would overflow."""
_LANES = 16
"""Squares of a block are folded in halves to so many sums: a running sum is no vector operation."""
_INFINITE = 0x7F800000  # bits of a float32; those of a larger absolute value are NaN
_ROUNDING = np.float32(1.5 * 2.0**23)  # has no fraction: adding it rounds to nearest even


def encode(values: Floats, scales: Floats, packed: Bytes, bits: int, keep_error: bool) -> None:
    """Round blocks to integers of so many bits; see ``codec.Integers``.

    Args:
        values: Whole blocks; they become what rounding took away.
        scales: One for each block.
        packed: ``BLOCK * bits / 8`` bytes for each block.
        bits: 8, 4 or 2.
        keep_error: Whether ``values`` are written.
    """
    most, mask = np.float32(2 ** (bits - 1) - 1), 2**bits - 1
    count, width = 8 // bits, BLOCK * bits // 8
    raw = values.view(np.int32)
    shifted = np.empty(BLOCK, np.float32)
    integers = shifted.view(np.int32)
    for block in range(values.size // BLOCK):
        start = block * BLOCK
        largest = np.int32(0)  # of the absolute values, as integers: these are ordered alike
        for i in range(start, start + BLOCK):
            absolute = np.int32(raw[i] & 0x7FFFFFFF)
            largest = absolute if absolute > largest else largest
        finite = largest < np.int32(_INFINITE)
        scale = np.array([largest], np.int32).view(np.float32)[0] / most
        if not finite:
            scale = np.float32(np.nan)
        elif scale < np.float32(SMALLEST):
            scale = np.float32(0)
        usual = finite and scale > np.float32(0)
        inverse = np.float32(1) / scale if usual else np.float32(0)
        scales[block] = scale
        for i in range(BLOCK):
            shifted[i] = values[start + i] * inverse + _ROUNDING
        if not finite:
            for i in range(BLOCK):
                integers[i] = np.int32(0)
        fields = packed[block * width : (block + 1) * width]
        for j in range(width):
            fields[j] = np.uint8(integers[j] & mask)
        for k in range(1, count):
            part, up = integers[k * width : (k + 1) * width], k * bits
            for j in range(width):
                fields[j] |= np.uint8((part[j] & mask) << up)
        if keep_error:
            if finite:
                for i in range(BLOCK):
                    values[start + i] -= (shifted[i] - _ROUNDING) * scale
            else:
                for i in range(BLOCK):
                    values[start + i] = np.float32(0)


def decode(values: Floats, scales: Floats, packed: Bytes, bits: int, add: bool) -> None:
    """Values ← the numbers of a payload, or values + them; may end inside the last block."""
    count, width = 8 // bits, BLOCK * bits // 8
    highest = 0xFF << (8 - bits) & 0xFF  # there a field has its sign
    unit = np.float32(2.0 ** (bits - 8))
    for block in range(scales.size):
        step, place = scales[block] * unit, block * width
        for k in range(count):
            up, start = 8 - bits - k * bits, block * BLOCK + k * width
            there = min(width, max(0, values.size - start))
            part, fields = values[start : start + there], packed[place : place + there]
            if add:
                for j in range(there):
                    part[j] += np.float32(np.int8(fields[j] << up & highest)) * step
            else:
                for j in range(there):
                    part[j] = np.float32(np.int8(fields[j] << up & highest)) * step


def move(
    shift: Floats,
    sent: Floats,
    base: Floats,
    velocity: Floats,
    fade: float,
    ahead: float,
    lr: float,
) -> None:
    """A landing: P ← P + Δ, v ← μ·v + D, and ``shift``, which is D, becomes Δ − u.

    Args:
        shift: D.
        sent: u.
        base: P.
        velocity: v; empty if there is none.
        fade: μ.
        ahead: a: Δ = lr·(D + a·v).
        lr: See there.
    """
    keep, forward, rate = np.float32(fade), np.float32(ahead), np.float32(lr)
    if velocity.size:
        for i in range(shift.size):
            new = shift[i] + keep * velocity[i]
            velocity[i] = new
            step = (shift[i] + forward * new) * rate
            base[i] += step
            shift[i] = step - sent[i]
    else:
        for i in range(shift.size):
            step = shift[i] * rate
            base[i] += step
            shift[i] = step - sent[i]


def measure(values: Floats, squares: NDArray[np.float64], index: int) -> None:
    """Add ‖values‖² to ``squares[index]``: the same bits, however whole blocks are divided."""
    folded = np.empty(BLOCK, np.float32)
    for start in range(0, values.size, BLOCK):
        there = min(BLOCK, values.size - start)
        block = values[start : start + there]
        for i in range(there):
            folded[i] = block[i] * block[i]
        for i in range(there, BLOCK):
            folded[i] = np.float32(0)
        width = BLOCK // 2
        while width >= _LANES:
            low, high = folded[:width], folded[width : 2 * width]
            for i in range(width):
                low[i] += high[i]
            width //= 2
        for lane in range(_LANES):
            squares[index] += folded[lane]


def land(
    payloads: NDArray[np.uint8],
    bits: int,
    sent: Bytes,
    sent_bits: int,
    first: int,
    weight: float,
    shift: Floats,
    base: Floats,
    velocity: Floats,
    fade: float,
    ahead: float,
    lr: float,
    squares: NDArray[np.float64],
) -> None:
    """``decode`` and ``move`` at once, a block after the other, which stays in the nearest cache.

    Args:
        payloads: A row of bytes each, to be added up in this order; see ``codec.Integers``.
        bits: Of their integers.
        sent: The payload of u.
        sent_bits: Of its integers.
        first: The block of all these payloads that is the first of ``shift``.
        weight: D is the sum, divided by this.
        shift: Becomes Δ − u; may end inside a block.
        base: As in ``move``.
        velocity: As in ``move``.
        fade: As in ``move``.
        ahead: As in ``move``.
        lr: As in ``move``.
        squares: ‖D‖² and ‖u‖² are added to it, as ``measure`` does.
    """
    keep, forward, rate = np.float32(fade), np.float32(ahead), np.float32(lr)
    divisor = np.float32(weight)
    mean, own = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    folded = np.empty(BLOCK, np.float32)
    rows = payloads.shape[0]
    for start in range(0, shift.size, BLOCK):
        there, block = min(BLOCK, shift.size - start), first + start // BLOCK
        for row in range(rows + 1):
            raw = payloads[row] if row < rows else sent
            values, depth = (mean, bits) if row < rows else (own, sent_bits)
            size, width = 4 + BLOCK * depth // 8, BLOCK * depth // 8
            highest = 0xFF << (8 - depth) & 0xFF
            scale = raw[4 * block : 4 * block + 4].view(np.float32)[0]
            step = scale * np.float32(2.0 ** (depth - 8))
            place = raw.size // size * 4 + block * width
            fields = raw[place : place + width]
            for k in range(8 // depth):
                up = 8 - depth - k * depth
                part = values[k * width : (k + 1) * width]
                if 0 < row < rows:
                    for j in range(width):
                        part[j] += np.float32(np.int8(fields[j] << up & highest)) * step
                else:
                    for j in range(width):
                        part[j] = np.float32(np.int8(fields[j] << up & highest)) * step
        for i in range(there):
            mean[i] /= divisor
        for i in range(there, BLOCK):  # not of the tensor
            mean[i] = own[i] = np.float32(0)
        for index in range(2):  # as in ``measure``
            values = mean if index == 0 else own
            for i in range(BLOCK):
                folded[i] = values[i] * values[i]
            width = BLOCK // 2
            while width >= _LANES:
                low, high = folded[:width], folded[width : 2 * width]
                for i in range(width):
                    low[i] += high[i]
                width //= 2
            for lane in range(_LANES):
                squares[index] += folded[lane]
        moved, shared = shift[start : start + there], base[start : start + there]
        if velocity.size:
            kept = velocity[start : start + there]
            for i in range(there):
                new = mean[i] + keep * kept[i]
                kept[i] = new
                mean[i] = (mean[i] + forward * new) * rate
        else:
            for i in range(there):
                mean[i] *= rate
        # Apart, for a loop over five arrays would not be compiled to vector instructions.
        for i in range(there):
            shared[i] += mean[i]
            moved[i] = mean[i] - own[i]


@dataclass(frozen=True)
class Kernels:
    """The compiled loops."""

    encode: Callable[..., None]
    decode: Callable[..., None]
    move: Callable[..., None]
    land: Callable[..., None]
    measure: Callable[..., None]


@cache
def kernels() -> Kernels | None:
    """Those loops; None without numba, or if the environment says ``OFFBEAT_KERNELS=0``.

    Compiles them the first time on a machine, in some seconds; they are kept on its disk.
    """
    if os.environ.get("OFFBEAT_KERNELS") == "0":
        return None
    try:
        import numba
    except ImportError:
        return None
    floats, raw, number = numba.float32[::1], numba.uint8[::1], numba.float64
    payload = numba.void(floats, floats, raw, numba.int64, numba.boolean)
    landing = numba.void(floats, floats, floats, floats, number, number, number)
    count, rows, pair = numba.int64, numba.uint8[:, ::1], numba.float64[::1]
    whole = numba.void(
        *(rows, count, raw, count, count, number),
        *(floats, floats, floats, number, number, number, pair),
    )
    return Kernels(
        _compiled(encode, payload),
        _compiled(decode, payload),
        _compiled(move, landing),
        _compiled(land, whole),
        _compiled(measure, numba.void(floats, pair, count)),
    )


def _compiled(function: Callable[..., None], signature: Any) -> Callable[..., None]:
    import numba

    # IEEE arithmetic as written, for the same bits; nogil, for the threads of the network.
    options: Any = {"nogil": True, "error_model": "numpy"}
    try:
        return cast("Callable[..., None]", numba.njit(signature, cache=True, **options)(function))
    except RuntimeError:  # nowhere to keep it
        return cast("Callable[..., None]", numba.njit(signature, **options)(function))
