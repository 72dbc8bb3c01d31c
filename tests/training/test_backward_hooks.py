"""Hooks on backward: buckets are reported in order, in the last pass, with the step's progress."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import offbeat
from loops import attach
from offbeat import Compute, Network, simulate
from offbeat.averaging import AttachedOptimizer, worker
from offbeat.averaging.flow import Flow
from offbeat.averaging.gradient_flow import GradientFlow
from offbeat.averaging.gradients import gradient_buckets
from offbeat.strategies.base import Strategy
from offbeat.training.backward_hooks import BackwardHooks
from offbeat.transport.communicator import Communicator, Wrapper
from offbeat.transport.connect import open_communicator
from offbeat.transport.host import ThreadHost
from problems import flat, gradients, loss_of, make_batch, make_model
from worlds import run

small_buckets = partial(gradient_buckets, bucket_bytes=64)


class RecordingHost(ThreadHost):
    """A host that records the reported progress."""

    def __init__(self) -> None:
        super().__init__()
        self.progress: list[float] = []

    def computed(self, progress: float) -> None:
        self.progress.append(progress)


class Watched:
    """A model whose layers are used in any order, and the reports of its buckets.

    Attributes:
        reported: Index of each reported bucket, and the backward pass in which it was reported.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: int = 1000) -> None:
        monkeypatch.setattr(worker, "gradient_buckets", small_buckets)
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(4))
        self.host = RecordingHost()
        self.reported: list[tuple[int, int]] = []
        self.passes, self.until = 0, until
        parameters = list(self.layers.parameters())
        self.optimizer = AttachedOptimizer(0, torch.optim.SGD(parameters, lr=0.1), parameters)
        self.backward = BackwardHooks(self.optimizer.buckets, self.host, self.ready)
        assert [[id(p) for p in b] for b in self.optimizer.buckets] == [
            [id(p)] for p in parameters[::-1]
        ]

    def ready(self, bucket: int) -> bool:
        # A reported bucket is complete: backward adds no more to its gradients in this pass.
        self.reported.append((bucket, self.passes))
        return len(self.reported) < self.until

    def step(self, *orders: str) -> list[tuple[int, int]]:
        """Run backward through the layers in the given orders. Returns the reports."""
        self.reported.clear()
        for p in self.optimizer.parameters:
            p.grad = None
        for self.passes, order in enumerate(orders, start=1):
            x = torch.ones(1, 5)
            for layer in order:
                x = self.layers[int(layer)](x)
            x.sum().backward()
        self.backward.end_step()
        return list(self.reported)


def test_buckets_are_reported_in_order_except_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers used in reverse order complete in reverse order, but are reported in order."""
    watched = Watched(monkeypatch)
    assert watched.step("0123") == [(0, 1), (1, 1), (2, 1)]
    assert watched.step("3210") == [(0, 1), (1, 1), (2, 1)]
    assert watched.step("2031") == [(0, 1), (1, 1), (2, 1)]


def test_with_accumulation_buckets_wait_for_the_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of passes is taken from the step before."""
    watched = Watched(monkeypatch)
    three = ["0123"] * 3
    assert watched.step(*three) == [(0, 1), (1, 1), (2, 1)], "too early, as nobody knew"
    assert watched.step(*three) == [(0, 3), (1, 3), (2, 3)]
    assert watched.step("0123") == [], "it waits for passes that do not come"
    assert watched.step("0123") == [(0, 1), (1, 1), (2, 1)]


def test_false_ends_the_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks are removed within the same backward, permanently."""
    watched = Watched(monkeypatch, until=2)
    assert watched.step("0123") == [(0, 1), (1, 1)]
    watched.host.progress.clear()
    assert watched.step("0123") == []
    assert watched.host.progress == []


def test_the_last_bucket_has_no_hooks() -> None:
    """It is not reported. The share of backward counts all tensors."""
    layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    tensors = [layers[i].get_parameter(name) for i in (2, 1, 0) for name in ("bias", "weight")]
    host, calls = RecordingHost(), list[int]()

    def ready(bucket: int) -> bool:
        calls.append(bucket)
        return True

    buckets = [tensors[:2], tensors[2:4], tensors[4:]]
    hooks = BackwardHooks(buckets, host, ready)
    hooked = [bool(p._post_accumulate_grad_hooks) for p in tensors]
    assert hooked == [True] * 4 + [False] * 2
    for _ in range(2):
        layers(torch.ones(1, 5)).sum().backward()
        hooks.end_step()
    assert calls == [0, 1, 0, 1]
    assert host.progress == pytest.approx([5 / 9, 7 / 9] * 2)


# -- in training ----------------------------------------------------------------------------------


class RecordingTransport:
    """The world's communicator, with a host that records the reported progress."""

    def __init__(self) -> None:
        self.progress: list[float] = []

    def make_communicator(self, timeout_seconds: float) -> Communicator:
        inner = open_communicator(None, timeout_seconds, what="a test")
        computed = inner.host.computed

        def reported(progress: float) -> None:
            self.progress.append(progress)
            computed(progress)

        inner.host.computed = reported  # type: ignore[method-assign]
        return Wrapper(inner)


