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

from loops import bits
from offbeat.averaging import buckets
from offbeat.averaging.buckets import (
    BUCKET_BYTES,
    Bucket,
    add_clamped,
    add_to,
    as_real,
    make_buckets,
    staging_dtype,
    swap,
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


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_PIECE", 16)


def swapped() -> list[Tensor]:
    """Return tensors of several pieces, of a partial piece, and with strides."""
    generator = torch.Generator().manual_seed(4)
    many = 2 * 16 + 5
    return [
        torch.randn(many, generator=generator),
        torch.randn(3, generator=generator)[0],
        torch.tensor([float("inf"), -0.0, 6e-8, 1e-45]),
        torch.randn(2 * many, generator=generator)[::2],
        torch.randn(7, 8, generator=generator).t(),
        torch.randn(4, 3, 2, 2, generator=generator).to(memory_format=torch.channels_last),
    ]


SWAPPED = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("divisor", [3, 5, 7])
def test_a_sum_is_multiplied_by_the_rounded_reciprocal(divisor: int) -> None:
    """CUDA divides by a number in this way."""
    sums = torch.randn(1000, generator=torch.Generator().manual_seed(divisor))
    unpacked, swapped = torch.empty(1000), torch.empty(1000)
    unpack(sums, [unpacked], divisor)
    swap(sums.clone(), [swapped], divisor)
    expected = sums.numpy() * (np.float32(1) / np.float32(divisor))
    assert unpacked.tolist() == swapped.tolist() == expected.tolist()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", SWAPPED, ids=str)
@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_swap_is_unpack_and_unpack_brings_back(dtype: torch.dtype, divisor: float) -> None:
    """The tensors become flat / divisor in place, and ``unpack`` restores them bit for bit."""
    tensors = [t.to(dtype) for t in swapped()]
    strides, addresses = [t.stride() for t in tensors], [t.data_ptr() for t in tensors]
    before, want = [t.clone() for t in tensors], [t.clone() for t in tensors]
    sums = torch.cat([2 * as_real(t).reshape(-1).to(staging_dtype(t)) + 1 for t in tensors])
    unpack(sums, want, divisor)
    flat = sums.clone()
    swap(flat, tensors, divisor)
    for tensor, new in zip(tensors, want, strict=True):
        assert torch.equal(bits(tensor), bits(new))
    kept = torch.cat([as_real(t).reshape(-1).to(flat.dtype) for t in before])
    assert torch.equal(bits(flat), bits(kept))
    unpack(flat, tensors)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(bits(tensor), bits(old))
    assert [t.stride() for t in tensors] == strides
    assert [t.data_ptr() for t in tensors] == addresses


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_swap_leaves_the_tensors_as_they_were(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C may happen before or after any of the writes."""
    multiply, pieces = torch.mul, 3 + 1 + 1 + 1 + 1 + 1
    count = 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count -= 1
        if count == 0 and when == "before":
            raise KeyboardInterrupt
        result = multiply(*args, **kwargs)
        if count == 0:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(torch, "mul", interrupted)
    tensors = swapped()
    before = [t.clone() for t in tensors]
    sums = torch.cat([2 * t.reshape(-1) + 1 for t in tensors])
    for place in range(1, pieces + 1):
        count = place
        with pytest.raises(KeyboardInterrupt):
            swap(sums.clone(), tensors, 3.0)
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(bits(tensor), bits(old)), place
    count = pieces + 1
    swap(sums.clone(), tensors, 3.0)
    assert count == 1, "so many pieces there are"


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
