"""The Triton kernels have the bits of the compiled loops and of the torch operations.

They run in Triton's interpreter, on the CPU. It shows values, and neither speed nor what a compiler
makes of products and sums; ``test_triton_compiled.py`` reads that. ``make triton`` runs both.
"""

import copy
import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from loops import attach
from offbeat.averaging.flat import Flat, Space
from offbeat.averaging.flight import Flight, OuterStep
from offbeat.quantization.block_format import BLOCK
from offbeat.quantization.codecs import CODECS, Codec
from problems import flat, make_batch, make_wide, train_step
from worlds import simulated

pytest.importorskip("triton", reason="not installed: pip install triton==3.7.1")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1 before torch is imported", allow_module_level=True)

from offbeat.quantization import gpu, message
from offbeat.quantization import kernels as compiled
from offbeat.quantization import triton_kernels as kernels

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
    update = torch.cat(tensors).float()
    error = None
    if dtype != torch.float32:
        error = 0.01 * normal(sum(SIZES), seed=1).bfloat16() * (odd != 0.0)
        update -= error
    want = encoded(codec, update - shared)
    rows, finite = torch.full_like(want, 7), torch.ones((), dtype=torch.bool)
    kernels.encode(kernels.make_table(tensors), error, shared, rows, finite, codec.bits)
    assert torch.equal(rows, want)
    assert bool(finite) == (odd in (None, 0.0))


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # numpy's
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("odd", [None, float("nan"), float("inf"), 1e30])
def test_add_changes_many_tensors_and_their_rounding_error(dtype: torch.dtype, odd: float) -> None:
    space = Space(Flat([normal(s, seed=s).to(dtype) for s in SIZES]), shared=False, velocity=False)
    space.make_error()
    if space.error is not None:
        space.error.copy_(0.01 * normal(sum(SIZES), seed=1))
    change = normal(sum(SIZES))
    if odd is not None:
        change[[1, 900]] = odd
    other = copy.deepcopy(space)
    space.add(0, change)
    other.add(0, change, kernels)
    for mine, theirs in zip(space.x.tensors, other.x.tensors, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=0, equal_nan=True)
    if space.error is not None and other.error is not None:
        assert torch.equal(space.error, other.error)


@CODEC
@pytest.mark.parametrize("workers", range(1, 10))
@pytest.mark.parametrize("reference", ["numba", "torch"])
def test_a_part_moves_as_with_the_reference(
    codec: Codec, workers: int, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sum, second stage and landing of a part: three launches, whatever the number of workers."""
    loops = None if reference == "torch" else compiled.kernels()
    assert (loops is None) == (reference == "torch")
    monkeypatch.setattr(compiled, "kernels", lambda: loops)
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
    change, own, new, moving = right[2], right[3], *right[:2]
    if loops is None:
        step = OuterStep(*factors)
        Flight._apply(SimpleNamespace(measures=False), change, own, new, moving, step, workers)
    else:
        vectors = new.numpy(), moving.numpy()
        loops.land(change.numpy(), own.numpy(), float(workers), *vectors, *factors, sums)
    squares = kernels.move(
        [rows], updates[0], shift, float(workers), shared, velocity, factors, codec.bits
    )
    for found, expected in zip((shared, velocity, shift), right[:3], strict=True):
        assert torch.equal(found, expected)
    if loops is not None:  # torch operations round the squares differently
        assert np.array_equal(np.add.accumulate(squares.double().numpy())[-1], sums)


def train(rank: int, size: int, wire: str, dtype: torch.dtype) -> Tensor:
    """Train a model with one transposed parameter, and one with gaps in memory."""
    model = make_wide(rank).to(dtype)
    for layer, memory in ((model[2], torch.empty(64, 64).t()), (model[4], torch.empty(64, 128))):
        weight = memory.to(dtype)[:, :: memory.shape[1] // 64]
        layer.weight = nn.Parameter(weight.copy_(layer.weight.detach()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sync = attach(model, optimizer, "streaming:parts=3", wire=wire)
    for step in range(6):
        train_step(model, optimizer, make_batch(rank, step, dtype=dtype))
    sync.finish()
    return torch.cat([flat(model), torch.tensor([float(sync.stats.details["landings"])])])


@pytest.mark.parametrize(
    ("workers", "wire", "dtype"),
    [
        (2, "int4", torch.float32),
        (3, "int4", torch.float32),
        (3, "int2", torch.bfloat16),
        (2, "float32", torch.float32),
        (3, "float32", torch.float32),
    ],
)
def test_a_training_ends_with_the_same_bits(
    workers: int, wire: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A float32 message needs no kernel."""
    launched = Counter[str]()

    def launch(kernel: Any, *arguments: Any) -> None:
        launched[kernel.__name__] += 1
        plain(kernel, *arguments)

    want = simulated(train, wire, dtype, workers=workers)
    plain = kernels._launch
    monkeypatch.setattr(kernels, "_launch", launch)
    monkeypatch.setattr(message, "triton_kernels", lambda device, precision: kernels)
    found = simulated(train, wire, dtype, workers=workers)
    assert all(map(torch.equal, found, want))
    assert want[0][-1] > 3, "the number of landings"
    names = {"_encode", "_move", "_add", *["_add_up"] * (workers > 2)}
    assert set(launched) == (set() if wire == "float32" else names)


def test_the_kernels_are_tried_before_they_are_used() -> None:
    for codec in (kind() for kind in CODECS.values()):
        gpu._try(kernels, codec, torch.device("cpu"))
        wrong = SimpleNamespace(**{**vars(kernels), "encode": lambda *_: None})
        with pytest.raises(ValueError, match="results differ"):
            gpu._try(wrong, codec, torch.device("cpu"))
