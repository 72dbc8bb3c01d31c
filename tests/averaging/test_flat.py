"""Flat vectors over tensors, and cuts into parts."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from offbeat.averaging.flat import (
    Flat,
    Space,
    as_real,
    cut,
    make_flats,
    make_spaces,
    staging_dtype,
)
from problems import flat, make_wide

# -- cuts -----------------------------------------------------------------------------------------


def spaces_of(tensors: list[Tensor]) -> list[Space]:
    return make_spaces(tensors, shared=False, velocity=False)


@pytest.mark.parametrize(
    ("parts", "sizes"), [(4, [[8], [8], [4], [4]]), (2, [[8, 8], [4, 4]]), (1, [[8, 8, 4, 4]])]
)
def test_parts_have_equal_bytes(parts: int, sizes: list[list[int]]) -> None:
    """Half types are averaged in float32. A complex number counts as two numbers."""
    kinds = [torch.bfloat16, torch.float32, torch.float64, torch.complex128]
    tensors = [torch.zeros(n, dtype=kind) for n, kind in zip([8, 8, 4, 2], kinds, strict=True)]
    assert [[len(each) for each in part] for part in cut(spaces_of(tensors), parts)] == sizes


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
def test_cuts_are_nearly_equal(parts: int, unit: int) -> None:
    """The parts contain every number once, in order. Their sizes differ by at most one unit."""
    model = make_wide(seed=0, norm=True)
    (space,) = spaces_of([nn.Parameter(torch.arange(0.0)), *model.parameters()])
    found = cut([space], parts, unit)
    bounds = [(only.start, only.stop) for (only,) in found]
    assert [a for a, _ in bounds] == [0, *(b for _, b in bounds[:-1])]
    assert bounds[-1][1] == space.x.elements == flat(model).numel()
    assert len(bounds) == parts
    assert all(stop % unit == 0 for _, stop in bounds[:-1])
    sizes = [stop - start for start, stop in bounds[:-1]]
    assert not sizes or max(sizes) - min(sizes) <= unit


def test_there_are_fewer_parts_if_there_are_too_few_units() -> None:
    found = cut(spaces_of([torch.zeros(20)]), 7, 8)
    assert [(only.start, only.stop) for (only,) in found] == [(0, 8), (8, 16), (16, 20)]


# -- flat vectors ---------------------------------------------------------------------------------


def tensors_of_all_kinds() -> list[Tensor]:
    """A transposed tensor is dense in another order. A slice of columns has gaps."""
    return [
        torch.arange(6.0).view(2, 3),
        torch.arange(6.0, 18.0).view(4, 3).t(),
        torch.arange(18.0, 42.0).view(4, 6)[:, ::2],
        torch.tensor(7.0),
    ]


@given(st.integers(0, 30), st.integers(1, 31), st.booleans())
def test_a_flat_vector_reads_adds_and_writes_any_range(
    start: int, length: int, order: bool
) -> None:
    tensors = tensors_of_all_kinds()
    vector = Flat(tensors, in_memory_order=order)
    assert vector.elements == 31
    before = torch.empty(31)
    vector.read(0, before)
    assert torch.equal(
        before.sort().values, torch.cat([t.flatten() for t in tensors]).sort().values
    )
    length = min(length, 31 - start)
    vector.add(start, torch.full((length,), 100.0))
    after = torch.empty(31)
    vector.read(0, after)
    expected = before.clone()
    expected[start : start + length] += 100
    assert torch.equal(after, expected)
    vector.write(start, before[start : start + length])
    for tensor, original in zip(tensors, tensors_of_all_kinds(), strict=True):
        assert torch.equal(tensor, original)


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
DTYPES += [torch.complex128, torch.int64, torch.uint8, torch.bool]


def tensor_of(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3
    if dtype.is_complex:
        return torch.complex(values, -values).to(dtype)
    return values > 0 if dtype == torch.bool else values.abs().to(dtype)


@st.composite
def tensor_lists(draw: Any) -> list[Tensor]:
    """Up to 12 tensors; some are transposed, so that they are not contiguous."""
    tensors = []
    shapes = st.lists(st.integers(0, 5), max_size=3)
    kinds = st.tuples(shapes, st.sampled_from(DTYPES), st.booleans())
    for shape, dtype, turned in draw(st.lists(kinds, max_size=12)):
        tensor = tensor_of(shape, dtype, seed=len(tensors))
        tensors.append(tensor.mT.contiguous().mT if turned and tensor.ndim > 1 else tensor)
    return tensors


@given(tensor_lists())
def test_a_copy_that_is_written_back_changes_nothing(tensors: list[Tensor]) -> None:
    """Each tensor is in the vector of its dtype, in row-major order. It keeps its memory."""
    originals = [t.clone() for t in tensors]
    layout = [(t.data_ptr(), t.stride()) for t in tensors]
    vectors = make_flats(tensors)
    copies = [vector.copy() for vector in vectors]
    for vector, copy in zip(vectors, copies, strict=True):
        first = vector.tensors[0]
        same = [t for t in tensors if t.dtype == first.dtype and t.numel()]
        assert [id(t) for t in vector.tensors] == [id(t) for t in same]
        assert copy.dtype == vector.dtype == staging_dtype(first)
        rows = [v for t in same for v in as_real(t).flatten().tolist()]
        assert copy.tolist() == rows
    assert sum(len(vector.tensors) for vector in vectors) == sum(t.numel() > 0 for t in tensors)
    for tensor in tensors:
        tensor.zero_()
    for vector, copy in zip(vectors, copies, strict=True):
        vector.write(0, copy)
    for tensor, original in zip(tensors, originals, strict=True):
        assert torch.equal(tensor, original)
    assert [(t.data_ptr(), t.stride()) for t in tensors] == layout


def test_tensors_of_several_dtypes_in_one_vector() -> None:
    """Values are converted. A value that bfloat16 cannot hold is not rounded before it is added."""
    tensors = [torch.ones(2), torch.ones(1, dtype=torch.bfloat16), torch.ones(1).double()]
    vector, out = Flat(tensors), torch.empty(4, dtype=torch.float64)
    vector.add(1, torch.tensor([1.0, 128.5, 3.0]))  # 128.5 is 128 in bfloat16; 129.5 becomes 130
    vector.read(0, out)
    assert out.tolist() == [1.0, 2.0, 130.0, 4.0]


def test_no_number_of_a_copy_with_weight_0_is_nan() -> None:
    assert Flat([torch.tensor([torch.nan, 1.0])]).copy(weight=0.0).tolist() == [0.0, 0.0]


def test_a_flat_vector_follows_a_module_that_is_moved() -> None:
    """It uses the current memory after ``.data`` was replaced."""
    parameter = nn.Parameter(torch.zeros(6))
    vector, out = Flat([parameter]), torch.empty(3)
    parameter.data = torch.arange(6.0)
    vector.refresh()
    vector.read(3, out)
    assert out.tolist() == [3.0, 4.0, 5.0]
