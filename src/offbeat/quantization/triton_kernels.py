"""Triton kernels that encode updates, add them up, move P, and add to x, on a GPU.

Each function is one launch, whatever the number of tensors and workers, and none waits for the GPU.
A program of a kernel handles one block of 512 numbers. All kernels round after each operation, in
the order of the compiled loops in ``kernels.py`` and of the torch operations, so all three give the
same bits. Therefore products and sums are not fused, and sums of a block are folded.

Only ``kernels.triton_kernels`` imports this module, because Triton may be missing.
"""

# Constants of Triton are written in capitals.
# ruff: noqa: N803, SIM300

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from offbeat.quantization.block_format import (
    BLOCK,
    SMALLEST_SCALE,
    TERNARY_BYTES,
    TERNARY_THRESHOLD,
)
from offbeat.quantization.kernels import to_device

# Kernels read global variables only if these are constants of Triton.
_BLOCK = tl.constexpr(BLOCK)
_DOUBLINGS = tl.constexpr(BLOCK.bit_length() - 1)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
_TERNARY_BYTES = tl.constexpr(TERNARY_BYTES)
_TERNARY_THRESHOLD = tl.constexpr(TERNARY_THRESHOLD)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_ROUNDING = tl.constexpr(1.5 * 2.0**23)  # see the compiled loops

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Table(NamedTuple):
    """Addresses of the numbers of several tensors that form one vector, x.

    Attributes:
        tensors: The tensors: 1-D, contiguous, of one dtype: float32, float16 or bfloat16. The table
            keeps their memory alive.
        entries: int64, [tensors, 3]: address, and first and last + 1 position in the vector.
        ranges: int32, [blocks, 2]: first and last + 1 tensor with numbers of each block.
    """

    tensors: Sequence[Tensor]
    entries: Tensor
    ranges: Tensor


def make_table(tensors: Sequence[Tensor]) -> Table:
    """Return the table of ``tensors``, on their device. None of them is empty."""
    stops = np.cumsum([each.numel() for each in tensors])
    starts = stops - [each.numel() for each in tensors]
    entries = np.stack([[each.data_ptr() for each in tensors], starts, stops], axis=1)
    firsts = np.arange(0, stops[-1], BLOCK)
    ranges = np.stack(
        [np.searchsorted(stops, firsts, "right"), np.searchsorted(starts, firsts + BLOCK)], axis=1
    )
    device = tensors[0].device
    return Table(
        tensors,
        to_device(torch.from_numpy(entries), device),
        to_device(torch.from_numpy(ranges.astype(np.int32)), device),
    )


def encode(
    table: Table, error: Tensor | None, shared: Tensor, rows: Tensor, finite: Tensor, bits: int
) -> None:
    """rows ← Q(x − error − P), as ``kernels.encode`` does.

    Args:
        table: x.
        error: Rounding error of x, bfloat16, 1-D; None if there is none.
        shared: P: float32, 1-D.
        rows: Output: uint8, [blocks, bytes]. The last block is filled up with zeros.
        finite: bool, one element. Becomes False if a number is NaN or infinite.
        bits: Bits of an integer: 8, 4 or 2.
    """
    tensors = *_places(table, error, shared), shared, rows, finite
    options = error is not None, _DTYPES[table.tensors[0].dtype], bits
    _launch(_encode, rows, *tensors, len(shared), rows.stride(0), *options)


def add_up(updates: Tensor, errors: Tensor, rows: Tensor, bits: int) -> None:
    """rows ← Q(errors + the sum of the updates);  errors ← the quantization errors.

    ``updates`` are encoded: uint8, [workers, blocks, bytes], and are added in this order.
    ``errors`` is float32, 1-D, with at least as many blocks as ``rows``.
    """
    workers, stride = len(updates), updates.stride(0)
    _launch(_add_up, rows, updates, stride, errors, rows, workers, rows.stride(0), bits)


def move(
    summands: Sequence[Tensor],
    sent: Tensor,
    shift: Tensor,
    weight: float,
    shared: Tensor,
    velocity: Tensor,
    factors: tuple[float, float, float],
    bits: int,
) -> Tensor:
    """Move P by the mean of the updates, as ``kernels.land`` does.  shift ← Δ − u.

    Args:
        summands: One or two encoded vectors, whose sum is that of the updates: uint8, each
            [blocks, bytes]. The rows of a vector follow each other in memory.
        sent: u, encoded in the same way.
        shift: Output, float32, 1-D.
        weight: As in ``kernels.land``, like ``shared`` and ``velocity``.
        shared: P.
        velocity: v.
        factors: ``momentum``, ``direct`` and ``lookahead`` of ``kernels.land``.
        bits: Bits of an integer: 8, 4 or 2.

    Returns:
        ‖D‖² and ‖u‖² of each block: float32, [blocks, 2].
    """
    squares = torch.empty(len(sent), 2, dtype=torch.float32, device=shift.device)
    vectors = summands[0], summands[-1], sent, shift, shared, velocity, squares
    sizes = len(shift), sent.stride(0)
    several = len(summands) == 2, len(velocity) > 0
    _launch(_move, sent, *vectors, 1 / weight, *factors, *sizes, *several, bits)
    return squares


