"""g ← mean(g) in buckets: early or late, exact or lossy, dense or sparse."""

from contextlib import nullcontext
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from loops import attach, close
from offbeat.averaging import gradients, worker
from offbeat.averaging.gradients import gradient_buckets
from problems import flat, make_wide, wide_loss
from worlds import run

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def small_buckets(
    size: int, parameters: list[nn.Parameter], scale: float = 1.0
) -> list[list[nn.Parameter]]:
    made = gradient_buckets(parameters, bucket_bytes=size)
    assert len(made) >= 3
    return made


@pytest.fixture
def buckets_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes buckets of at most so many bytes."""
    return lambda size: monkeypatch.setattr(
        worker, "gradient_buckets", partial(small_buckets, size)
    )


@given(st.lists(st.tuples(st.sampled_from([0, 1, 4, 8, 20]), st.sampled_from(FLOATS)), max_size=12))
def test_buckets_are_full_and_in_the_order_of_backward(kinds: list[tuple[int, Any]]) -> None:
    """Each parameter is in one bucket of its dtype, and no neighbours would fit into one bucket.

    A half-precision number counts as four bytes. The first bucket is full at a limit of its own.
    """
    limit, first = 64, 32
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in kinds]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradients, "FIRST_BUCKET_BYTES", first)
        buckets = gradient_buckets(parameters, bucket_bytes=limit)
    order = [id(p) for p in reversed(parameters) if p.numel()]
    positions = [[order.index(id(p)) for p in bucket] for bucket in buckets]
    assert sorted(position for bucket in positions for position in bucket) == [*range(len(order))]
    assert all(bucket == sorted(bucket) for bucket in positions)
    assert [bucket[-1] for bucket in positions] == sorted(bucket[-1] for bucket in positions)
    bytes_of = [[p.numel() * max(4, p.itemsize) for p in bucket] for bucket in buckets]
    for bucket, sizes, places in zip(buckets, bytes_of, positions, strict=True):
        assert len({p.dtype for p in bucket}) == 1
        assert sum(sizes[:-1]) < first if 0 in places else sum(sizes) <= limit or len(sizes) == 1
    for dtype in FLOATS:
        same = [i for i, bucket in enumerate(buckets) if bucket[0].dtype == dtype]
        same.sort(key=lambda i: positions[i][0])
        for one, following in pairwise(same):
            filled = sum(bytes_of[one])
            full = (
                filled >= first if 0 in positions[one] else filled + bytes_of[following][0] > limit
            )
            assert full


def uneven(rank: int, size: int, wire: str) -> Tensor:
    """Rank 0 has no data after two steps, and takes part in the means of rank 1."""
    model = make_wide(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(model, optimizer, "bsp", wire=wire):
        for step in range(5 if rank else 2):
            optimizer.zero_grad()
            wide_loss(model, rank, step).backward()
            optimizer.step()
    return flat(model)


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_a_worker_without_data_sends_buckets_in_the_order_of_backward(
    buckets_of: Any, wire: str
) -> None:
    """The others have sent all buckets but the last when their backward ends."""
    buckets_of(2**14)
    first, second = run(uneven, wire, workers=2)
    assert torch.equal(first, second)
    model = make_wide(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        ranks = (0, 1) if step < 2 else (1,)
        sum(wide_loss(model, rank, step) / len(ranks) for rank in ranks).backward()
        optimizer.step()
    torch.testing.assert_close(first, flat(model), rtol=0, atol=1e-6 if wire == "float32" else 1e-3)


# -- all kinds of gradients ---------------------------------------------------------


class Wide(nn.Module):
    """Eight tensors of three dtypes. One is transposed and larger than a bucket, one is unused."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

        self.large = nn.Parameter(parameter(10, 40).detach().t())  # 1600 bytes
        self.a = parameter(10)
        self.low = parameter(30, dtype=torch.bfloat16)
        self.unused = parameter(9)
        self.wide = parameter(3, 3, dtype=torch.float64)
        self.b = parameter(50)
        self.scalar = parameter()
        self.constant = parameter()  # its gradient tells nothing about the batch

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.large * self.a).sum() + (self.low.float() * x[0, :30]).sum()
        y = y * self.wide.float().sum() * self.scalar
        return y + self.b.square().sum() * x.mean() + self.constant


def wide_step(rank: int, step: int) -> Tensor:
    return torch.randn(2, 40, generator=torch.Generator().manual_seed(100 * rank + step))


