"""Hooks on backward: its buckets are reported in order, then its end, with the step's progress."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import offbeat
from loops import attach
from offbeat import AttachError
from offbeat.averaging import AttachedOptimizer, worker
from offbeat.averaging.gradients import gradient_buckets
from offbeat.training.backward_hooks import BackwardHooks
from problems import flat, gradients, loss_of, make_batch, make_model
from worlds import run

small_buckets = partial(gradient_buckets, bucket_bytes=64)


class Watched:
    """A model whose layers are used in any order, and the reports of its buckets.

    Attributes:
        accumulates: True if the next backward passes only add to the gradients.
        reported: Index of each reported bucket, and the sets of optimizers at each end of backward.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker, "gradient_buckets", small_buckets)
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(4))
        self.accumulates = False
        self.reported: list[int | set[int]] = []
        self.progress: list[float] = []
        parameters = list(self.layers.parameters())
        optimizer = AttachedOptimizer(0, torch.optim.SGD(parameters, lr=0.1), parameters)
        self.hooks = BackwardHooks([optimizer.parameters], optimizer.buckets, self)
        assert [[id(p) for p in b] for b in optimizer.buckets] == [
            [id(p)] for p in parameters[::-1]
        ]

    def computed(self, progress: float) -> None:
        self.progress.append(progress)

    def bucket_ready(self, bucket: int) -> None:
        self.reported.append(bucket)

    def backward_ended(self, received: set[int]) -> None:
        self.reported.append(received)

    def step(self, order: str, through: Any = None) -> list[int | set[int]]:
        """Run backward through the layers in the given order. Returns the reports."""
        self.reported = []
        x = torch.ones(1, 5, requires_grad=True)
        for layer in order:
            x = (
                self.layers[int(layer)](x)
                if through is None
                else through(self.layers[int(layer)], x)
            )
        x.sum().backward()
        return self.reported


def test_buckets_are_reported_in_order_except_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers used in reverse order complete in reverse order, but are reported in order."""
    watched = Watched(monkeypatch)
    for order in ("0123", "3210", "2031"):
        assert watched.step(order) == [0, 1, 2, {0}]
    assert watched.step("01") == [{0}], "bucket 0 is incomplete"


def test_accumulating_passes_are_part_of_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    for accumulating in (0, 2):
        watched.accumulates, watched.progress = True, []
        for _ in range(accumulating):
            assert watched.step("0123") == []
        watched.accumulates = False
        assert watched.step("0123") == [0, 1, 2, {0}]
        passes = accumulating + 1
        shares = [(accumulating + 1 / 3 + i / 6) / passes for i in (1, 2, 3)]
        assert watched.progress == pytest.approx(shares)


def reentrant(layer: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(layer, x, use_reentrant=True)


def test_a_backward_inside_backward_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reentrant checkpoints run one in each segment."""
    watched = Watched(monkeypatch)

    def mixed(layer: nn.Module, x: torch.Tensor) -> Any:
        return layer(x) if layer is watched.layers[3] else reentrant(layer, x)

    assert watched.step("0123", mixed) == [0, 1, 2, {0}]
    assert watched.step("3012", mixed) == [0, {0}], "the outer pass computes the last gradient"
    assert not watched.hooks.unfinished
    with pytest.raises(AttachError, match="computed a gradient twice"):
        watched.step("02123", mixed)
    watched = Watched(monkeypatch)
    assert watched.step("0123", reentrant) == []
    assert watched.hooks.unfinished


def test_a_pass_after_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused if the failed pass had sent gradients."""
    watched = Watched(monkeypatch)

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    for layer in (3, 2):
        hook = watched.layers[layer].weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            watched.step("0123")
        hook.remove()
        if layer == 3:
            assert watched.step("0123") == [0, 1, 2, {0}]
    with pytest.raises(AttachError, match="failed after it had sent a part"):
        watched.step("0123")


# -- in training ----------------------------------------------------------------------------------


def two_optimizers(rank: int, size: int) -> Any:
    """One backward fills the gradients of both optimizers. Their buckets wait for its end."""
    model = make_model(seed=rank)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (model[0], model[2:])]
    with attach(model, optimizers, offbeat.BSP()) as sync:
        early = sync._worker.overlaps_backward
        loss_of(model, make_batch(rank, 0)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return early, flat(model)


def test_with_two_optimizers_no_bucket_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their order would depend on autograd. The gradients are averaged all the same."""
    monkeypatch.setattr(worker, "gradient_buckets", small_buckets)
    model = make_model(seed=0)
    each = [gradients(model, make_batch(rank, 0)) for rank in range(2)]
    mean = torch.cat([((a + b) / 2).reshape(-1) for a, b in zip(*each, strict=True)])
    want = flat(model) - 0.05 * mean
    for early, end in run(two_optimizers, workers=2):
        assert not early
        torch.testing.assert_close(end, want, rtol=0, atol=1e-12)