def progress_of(rank: int, size: int, strategy: Strategy, passes: list[int]) -> list[list[float]]:
    """Return the progress that was reported in each step."""
    model = make_model(seed=rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    transport = RecordingTransport()
    seen = []
    with attach(model, optimizer, strategy, group=transport):
        for step, count in enumerate(passes):
            optimizer.zero_grad()
            for micro in range(count):
                loss_of(model, make_batch(rank, 10 * step + micro)).backward()
            optimizer.step()
            seen.append(list(transport.progress))
            transport.progress.clear()
    return seen


def test_progress_rises_to_1_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for any number of passes. Strategies other than BSP report only the end."""
    monkeypatch.setattr(worker, "gradient_buckets", small_buckets)
    passes = [1, 3, 3, 1, 1, 2]
    for seen in run(progress_of, offbeat.BSP(), passes, workers=2):
        for reported in seen:
            assert reported[-1] == 1
            assert all(0 < a < b for a, b in itertools.pairwise(reported)), reported
        assert len(seen[0]) > 2  # the end, and at least two buckets before it
    for seen in run(progress_of, offbeat.LocalSGD(period=2), passes, workers=2):
        assert seen == [[1.0]] * len(passes)


def two_optimizers(rank: int, size: int) -> Any:
    """One backward fills the gradients of both optimizers."""
    model = make_model(seed=rank)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (model[0], model[2:])]
    transport = RecordingTransport()
    with attach(model, optimizers, offbeat.BSP(), group=transport):
        loss_of(model, make_batch(rank, 0)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return transport.progress, flat(model)


def test_with_two_optimizers_no_bucket_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their order would depend on autograd. The gradients are averaged all the same."""
    monkeypatch.setattr(worker, "gradient_buckets", small_buckets)
    model = make_model(seed=0)
    each = [gradients(model, make_batch(rank, 0)) for rank in range(2)]
    mean = torch.cat([((a + b) / 2).reshape(-1) for a, b in zip(*each, strict=True)])
    want = flat(model) - 0.05 * mean
    for progress, end in run(two_optimizers, workers=2):
        assert progress == [1.0]
        torch.testing.assert_close(end, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("passes", [1, 2])
def test_buckets_are_sent_while_backward_runs_in_virtual_time(
    passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The computation takes as long as before, but buckets sent early need no time after it."""
    seconds, steps = 0.040, 4
    network = Network("1Mbit/s", latency="10us")

    def train() -> None:
        rank = dist.get_rank()
        progress_of(rank, 2, offbeat.BSP(), [passes] * steps)

    def timeline(overlap: bool) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(worker, "gradient_buckets", small_buckets)
            if not overlap:  # no bucket is reported
                patch.setattr(GradientFlow, "bucket_ready", Flow.bucket_ready)
            return simulate(train, workers=2, network=network, compute=Compute(seconds))

    results = {overlap: timeline(overlap) for overlap in (True, False)}
    for result in results.values():
        for rank in range(2):
            spans = [s for s in result.timeline if (s.rank, s.kind) == (rank, "compute")]
            assert sum(s.end - s.start for s in spans) == pytest.approx(steps * seconds)
    assert results[True].seconds < results[False].seconds
    computing = [s for s in results[True].timeline if (s.rank, s.kind) == (0, "compute")]
    last = computing[-4:]  # of the last step: buckets, one after the other
    travels = [
        s.start for s in results[True].timeline if s.rank == 0 and s.what == "mean of the gradients"
    ]
    assert any(last[0].start < start < last[-1].end for start in travels)
