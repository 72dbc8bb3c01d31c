"""The Triton kernels have the bits of the compiled loops and of the torch operations.

They run in Triton's interpreter, on the CPU. It shows values, and neither speed nor what a compiler
makes of products and sums. Not in ``make test``, which has no Triton:

    TRITON_INTERPRET=1 python -m pytest tests/quantization/test_triton.py
"""

import os

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.quantization.block_format import BLOCK
from offbeat.quantization.codecs import CODECS, Codec
from offbeat.quantization.kernels import land

pytest.importorskip("triton", reason="not installed: pip install triton==3.7.1")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before torch is imported", allow_module_level=True)

from benchmarks import triton_kernels as kernels

SIZES = (3, 700, 1, 1, 512, 300, 9)
CODEC = pytest.mark.parametrize("codec", [kind() for kind in CODECS.values()], ids=list(CODECS))


def normal(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def encoded(codec: Codec, values: Tensor) -> Tensor:
    """The rows of ``values``, filled up with zeros, by the codec."""
    blocks = -(-len(values) // BLOCK)
    rows = torch.empty(blocks, codec.block_bytes, dtype=torch.uint8)
    codec.encode(torch.nn.functional.pad(values, (0, blocks * BLOCK - len(values))), rows)
    return rows


@CODEC
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("odd", [None, float("nan"), float("inf"), 0.0])
def test_encode_gathers_from_many_tensors(codec: Codec, dtype: torch.dtype, odd: float) -> None:
    """One launch for seven tensors, which divide blocks anywhere."""
    tensors = [normal(size, seed=size).to(dtype) for size in SIZES]
    if odd is not None:
        tensors[1][:600] = odd
    shared = normal(sum(SIZES)) * (odd != 0.0)
    want = encoded(codec, torch.cat(tensors).float() - shared)
    rows = torch.full_like(want, 7)
    kernels.encode(kernels.make_table(tensors), shared, rows, codec.bits)
    assert torch.equal(rows, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_add_changes_many_tensors(dtype: torch.dtype) -> None:
    """Without bfloat16, which the interpreter rounds towards zero."""
    tensors = [normal(size, seed=size).to(dtype) for size in SIZES]
    change = normal(sum(SIZES))
    want = [t + c for t, c in zip(tensors, change.split(SIZES), strict=True)]
    kernels.add(kernels.make_table(tensors), change)
    assert all(torch.equal(t, w.to(dtype)) for t, w in zip(tensors, want, strict=True))


@CODEC
@pytest.mark.parametrize("workers", range(1, 10))
def test_a_part_moves_as_with_the_compiled_loops(codec: Codec, workers: int) -> None:
    """Sum, second stage and landing of a part: three launches, whatever the number of workers."""
    size = 3 * BLOCK - 100
    updates = torch.stack([encoded(codec, normal(size, seed=k)) for k in range(workers)])
    errors = 0.1 * normal(3 * BLOCK, seed=99)
    total, part = errors.clone(), torch.empty(3 * BLOCK)
    for rows in updates:
        codec.decode(rows, part)
        total += part
    want = torch.empty_like(updates[0])
    codec.encode(total, want)  # leaves the quantization errors in ``total``
    rows = torch.empty_like(want)
    kernels.add_up(updates, errors, rows, codec.bits)
    assert torch.equal(rows, want)
    assert torch.equal(errors, total)

    shared, velocity, shift = normal(size, seed=50), normal(size, seed=51), torch.empty(size)
    right = shared.clone(), velocity.clone(), shift.clone(), torch.empty(size)
    codec.decode(rows, right[2])
    codec.decode(updates[0], right[3])
    sums, factors = np.zeros(2), (0.9, 0.3, 1.1)
    by_loop = [tensor.numpy() for tensor in (right[2], right[3])]
    land(*by_loop, float(workers), right[0].numpy(), right[1].numpy(), *factors, sums)
    squares = kernels.move(
        [rows], updates[0], shift, float(workers), shared, velocity, *factors, codec.bits
    )
    for found, expected in zip((shared, velocity, shift), right[:3], strict=True):
        assert torch.equal(found, expected)
    torch.testing.assert_close(squares.sum(0), torch.from_numpy(sums), rtol=1e-5, atol=0)
