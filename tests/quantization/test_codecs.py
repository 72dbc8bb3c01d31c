"""Codecs: error bounds computed independently, extreme values, and non-finite values."""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.quantization import kernels as module
from offbeat.quantization.block_format import BLOCK
from offbeat.quantization.codecs import CODECS
from quantization.rounding import most, values


@pytest.fixture(autouse=True, scope="module", params=["compiled", "torch", "whole"])
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run every test with the compiled loops, and with torch operations, also as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(module, "kernels", lambda: None)
        elif request.param == "whole":  # all blocks at once
            patch.setattr(Tensor, "is_cpu", False)
        else:
            assert module.kernels() is not None, "numba is part of the tests' environment"
        yield


both = pytest.mark.parametrize("precision", ["int8", "int4", "int2"])


def encode(x: Tensor, precision: str, *, keep_error: bool = True) -> tuple[Tensor, Tensor]:
    """Return the rows of ``x``, padded to whole blocks, and the errors that the codec reports.

    The codec writes into the middle of a matrix.
    """
    codec, blocks = CODECS[precision](), -(-x.numel() // BLOCK)
    numbers = torch.zeros(blocks * BLOCK)
    numbers[: x.numel()] = x
    rows = torch.full((2 + blocks + 1, codec.block_bytes), 7, dtype=torch.uint8)
    codec.encode(numbers, rows[2:-1], keep_error=keep_error)
    assert (rows[[0, 1, -1]] == 7).all(), "other rows do not change"
    return rows[2:-1], numbers[: x.numel()]


def decode(rows: Tensor, precision: str, like: Tensor) -> Tensor:
    """Return the numbers of ``rows``, after a check that ``add`` adds the same numbers."""
    codec, out = CODECS[precision](), torch.empty(like.shape)
    codec.decode(rows, out)
    codec.decode(rows, total := torch.ones(like.shape), add=True)
    torch.testing.assert_close(total, 1 + out, equal_nan=True)
    return out


def round_trip(x: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Return the decoded ``x``, and the error that the codec reports."""
    rows, errors = encode(x, precision)
    return decode(rows, precision, x), errors


def rounded(x: Tensor, precision: str) -> Tensor:
    """Return the decoded ``x`` if the codec does not keep the error."""
    return decode(encode(x, precision, keep_error=False)[0], precision, x)


def unpacked(rows: Tensor, bits: int) -> npt.NDArray[np.float32]:
    """Return the numbers in rows of integers, read with numpy from the documented layout."""
    data = rows.numpy()
    scales, packed = data[:, :4].copy().view("<f4"), data[:, 4:]
    if bits == 2:  # f/256 is a fraction in base 3
        fields = [packed.astype(np.int64) * 3**k // 256 % 3 for k in range(1, 6)]
        integers = np.concatenate(fields, axis=1)[:, :BLOCK] - 1
    else:
        fields = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
        integers = np.concatenate(fields, axis=1).astype(np.int64)
        integers -= (integers >= 2 ** (bits - 1)) * 2**bits
    return (integers * scales).astype(np.float32)


@pytest.mark.sampled
@both
@given(
    elements=st.integers(1, 4 * BLOCK + 1),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e10]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(deadline=None, max_examples=60)
def test_the_error_is_bounded(
    precision: str, elements: int, seed: int, scale: float, dtype: torch.dtype
) -> None:
    """|x − decode(encode(x))| ≤ largest of the block / 254 (int8), and x = decoded + error."""
    x = values(seed, elements, dtype) * scale
    decoded, errors = round_trip(x, precision)
    assert ((decoded.double() - x.double()).abs() <= most(x, precision)).all()
    assert ((rounded(x, precision).double() - x.double()).abs() <= most(x, precision)).all()
    torch.testing.assert_close(
        decoded.double() + errors, x.double(), rtol=2e-7, atol=1e-6 * float(x.abs().max())
    )


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4)])
def test_integers_are_rounded_to_nearest_even(precision: str, bits: int, keep: bool) -> None:
    """Also ties, with and without keeping the error, in more than one piece of blocks."""
    levels, generator = 2 ** (bits - 1) - 1, np.random.default_rng(0)
    x = generator.integers(-2 * levels, 2 * levels + 1, (301, BLOCK)).astype(np.float32) / 2
    x[:, 7] = levels  # so the scale is 1
    rows, errors = encode(torch.from_numpy(x).reshape(-1), precision, keep_error=keep)
    np.testing.assert_array_equal(unpacked(rows, bits), np.rint(x))
    if keep:
        np.testing.assert_array_equal(errors.view(-1, BLOCK), x - np.rint(x))
    decoded = decode(rows, precision, torch.empty(x.size - 17))
    np.testing.assert_array_equal(decoded, np.rint(x).reshape(-1)[:-17])


@pytest.mark.parametrize("keep", [True, False])
def test_two_bits_send_the_large_numbers_at_their_mean(keep: bool) -> None:
    """Threshold and scale are computed with numpy."""
    x = np.random.default_rng(0).normal(size=(301, BLOCK)).astype(np.float32) ** 3
    x[5, :] = 0
    x[7, 9:] = 0
    absolute = np.abs(x.astype(np.float64))
    chosen = absolute >= 0.75 * absolute.mean(1, keepdims=True)
    chosen[5] = False
    scale = np.where(chosen, absolute, 0).sum(1) / np.maximum(1, chosen.sum(1))
    wanted = np.sign(x) * chosen * scale[:, None]
    rows, errors = encode(torch.from_numpy(x).reshape(-1), "int2", keep_error=keep)
    found = unpacked(rows, 2)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    if keep:
        np.testing.assert_allclose(errors.view(-1, BLOCK), x - wanted, rtol=1e-5, atol=1e-6)
    # The least squared error: each block loses the energy that its numbers sent have.
    lost, sent = ((x - found) ** 2).sum(1), (found**2).sum(1)
    np.testing.assert_allclose(lost + sent, (x**2).sum(1), rtol=1e-4)


def test_two_bits_do_not_overflow() -> None:
    """Blocks with numbers as large as float32 has."""
    x = torch.full((BLOCK + 3,), torch.finfo(torch.float32).max)
    x[1::2] *= -1
    x[::7] = 0
    decoded, errors = round_trip(x, "int2")
    assert torch.equal(decoded, x)
    assert not errors.any()


def test_two_bits_of_the_smallest_numbers_become_zeros() -> None:
    """Although their mean may be rounded up to more than all of them."""
    for multiple in (1, 255, 257, 300, 383):
        x = torch.full((BLOCK,), multiple * 2.0**-149)
        decoded, errors = round_trip(x, "int2")
        assert not decoded.any()
        assert torch.equal(errors, x)


@both
def test_zeros_are_exact_and_tiny_blocks_become_errors(precision: str) -> None:
    x = torch.zeros(2 * BLOCK + 5)
    x[BLOCK + 3] = 1e-35
    decoded, errors = round_trip(x, precision)
    assert not decoded[:BLOCK].any()
    assert not decoded[BLOCK + 4 :].any()
    assert torch.equal(decoded + errors, x)
    assert torch.equal(rounded(x, precision), decoded)


@pytest.mark.parametrize("precision", ["int8", "int4", "int2"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e300])
def test_a_block_that_is_not_finite_decodes_to_nan(bad: float, precision: str) -> None:
    """Of integers: the whole block, never garbage, and nothing else; its error is forgotten."""
    x = values(1, 3 * BLOCK, torch.float64)
    x[BLOCK + 9] = bad
    decoded, errors = round_trip(x, precision)
    assert decoded[BLOCK : 2 * BLOCK].isnan().all()
    assert decoded[:BLOCK].isfinite().all()
    assert decoded[2 * BLOCK :].isfinite().all()
    assert errors.isfinite().all()
    assert not errors[BLOCK : 2 * BLOCK].any()
    torch.testing.assert_close(rounded(x, precision), decoded, equal_nan=True)
