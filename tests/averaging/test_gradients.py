"""g ← mean(g) in buckets, over exact and lossy wires."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat
from loops import attach
from offbeat.fabric import Team, Wire, open_communicator
from offbeat.averaging import GradientMean
from offbeat.averaging.gradients import gradient_buckets
from offbeat.strategies import worker
from offbeat.strategies.base import Strategy
from problems import make_wide, wide_loss
from worlds import run


def small_buckets(parameters: list[nn.Parameter], scale: float) -> list[list[nn.Parameter]]:
    made = gradient_buckets(parameters, 4096, scale)
    assert len(made) >= 3
    return made


def accumulate(rank: int, size: int, passes: list[int], how: str) -> list[Tensor]:
    """The gradients each step uses, with ``passes`` backward passes a step."""
    model = make_wide(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: list[Tensor] = []
    sync = attach(model, optimizer, "bsp", wire="int8")
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).clone())
    )
    for step, count in enumerate(passes):
        optimizer.zero_grad()
        for micro in range(count):
            wide_loss(model, rank, 10 * step + micro).backward()
        if how == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if how == "meet" and step % 2:
            with sync.consensus():
                pass
        optimizer.step()
    sync.finish()
    return seen


@pytest.mark.parametrize(
    ("passes", "how"),
    [([1, 1, 1, 1], ""), ([1, 3, 2, 1, 2, 1], ""), ([1] * 6, "clip"), ([1] * 5, "meet")],
)
def test_buckets_sent_twice_feed_their_errors_once(
    passes: list[int], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets that leave too early and are sent again: the same bits as without overlap."""
    monkeypatch.setattr(worker, "gradient_buckets", small_buckets)
    early = run(accumulate, passes, how, workers=3)
    monkeypatch.setattr(offbeat.BSP, "bucket_ready", Strategy.bucket_ready)  # nobody watches
    late = run(accumulate, passes, how, workers=3)
    for a, b in zip(early, late, strict=True):
        assert torch.equal(torch.stack(a), torch.stack(b))
        assert torch.equal(torch.stack(a), torch.stack(early[0]))


def test_all_gradients_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Σ over steps of the means is the exact Σ but for one rounding, accumulated or not."""
    passes = [1, 2, 1, 3, 1, 1, 2, 1]

    def steps(rank: int, size: int) -> tuple[Tensor, Tensor]:
        model = make_wide(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)  # the model stays where it is
        got = torch.zeros(8705)
        own = torch.zeros(8705)
        with attach(model, optimizer, "bsp", wire="int8"):

            def add(*_: Any) -> None:
                got.add_(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))

            optimizer.register_step_pre_hook(add)
            for step, count in enumerate(passes):
                optimizer.zero_grad()
                for micro in range(count):
                    wide_loss(model, rank, 10 * step + micro).backward()
                own += torch.cat([p.grad.reshape(-1) for p in model.parameters()])
                optimizer.step()
        return got, own

    monkeypatch.setattr(worker, "gradient_buckets", small_buckets)
    results = run(steps, workers=3)
    exact = sum(own for _, own in results) / 3
    largest = 3 * float(exact.abs().max())
    for got, _ in results:
        # what is kept back: less than a scale for each worker's and for the sum's rounding
        assert (got - exact).abs().max() < 2 * largest / 127
        assert not torch.equal(got, exact)


def test_without_error_feedback_small_gradients_would_be_lost() -> None:
    """A gradient far below its block's scale still arrives, in time."""

    def steps(rank: int, size: int) -> Tensor:
        model = nn.Module()
        model.x = nn.Parameter(torch.zeros(4096))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with attach(model, optimizer, "bsp", wire="int8"):
            for _ in range(100):
                model.x.grad = torch.full((4096,), 1e-3)
                model.x.grad[::512] = 1.0  # a block's scale is 1/127, and 1e-3 rounds to 0
                optimizer.step()
        return model.x.detach()

    for x in run(steps, workers=3):
        small = torch.ones(4096, dtype=torch.bool)
        small[::512] = False
        # what has not arrived: half a scale on each worker, and half of that of the sum
        assert ((x[small] + 0.1).abs() <= 0.5 / 127 * 2 + 1e-6).all()
        assert x[small].any()


# -- the mean by itself ---------------------------------------------------------------------------

GRADIENTS = [[0, 1, 2, 3], [0, 1, 2], [1, 2, 3]]  # which parameters have one, by rank; nobody 4


def reduce_once(rank: int, size: int, wire: Any, overlap: bool) -> Any:
    """Rank 1 contributes nothing. With overlap buckets leave early, and rank 2 changes one."""
    team = Team(open_communicator(None, 20, what="a test"))
    parameters = [nn.Parameter(torch.zeros(600)) for _ in range(5)]
    for i in GRADIENTS[rank]:
        parameters[i].grad = gradient_of(rank, i)
    buckets = gradient_buckets(parameters, bucket_bytes=2400)
    assert len(buckets) == 5
    mean = GradientMean(team, Wire(team, wire), buckets, slots=2, overlap=overlap)
    if rank != 1:
        for index in range(len(buckets) - 1):
            mean.start(index)
    if rank == 2 and overlap:
        parameters[3].grad += 1
    sums = mean.reduce([rank, 1.5], contribute=rank != 1)
    return sums, [p.grad for p in parameters]


def gradient_of(rank: int, index: int) -> Tensor:
    return torch.randn(600, generator=torch.Generator().manual_seed(10 * rank + index))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_the_mean_is_over_those_who_contribute(wire: str, overlap: bool) -> None:
    """A missing gradient is zero, one that nobody has stays None, and the caller's numbers come.

    Who contributes nothing keeps its gradients; a bucket that changed after it left is sent again.
    """
    results = run(reduce_once, wire, overlap, workers=3)
    for rank, (sums, gradients) in enumerate(results):
        assert sums == [0 + 1 + 2, 3 * 1.5]
        assert gradients[4] is None
        for i in range(4):
            own = gradient_of(rank, i) if i in GRADIENTS[rank] else None
            if rank == 1:
                assert own is gradients[i] is None or torch.equal(gradients[i], own)
                continue
            each = [gradient_of(r, i) for r in (0, 2) if i in GRADIENTS[r]]
            want = (sum(each) + float(overlap and i == 3)) / 2
            atol = 1e-6 if wire == "float32" else 2 * 5.0 / 127  # of numbers below 5
            torch.testing.assert_close(gradients[i], want, rtol=0, atol=atol)
            assert torch.equal(gradients[i], results[0][1][i])
