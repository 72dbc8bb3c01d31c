"""Buckets and in-place updates of tensors, on random shapes and dtypes."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.averaging.buckets import (
    BUCKET_BYTES,
    Bucket,
    add_clamped,
    add_to,
    make_buckets,
    staging_dtype,
    unpack,
)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*FLOATS, torch.complex64, torch.complex128, torch.int64, torch.uint8, torch.bool]

few = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    if dtype.is_complex:
        return torch.complex(values, values.flip(0) if values.ndim else -values).to(dtype)
    return values > 0 if dtype == torch.bool else values.abs().to(dtype)


@st.composite
def tensor_lists(draw: Any, dtypes: list[torch.dtype]) -> list[Tensor]:
    """Up to 12 tensors; some are transposed, so that they are not contiguous."""
    tensors = []
    for shape, dtype, turned in draw(
        st.lists(st.tuples(shapes, st.sampled_from(dtypes), st.booleans()), max_size=12)
    ):
        tensor = tensor_of(shape, dtype, seed=len(tensors))
        tensors.append(tensor.mT.contiguous().mT if turned and tensor.ndim > 1 else tensor)
    return tensors


def flat_values(tensor: Tensor) -> list[float]:
    """Elements in row-major order, a complex one as two reals, by plain indexing."""
    values: list[float] = []
    for value in tensor.flatten().tolist():
        values += [value.real, value.imag] if isinstance(value, complex) else [float(value)]
    return values


# -- buckets --------------------------------------------------------------------------------------


@few
@given(tensor_lists(DTYPES), st.sampled_from([8, 64, 300, BUCKET_BYTES]))
def test_every_tensor_is_in_one_bucket_of_its_dtype_in_order(
    tensors: list[Tensor], size: int
) -> None:
    """Buckets never mix dtypes, keep the order, and hold each tensor once."""
    buckets = make_buckets(tensors, size)
    expected = [t for t in tensors if t.numel()]
    assert sorted(id(t) for b in buckets for t in b.tensors) == sorted(id(t) for t in expected)
    place = {id(t): i for i, t in enumerate(tensors)}
    for dtype in DTYPES:
        mine = [t for b in buckets for t in b.tensors if t.dtype == dtype]
        assert [place[id(t)] for t in mine] == sorted(place[id(t)] for t in mine)
    for bucket in buckets:
        assert len({t.dtype for t in bucket.tensors}) == 1
        assert bucket.flat.nbytes <= size or len(bucket.tensors) == 1
        assert bucket.flat.numel() == sum(len(flat_values(t)) for t in bucket.tensors)
    # no two neighbours of one dtype would have fitted into one bucket
    for dtype in DTYPES:
        same = [b for b in buckets if b.tensors[0].dtype == dtype]
        for one, following in itertools.pairwise(same):
            first = Bucket(following.tensors[:1]).flat.nbytes
            assert one.flat.nbytes + first > size


@few
@given(tensor_lists(DTYPES))
def test_pack_and_unpack_are_inverse(tensors: list[Tensor]) -> None:
    """All buckets come back, bit for bit, into the same storage and strides."""
    originals = [t.clone() for t in tensors]
    layout = [(t.data_ptr(), t.stride()) for t in tensors]
    buckets = make_buckets(tensors, 64)
    for bucket in buckets:
        flat = bucket.pack()
        assert flat.dtype == staging_dtype(bucket.tensors[0])
        assert flat.tolist() == [v for t in bucket.tensors for v in flat_values(t)]
    for tensor in tensors:
        tensor.zero_()
    for bucket in buckets:
        bucket.unpack()
    for tensor, original in zip(tensors, originals, strict=True):
        assert torch.equal(tensor, original)
    assert [(t.data_ptr(), t.stride()) for t in tensors] == layout


@pytest.mark.parametrize("divisor", [3, 5, 7])
def test_a_sum_is_multiplied_by_the_rounded_reciprocal(divisor: int) -> None:
    """CUDA divides by a number in this way."""
    sums = torch.randn(1000, generator=torch.Generator().manual_seed(divisor))
    unpacked = torch.empty(1000)
    unpack(sums, [unpacked], divisor)
    expected = sums.numpy() * (np.float32(1) / np.float32(divisor))
    assert unpacked.tolist() == expected.tolist()


# -- in-place updates -----------------------------------------------------------------------------


def test_add_to_computes_half_types_in_float32() -> None:
    """A shift that bfloat16 cannot hold is not rounded before it is added."""
    tensor = torch.tensor([1.0], dtype=torch.bfloat16)
    add_to([tensor], torch.tensor([257.0]), 0.5)  # 257 is 256 in bfloat16; 129.5 is halfway
    assert tensor.tolist() == torch.tensor([129.5]).to(torch.bfloat16).tolist()
    tensor = torch.tensor([1000.0], dtype=torch.float16)
    add_to([tensor], torch.tensor([100000.0]), 0.001)  # infinite in float16
    assert tensor.tolist() == [1100.0]


def test_a_shift_of_values_that_are_not_finite() -> None:
    """NaN becomes the mean, and so does a value that is unchanged since it was sent.

    ∞ − ∞ would be NaN. ``test_shared_model`` tests finite values.
    """
    nan, inf = math.nan, math.inf
    now = torch.tensor([-inf, 0.0, 2.0, nan, 1.0, nan])
    sent = torch.tensor([-inf, 0.0, 2.0, nan, nan, 2.0])
    mean = torch.tensor([-inf, 0.0, 3.0, 5.0, 6.0, 7.0])
    add_clamped([now], mean, sent)
    assert now.tolist() == mean.tolist()
