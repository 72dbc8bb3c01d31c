"""The squared L2 norm of many tensors, of any layout, dtype and size."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat.averaging.norm import squared_norm

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
SIZES = st.integers(0, 6)
LARGE = [(4, 2**13), (1, 2**15 - 1), (1, 2**18 - 1), (4, 2**16), (4, 2**16 + 2), (4, 3 * 2**16)]


def make(shape: Sequence[int], dtype: torch.dtype, layout: str, scale: float, seed: int) -> Tensor:
    """A tensor that is contiguous, or a transposed, strided or expanded view, or sparse."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(list(shape), generator=generator, dtype=torch.float32) * scale
    if dtype.is_complex:
        values = values + 1j * torch.randn(list(shape), generator=generator) * scale
    values = values.to(dtype)
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, -1)
    if layout == "strided" and values.dim():
        return torch.stack([values, values + 1], dim=-1)[..., 0]
    if layout == "expanded":
        return values.expand(3, *values.shape)
    if layout == "sparse" and values.dim() and dtype in (torch.float32, torch.float64):
        doubled = values.to_sparse()  # every index twice: coalescing adds them
        return torch.sparse_coo_tensor(
            torch.cat([doubled.indices(), doubled.indices()], dim=1),
            torch.cat([doubled.values(), doubled.values()]),
            values.shape,
            check_invariants=True,
        )
    return values


def wide(gradients: Sequence[Tensor]) -> float:
    """‖g‖² in float64, from dense copies."""
    total = 0.0
    for g in gradients:
        dense = g.to_dense() if g.is_sparse else g
        if dense.is_complex():
            dense = torch.view_as_real(dense)
        total += float(dense.double().square().sum())
    return total


tensors = st.builds(
    make,
    st.lists(SIZES, max_size=3) | st.sampled_from(LARGE),
    st.sampled_from(DTYPES),
    st.sampled_from(["plain", "transposed", "strided", "expanded", "sparse"]),
    st.sampled_from([0.0, 1e-3, 1.0, 1e3]),
    st.integers(0, 2**31),
)


@given(st.lists(tensors, max_size=6))
def test_squared_norm_is_the_sum_of_squares(gradients: list[Tensor]) -> None:
    """It equals the sum in float64 for any shapes, dtypes and layouts, and is 0 of nothing."""
    result, rel = squared_norm(iter(gradients)), 1e-5
    if any(g.numel() >= 2**15 for g in gradients):
        rel = 5e-4
    assert type(result) is float
    assert result == pytest.approx(wide(gradients), rel=rel, abs=1e-30)


@pytest.mark.parametrize("count", [3, 2**15 + 1, 2**18, 2**18 + 1])
@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 60000.0), (torch.bfloat16, 1e12)])
def test_half_norms_do_not_overflow(count: int, dtype: torch.dtype, value: float) -> None:
    """Half types are squared and summed in float32: neither overflow nor swamping."""
    one = torch.full((count,), value, dtype=dtype)
    assert squared_norm([one, one]) == pytest.approx(2 * count * float(one[0]) ** 2, rel=5e-4)
    tiny = torch.full((count,), 6e-8, dtype=dtype)  # in float16 the square would be 0
    assert squared_norm([tiny]) == pytest.approx(count * float(tiny[0]) ** 2, rel=5e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 10, 2**15, 2**18])
def test_an_overflow_is_seen(count: int, dtype: torch.dtype, bad: float) -> None:
    """One NaN or ∞ anywhere makes the squared norm not finite."""
    gradient = torch.ones(count, dtype=dtype)
    gradient[count // 2] = bad
    assert not math.isfinite(squared_norm([torch.ones(3), gradient, torch.ones(2**15)]))


@pytest.mark.parametrize(
    "gradients",
    [
        [torch.tensor([1e200], dtype=torch.float64)],
        [torch.tensor([1e200, 1.0], dtype=torch.float64)],
        [torch.tensor([1e200], dtype=torch.float64), torch.ones(2)],
        [torch.full((count,), 1.2e154 / count**0.5, dtype=torch.float64) for count in (2**15, 8)],
        [torch.tensor([3e38])],
    ],
    ids=["one", "two", "with-float32", "sum-of-parts", "float32"],
)
def test_a_diverging_norm_does_not_raise(gradients: list[Tensor]) -> None:
    """A finite gradient whose square overflows gives ∞ (or its square), never an exception."""
    result = squared_norm(gradients)
    assert result == math.inf or result == pytest.approx(3e38**2, rel=1e-6)