def train_wide(rank: int, size: int, passes: list[int], how: str) -> list[list[Tensor | None]]:
    """The gradients the optimizer sees in each step, with ``passes`` backward passes."""
    model = Wide(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    sync = attach(model, optimizer, "bsp")
    seen: list[list[Tensor | None]] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        )
    )
    for step, count in enumerate(passes):
        optimizer.zero_grad()
        for micro in range(count):
            last = micro == count - 1
            with sync.no_sync() if how == "no_sync" and not last else nullcontext():
                model(wide_step(rank, 10 * step + micro)).backward()
            if how == "discard" and not last:
                optimizer.zero_grad()
        optimizer.step()
    sync.finish()
    return seen


@pytest.mark.parametrize(
    ("passes", "how"),
    [([1, 3, 2, 1], "no_sync"), ([1, 3, 2, 1], "several means"), ([2, 2, 1, 2], "discard")],
)
def test_every_bucket_is_reduced(passes: list[int], how: str, buckets_of: Any) -> None:
    """Also with several dtypes, with strides, and with buckets that are sent early."""
    buckets_of(256)
    results = run(train_wide, passes, how, workers=3)
    model = Wide(seed=0)
    for step, count in enumerate(passes):
        each = []
        for rank in range(3):
            model.zero_grad()
            for micro in range(count):
                if how == "discard":
                    model.zero_grad()
                model(wide_step(rank, 10 * step + micro)).backward()
            each.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        for i, p in enumerate(model.parameters()):
            parts = [e[i] for e in each]
            for result in results:
                got = result[step][i]
                if parts[0] is None:
                    assert got is None
                    continue
                wide = torch.float64 if p.dtype == torch.float64 else torch.float32
                want = (sum(g.to(wide) for g in parts) / 3).to(p.dtype)  # type: ignore[union-attr]
                assert (got.dtype, got.stride()) == (p.dtype, p.stride())
                rtol = atol = 2e-5
                if p.dtype == torch.bfloat16:
                    rtol, atol = 8e-3, 1e-2 if how == "several means" else atol
                torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
                assert torch.equal(got, results[0][step][i]), "all workers have the same bits"
            p.grad = None if parts[0] is None else results[0][step][i]
        torch.optim.SGD(model.parameters(), lr=1e-4).step()


class Branches(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shared = nn.Linear(3, 3, bias=False).double()
        self.branches = nn.ModuleList(nn.Linear(3, 1, bias=False).double() for _ in range(3))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.shared(x)).square().sum()


def train_branches(rank: int, size: int) -> list[list[Tensor | None]]:
    model = Branches(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, "bsp")
    model(torch.ones(1, 3, dtype=torch.float64) + rank, branch=min(rank, 1)).backward()
    optimizer.step()
    sync.finish()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def test_unused_layers_differ_by_worker() -> None:
    """A gradient that a worker lacks counts as zero. One that no worker has stays None."""
    results = run(train_branches, workers=3)
    model = Branches(seed=0)
    for rank in range(3):
        model(torch.ones(1, 3, dtype=torch.float64) + rank, branch=min(rank, 1)).backward()
    for grads in results:
        for got, p in zip(grads, model.parameters(), strict=True):
            if p.grad is None:
                assert got is None
            else:
                close(got, p.grad / 3)


def half_mean(rank: int, size: int) -> dict[str, Tensor]:
    out = {}
    for dtype, value in ((torch.float16, 30000.0), (torch.bfloat16, 256.0)):
        p = nn.Parameter(torch.zeros(2, dtype=dtype))
        model = nn.Module()
        model.p = p
        optimizer = torch.optim.SGD([p], lr=1.0)
        sync = attach(model, optimizer, "bsp")
        # float16: the sum 90000 overflows. bfloat16: 256 + 1 + 1 is 256; 1e-7/3 keeps its bits
        small = {torch.float16: 6e-8, torch.bfloat16: 1.0}[dtype]
        first = value if dtype == torch.float16 or rank == 0 else small
        second = small if dtype == torch.float16 else [256.0, 1.0, 1.0][rank]
        p.grad = torch.tensor([first, second], dtype=dtype)
        optimizer.step()
        sync.finish()
        out[str(dtype)] = p.grad
    return out