def add(table: Table, error: Tensor | None, values: Tensor) -> None:
    """Add ``values`` (float32, 1-D) to the vector of ``table``, computed in float32.

    ``error`` is the rounding error of x, as in ``encode``. It is subtracted from x, and replaced.
    """
    options = error is not None, _DTYPES[table.tensors[0].dtype]
    _launch(_add, table.ranges, *_places(table, error, values), values, len(values), *options)


def _places(table: Table, error: Tensor | None, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return table.entries, table.ranges, unused if error is None else error


def _launch(kernel: Any, blocks: Tensor, *arguments: Any) -> None:
    """Launch one program for each row of ``blocks``, on the device of ``blocks``."""
    with torch.cuda.device_of(blocks):
        # Fused products and sums would have other bits than those of a CPU.
        kernel[(len(blocks),)](*arguments, enable_fp_fusion=False)


@triton.jit
def _encode(
    entries,
    ranges,
    error,
    shared,
    rows,
    finite,
    elements,
    width,
    ERROR: tl.constexpr,
    DTYPE: tl.constexpr,
    BITS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    numbers = block * _BLOCK + tl.arange(0, _BLOCK)
    inside = numbers < elements
    x = tl.zeros((_BLOCK,), tl.float32)
    for index in range(tl.load(ranges + 2 * block), tl.load(ranges + 2 * block + 1)):
        address, here = _place(entries, index, numbers, DTYPE)
        x = tl.where(here, tl.load(address, mask=here, other=0.0).to(tl.float32), x)
    if ERROR:
        x -= tl.load(error + numbers, mask=inside, other=0.0).to(tl.float32)
    x -= tl.load(shared + numbers, mask=inside, other=0.0)
    _, usual = _quantize(x, rows + block * width, BITS)
    tl.store(finite, usual, mask=usual == 0)  # all programs that write, write the same


@triton.jit
def _add_up(updates, stride, errors, rows, workers, width, BITS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    numbers = block * _BLOCK + tl.arange(0, _BLOCK)
    total = tl.load(errors + numbers)
    row = updates + block * width
    for _ in range(workers):
        total += _decode(row, BITS)
        row += stride
    error, _ = _quantize(total, rows + block * width, BITS)
    tl.store(errors + numbers, error)


@triton.jit
def _move(
    first,
    second,
    sent,
    shift,
    shared,
    velocity,
    squares,
    inverse,
    momentum,
    direct,
    lookahead,
    elements,
    width,
    SEVERAL: tl.constexpr,
    VELOCITY: tl.constexpr,
    BITS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    numbers = block * _BLOCK + tl.arange(0, _BLOCK)
    inside = numbers < elements
    mean = _decode(first + block * width, BITS)
    if SEVERAL:
        mean += _decode(second + block * width, BITS)
    mean = tl.where(inside, mean * inverse, 0.0)
    own = tl.where(inside, _decode(sent + block * width, BITS), 0.0)
    tl.store(squares + 2 * block, _folded(mean * mean))
    tl.store(squares + 2 * block + 1, _folded(own * own))
    change = direct * mean
    if VELOCITY:
        new = mean + momentum * tl.load(velocity + numbers, mask=inside)
        tl.store(velocity + numbers, new, mask=inside)
        change += lookahead * new
    base = tl.load(shared + numbers, mask=inside)
    tl.store(shared + numbers, base + change, mask=inside)
    tl.store(shift + numbers, change - own, mask=inside)


@triton.jit
def _add(entries, ranges, error, values, elements, ERROR: tl.constexpr, DTYPE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    numbers = block * _BLOCK + tl.arange(0, _BLOCK)
    inside = numbers < elements
    value = tl.load(values + numbers, mask=inside, other=0.0)
    if ERROR:
        before = tl.load(error + numbers, mask=inside, other=0.0).to(tl.float32)
    for index in range(tl.load(ranges + 2 * block), tl.load(ranges + 2 * block + 1)):
        address, here = _place(entries, index, numbers, DTYPE)
        x = tl.load(address, mask=here, other=0.0).to(tl.float32)
        if ERROR:
            x -= before
        x += value
        rounded = _rounded(x, DTYPE)
        tl.store(address, rounded, mask=here)
        if ERROR:
            after = rounded.to(tl.float32) - x
            after = tl.where(tl.abs(after) < float("inf"), after, 0.0)
            tl.store(error + numbers, _rounded(after, tl.bfloat16), mask=here)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """Return float32 numbers in another dtype. Ties go to even."""
    if DTYPE == tl.bfloat16:  # with integers, because Triton's interpreter rounds towards zero
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + 0x7FFF + (bits >> 16 & 1) >> 16
        bits = tl.where(x == x, bits, 0x7FC0)  # NaN
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def _place(entries, index, numbers, DTYPE: tl.constexpr):
    """Return the addresses of numbers in one tensor of a table, and which of them are in it."""
    entry = entries + 3 * index
    start = tl.load(entry + 1)
    here = (numbers >= start) & (numbers < tl.load(entry + 2))
    return tl.load(entry).to(tl.pointer_type(DTYPE)) + (numbers - start), here


@triton.jit
def _folded(x):
    """Return the sum of a block: the second half is added to the first, again and again."""
    for _ in tl.static_range(_DOUBLINGS):
        # Of two numbers, so the order in which Triton adds does not matter.
        x = tl.sum(tl.reshape(x, (2, x.shape[0] // 2)), axis=0)
    return tl.sum(x, axis=0)


@triton.jit
def _quantize(x, row, BITS: tl.constexpr):
    """Store a block of numbers as a row. Returns the quantization errors, and if all are finite."""
    absolute = tl.abs(x)
    pattern = tl.max(absolute.to(tl.int32, bitcast=True), axis=0)  # ignores no NaN
    finite = pattern < _INFINITY_BITS
    scale = pattern.to(tl.float32, bitcast=True)
    threshold = 0.0
    if BITS == 2:
        small = absolute * (1 / _BLOCK)
        threshold = _folded(small) * _TERNARY_THRESHOLD
        chosen = absolute >= threshold
        number = tl.sum(chosen.to(tl.int32), axis=0)
        share = tl.maximum(number, 1).to(tl.float32) * (1 / _BLOCK)
        mean = tl.div_rn(_folded(tl.where(chosen, small, 0.0)), share)
        scale = tl.where(mean < scale, mean, scale)  # 0 if no number is chosen
    else:
        scale = tl.div_rn(scale, tl.full((), 2 ** (BITS - 1) - 1, tl.float32))
    scale = tl.where(scale >= _SMALLEST_SCALE, scale, 0.0)
    scale = tl.where(finite, scale, float("nan"))
    usual = scale > 0
    if BITS == 2:
        integers = (x >= threshold).to(tl.int32) - (x <= -threshold).to(tl.int32)
    else:
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), tl.where(usual, scale, 1.0))
        # The lowest bits of the sum are the integer; see the compiled loops.
        integers = (x * inverse + _ROUNDING).to(tl.int32, bitcast=True) << (32 - BITS)
        integers = integers >> (32 - BITS)
    integers = tl.where(usual, integers, 0)
    tl.store(row.to(tl.pointer_type(tl.float32)), scale)
    _pack(integers, row + 4, BITS)
    error = tl.where(finite, x - integers.to(tl.float32) * tl.where(usual, scale, 0.0), 0.0)
    return error, finite


@triton.jit
def _pack(integers, fields, BITS: tl.constexpr):
    if BITS == 8:
        tl.store(fields + tl.arange(0, _BLOCK), integers.to(tl.uint8))
    elif BITS == 4:
        halves = tl.reshape(integers & 15, (2, _BLOCK // 2))
        packed = tl.sum(halves << 4 * tl.arange(0, 2)[:, None], axis=0)
        tl.store(fields + tl.arange(0, _BLOCK // 2), packed.to(tl.uint8))
    else:
        j = tl.arange(0, 128)
        digits = tl.zeros((128,), tl.int32)
        for k in tl.static_range(5):
            place = k * _TERNARY_BYTES + j
            integer = tl.gather(integers, tl.minimum(place, _BLOCK - 1), axis=0)
            digits = 3 * digits + tl.where(place < _BLOCK, integer + 1, 0)
        packed = digits + ((13 * digits + 242) * 135 >> 15)
        tl.store(fields + j, packed.to(tl.uint8), mask=j < _TERNARY_BYTES)


@triton.jit
def _decode(row, BITS: tl.constexpr):
    """Return the numbers of a row."""
    i = tl.arange(0, _BLOCK)
    fields = row + 4
    if BITS == 8:
        integers = tl.load(fields + i).to(tl.int8, bitcast=True).to(tl.int32)
    elif BITS == 4:
        half = tl.load(fields + i % (_BLOCK // 2)).to(tl.int32) >> 4 * (i // (_BLOCK // 2))
        integers = ((half & 15) ^ 8) - 8  # in two's complement
    else:
        k = i // _TERNARY_BYTES
        power = tl.where(k < 2, tl.where(k < 1, 1, 3), tl.where(k < 3, 9, tl.where(k < 4, 27, 81)))
        field = tl.load(fields + i % _TERNARY_BYTES).to(tl.int32)
        integers = ((field * power & 255) * 3 >> 8) - 1
    return integers.to(tl.float32) * tl.load(row.to(tl.pointer_type(tl.float32)))
