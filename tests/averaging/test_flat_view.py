"""Tensors as one flat view: reading and changing any range, for any layout of the tensors."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from offbeat.averaging.buckets import as_real
from offbeat.averaging.flat_view import Difference, FlatView


def tensors(dtype: torch.dtype) -> list[Tensor]:
    """Of several shapes; two are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in [(7,), (30, 20), (), (4, 6, 5, 3), (11, 13), (1,)]
    ]
    whole[3] = whole[3].to(memory_format=torch.channels_last)
    whole[4] = whole[4].t()
    return whole


def flat(some: list[Tensor]) -> Tensor:
    """The numbers in the order of their indices, one by one."""
    numbers = [number for one in some for number in as_real(one).flatten().tolist()]
    return torch.tensor(numbers, dtype=torch.float64)


EVERY = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str
)


def cuts(elements: int) -> list[int]:
    places = random.Random(0)
    return [0, *sorted(places.sample(range(1, elements), 12)), elements]


@EVERY
def test_a_difference_is_read_in_any_stretches(dtype: torch.dtype) -> None:
    """It is read in float32, as a codec needs it, and in the view's dtype."""
    some = tensors(dtype)
    view = FlatView(some)
    base = torch.linspace(-1, 1, view.elements, dtype=view.dtype)
    expected = flat(some) - base.double()
    difference = Difference(view, base)
    assert difference.elements == expected.numel()
    for out in (torch.float32, view.dtype):
        found = torch.empty(view.elements, dtype=out)
        where = cuts(view.elements)
        for start, stop in itertools.pairwise(where):
            difference.read(found[start:stop], start)
        torch.testing.assert_close(found.double(), expected, rtol=2e-7, atol=3e-7)
    torch.testing.assert_close(difference.to_tensor().double(), expected, rtol=2e-7, atol=3e-7)


@EVERY
def test_tensors_are_moved_in_any_stretches(dtype: torch.dtype) -> None:
    """They change in place. Half types are computed in float32 and rounded once."""
    some = tensors(dtype)
    before, memory = flat(some), [one.data_ptr() for one in some]
    view = FlatView(some)
    shift = torch.linspace(-1, 1, view.elements, dtype=view.dtype)
    where = cuts(view.elements)
    for start, stop in itertools.pairwise(where):
        view.add(shift[start:stop], start)
    view.write_back()
    expected = before + shift.double()
    if dtype == torch.bfloat16:
        expected = (before.float() + shift).bfloat16().double()
    torch.testing.assert_close(flat(some), expected, rtol=2e-7, atol=2e-7)
    assert memory == [one.data_ptr() for one in some]