def test_half_gradients_are_summed_in_float32_then_divided() -> None:
    """No overflow in the sum, no underflow from dividing first, no bf16 swamping."""
    for result in run(half_mean, workers=3):
        half = result["torch.float16"]
        assert half[0] == 30000
        # the smallest subnormal: divided by 3 first it would be zero
        assert half[1] == torch.tensor(6e-8, dtype=torch.float16)
        expected = torch.tensor((256 + 1 + 1) / 3).to(torch.bfloat16)
        assert torch.equal(result["torch.bfloat16"], expected.expand(2))


# -- sparse gradients -----------------------------------------------------------------------------


class Words(nn.Module):
    """Embeddings with sparse gradients, and a layer without."""

    def __init__(self, seed: int, rows: int = 9) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(rows, 3, sparse=True, dtype=torch.float64)
        self.shift = nn.Embedding(2, 3, sparse=True, dtype=torch.float64)
        self.head = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, words: Tensor | None) -> Tensor:
        shift = self.shift(torch.tensor([1]))
        return self.head(shift if words is None else self.table(words) + shift).sum()


def words_of(rank: int, step: int) -> Tensor | None:
    """Some words twice; rank 1 has none at some steps, so its table has no gradient there."""
    if rank == 1 and step % 3 == 1:
        return None
    return torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(100 * rank + step))


def optimizers_of(model: Words) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SparseAdam([model.table.weight, model.shift.weight], lr=0.05),
        torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9),
    ]


def train_words(rank: int, size: int, text: str, rows: int = 9, wire: str = "float32") -> Any:
    model = Words(rank, rows)
    optimizers = optimizers_of(model)
    sync = attach(model, optimizers, text, wire=wire)
    trace = []
    for step in range(9):
        model.zero_grad()
        model(words_of(rank, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
        gradient = model.table.weight.grad
        trace.append((flat(model), gradient.layout, gradient.to_dense().clone()))
    sync.finish()
    return trace


def test_sparse_gradients_stay_sparse() -> None:
    """SparseAdam, which requires sparse gradients, steps with the mean of all workers."""
    model = Words(0)
    optimizers = optimizers_of(model)
    expected = []
    for step in range(9):
        each = []
        for rank in range(3):
            model.zero_grad()
            model(words_of(rank, step)).backward()
            each.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        for p, *parts in zip(model.parameters(), *each, strict=True):
            there = [part for part in parts if part is not None]
            p.grad = reduce(torch.add, there) / 3  # no sum from 0: it is dense
        for optimizer in optimizers:
            optimizer.step()
        expected.append(flat(model))
    for trace in run(train_words, "bsp", workers=3):
        for (got, layout, _), want in zip(trace, expected, strict=True):
            close(got, want)
            assert layout == torch.sparse_coo


def test_sparse_gradients_over_a_lossy_wire_are_the_same_on_all() -> None:
    """The rows are those of the decoded mean, so all optimizers move the same ones."""
    first, *others = run(train_words, "bsp", 3000, "int8", workers=3)
    for trace in others:
        for (model, _, gradient), (same, layout, rows) in zip(trace, first, strict=True):
            assert layout == torch.sparse_coo
            assert torch.equal(gradient, rows)
            assert torch.equal(model, same)


def half_sparse(rank: int, size: int) -> Any:
    """One worker's gradient is dense where the others' is sparse."""
    model = nn.Embedding(5, 2, sparse=rank != 1)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with attach(model, optimizer, "bsp"):
        model(torch.tensor([rank, 4])).sum().backward()
        optimizer.step()
    return model.weight.detach()


def test_a_gradient_that_is_dense_somewhere_is_dense_everywhere() -> None:
    """Each row moves by its number of uses divided by N."""
    uses = torch.tensor([[1.0], [1.0], [1.0], [0.0], [3.0]]).expand(5, 2)
    for end in run(half_sparse, workers=3):
        torch.testing.assert_close(end, -uses / 3)


def with_expanded_gradient(rank: int, size: int) -> Tensor:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = attach(model, optimizer, "bsp")
    before = model.weight.detach().clone()
    model.weight.grad = torch.full((1, 1), 1.0 + 2 * rank).expand(3, 2)
    optimizer.step()
    sync.detach()
    return before - model.weight.detach()


def test_an_expanded_gradient_is_replaced_by_the_mean() -> None:
    """Its elements share memory, so the mean cannot be written into it."""
    for change in run(with_expanded_gradient, workers=2):
        close(change, torch.full((3, 2), 2.0), 1e-6)
