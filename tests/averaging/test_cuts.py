"""Cutting a model into parts: by whole tensors, and by bytes."""

import itertools
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offbeat.averaging.parts.cuts import cut_by_bytes, cut_by_tensors
from problems import flat, make_wide


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.data())
def test_cuts_by_tensors_are_nearest_to_equal_bytes(sizes: list[int], data: Any) -> None:
    """Each cut, from the first one, is the possible one nearest to its target."""
    parts = data.draw(st.integers(1, len(sizes)))
    tensors = [torch.zeros(size) for size in sizes]
    found = cut_by_tensors(tensors, parts)
    assert [id(t) for part in found for t in part] == [id(t) for t in tensors]
    before = [0, *itertools.accumulate(sizes)]

    def distances(places: tuple[int, ...]) -> list[tuple[Fraction, int]]:
        wanted = [Fraction(before[-1] * i, parts) for i in range(1, parts)]
        return [(abs(before[at] - want), at) for at, want in zip(places, wanted, strict=True)]

    ways = itertools.combinations(range(1, len(sizes)), parts - 1)
    best = min(ways, key=distances)
    assert list(itertools.accumulate(len(part) for part in found)) == [*best, len(sizes)]


def test_bytes_are_those_that_are_summed() -> None:
    """Half types are summed in float32. A complex number counts as two numbers."""
    kinds = [torch.bfloat16, torch.float32, torch.float64, torch.complex128]
    tensors = [torch.zeros(n, dtype=kind) for n, kind in zip([8, 8, 4, 2], kinds, strict=True)]
    assert [len(part) for part in cut_by_tensors(tensors, 4)] == [1, 1, 1, 1]
    assert [len(part) for part in cut_by_tensors(tensors, 2)] == [2, 2], "32 bytes each"
    halves = [part() for part in cut_by_bytes(tensors[:2], 2)]
    assert [[t.dtype for t in part] for part in halves] == [[kinds[0]], [kinds[1]]]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
def test_cuts_by_bytes_are_equal(parts: int) -> None:
    """The parts contain every number once, in order, and their sizes differ by at most one."""
    model = make_wide(seed=0, norm=True)
    parameters = [nn.Parameter(torch.arange(0.0)), *model.parameters()]
    views = [part() for part in cut_by_bytes(parameters, parts)]
    together = torch.cat([v.reshape(-1) for part in views for v in part])
    assert torch.equal(together, flat(model).to(together))
    sizes = [sum(v.numel() for v in part) for part in views]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1


def test_a_tensor_that_is_not_contiguous_stays_whole() -> None:
    """There may then be fewer parts than wanted."""
    (only,) = cut_by_bytes([torch.zeros(6, 4).t()], 2)
    assert [view.shape for view in only()] == [(4, 6)]


def test_views_follow_a_module_that_is_moved() -> None:
    """The views use the current memory after ``.data`` was replaced."""
    parameter = nn.Parameter(torch.zeros(6))
    first, second = cut_by_bytes([parameter], 2)
    assert [view.tolist() for view in (*first(), *second())] == [[0, 0, 0], [0, 0, 0]]
    parameter.data = torch.arange(6.0)
    assert [view.tolist() for view in (*first(), *second())] == [[0, 1, 2], [3, 4, 5]]
