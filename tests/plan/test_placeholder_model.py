"""The placeholder model: shapes, sizes, and tensors that stand for larger ones."""

from typing import Any

import pytest
import torch
from torch import nn

from offbeat.averaging.buckets import BUCKET_BYTES, group_tensors
from offbeat.averaging.gradients import gradient_buckets
from offbeat.averaging.replica import Replica
from offbeat.plan.placeholder_model import PlaceholderModel, shapes_of
from offbeat.transport.placeholder_tensors import (
    blank,
    blank_list,
    bytes_of,
    is_blank,
    storage_bytes,
)


def bytes_in(bucket: Any, scale: float) -> float:
    return sum(4 * tensor.numel() * scale for tensor in bucket)


@pytest.mark.parametrize("count", [1, 14, 1000, 200e3, 2**21, 25e6, 67.3e6, 1e9, 2.5e9])
def test_a_count_keeps_its_size(count: float) -> None:
    """The placeholder has few numbers and stands for the right number of bytes."""
    shapes = shapes_of(count)
    sizes = [size for _, size in shapes.parameters]
    assert shapes.scale * sum(sizes) == pytest.approx(count, rel=2e-3)
    assert sum(sizes) < 400_000
    assert min(sizes) >= 1
    assert shapes.count == count
    assert shapes.model_bytes == 4 * count


@pytest.mark.parametrize("count", [25e6, 100e6, 1e9])
def test_buckets_are_full(count: float) -> None:
    """All but the last have 8 MiB; the first bucket of gradients has a MiB, or one tensor."""
    shapes = shapes_of(count)
    model = PlaceholderModel(shapes, 0.9)
    buckets = group_tensors(model.tensors, BUCKET_BYTES / shapes.scale)
    assert {bytes_in(bucket, shapes.scale) for bucket in buckets[:-1]} == {BUCKET_BYTES}
    assert len(buckets) == -(-4 * count // BUCKET_BYTES)
    first, *others, _ = gradient_buckets(model.tensors, scale=shapes.scale)
    assert 2**20 <= bytes_in(first, shapes.scale) <= 2**24
    assert {bytes_in(bucket, shapes.scale) for bucket in others[:-1]} == {BUCKET_BYTES}


class Net(nn.Module):
    """Tensors of several sizes, a frozen one, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, bias=False)
        self.norm = nn.BatchNorm2d(64)
        self.body = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(12))
        self.head = nn.Linear(1024, 10).requires_grad_(False)


def test_a_model_keeps_its_proportions() -> None:
    """The buckets contain the same tensors; a count of batches stands for itself."""
    model = Net()
    shapes = shapes_of(model)
    placeholder = PlaceholderModel(shapes, 0.9)
    assert shapes.integers == 1
    trainable = [p for p in model.parameters() if p.requires_grad]
    real = Replica(model, trainable)
    small = Replica(placeholder, placeholder.tensors, shapes.scale)
    assert shapes.count == sum(t.numel() for t in real.averaged())
    assert [name.replace("/", ".") for name, _ in small.parameters] == [
        name for name, _ in real.parameters
    ]
    sizes = [[len(bucket.tensors) for bucket in one.buckets()] for one in (real, small)]
    assert sizes[0] == sizes[1]
    for bucket, other in zip(real.buckets(), small.buckets(), strict=True):
        assert bytes_of(other.flat, shapes.scale) == pytest.approx(bucket.flat.nbytes, rel=0.01)
    assert len(small.integer_buffers()) == 1


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("25 apples", ValueError, "25M"),
        (0, ValueError, "like 25M"),
        (float("inf"), ValueError, "like 25M"),
        (None, TypeError, "a count"),
        (nn.ReLU(), ValueError, "no trainable parameter"),
    ],
)
def test_anything_but_a_model_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        shapes_of(given)


def rises(lssr: float, steps: int) -> list[int]:
    """At which steps the norm of the gradient is large."""
    model, found = PlaceholderModel(shapes_of(1000), lssr), []
    for step in range(steps):
        model.differentiate()
        gradient: Any = model.tensors[0].grad
        found += [step] if gradient.abs().max() > 100 else []
    return found


def test_a_share_of_the_gradients_is_significant() -> None:
    assert rises(0.9, 31) == [0, 10, 20, 30]
    assert len(rises(0.87, 200)) == 26
    assert len(rises(0.4, 100)) == 60
    assert len(rises(0.9999, 400)) == 2, "at most every 200th step is none"


# -- scaled tensors ------------------------------------------------------------------------------


def test_float32_is_scaled_and_decisions_are_not() -> None:
    assert bytes_of(torch.zeros(10), 2.5) == 100
    assert bytes_of(torch.zeros(10), 1.0) == 40
    assert bytes_of(torch.zeros(10), 3.0, tail=4) == 4 * (6 * 3 + 4)
    assert bytes_of(torch.zeros(10, dtype=torch.float64), 2.5) == 80
    assert bytes_of(torch.zeros(10, dtype=torch.uint8), 2.5) == 10
    assert bytes_of(blank(7, dtype=torch.float32), 2.5) == 28


def test_blank_tensors_have_a_size_and_no_memory() -> None:
    large = blank(3, 10**9)
    assert (large.shape, large.nbytes) == ((3, 10**9), 3 * 10**9)
    assert large.untyped_storage().nbytes() == 8
    assert storage_bytes(large, 5.0) == 3 * 10**9
    part = large.view(-1).chunk(7)[3]
    assert is_blank(part)
    assert storage_bytes(part, 1.0) == 3 * 10**9, "the memory of a view is that of the whole"
    assert storage_bytes(blank(8, dtype=torch.float32), 5.0) == 32
    assert storage_bytes(blank_list(torch.empty(10, dtype=torch.uint8), 4)[1], 1.0) == 40
    for tensor in (torch.zeros(3), torch.zeros(1), torch.zeros(0), torch.zeros(4)[::2]):
        assert not is_blank(tensor)
    assert storage_bytes(torch.zeros(6)[:2], 10.0) == 240
