"""Wrapped optimizers, and optimizers with a step inside a step."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

import offbeat
from loops import attach, close, sgd
from problems import Simulated, assign, flat, loss_of, make_batch, make_model, train_step
from worlds import run


class WithoutInit(Optimizer):
    """A wrapper that borrows the groups of its optimizer and never calls ``Optimizer.__init__``."""

    def __init__(self, inside: Optimizer, name: str) -> None:
        setattr(self, name, inside)
        self.param_groups, self.defaults = inside.param_groups, inside.defaults
        self._inside = inside

    def step(self, closure: Any = None) -> Any:
        return self._inside.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._inside.zero_grad(set_to_none)


class Imitation:
    """A wrapper like Lightning's: not an optimizer, but its class claims to be one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._inside = optimizer
        self.__class__ = type("Imitated", (Imitation, type(optimizer)), {})  # type: ignore[assignment]

    @property
    def optimizer(self) -> Optimizer:
        return self._inside

    def step(self, closure: Any = None) -> Any:
        return self._inside.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)


class Slow(Optimizer):
    """Lookahead as in timm: its own hooks do not fire before ``zero_grad``."""

    def __init__(self, inside: Optimizer, every: int) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._inside, self._every, self._steps = inside, every, 0
        self.param_groups, self.defaults, self.state = inside.param_groups, {}, inside.state
        self._slow = [p.detach().clone() for p in inside.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        self._inside.step()
        self._steps += 1
        if self._steps % self._every == 0:
            with torch.no_grad():
                for slow, p in zip(self._slow, self.param_groups[0]["params"], strict=True):
                    slow += 0.5 * (p - slow)
                    p.copy_(slow)


class Decayed(SGD):
    """A step that begins with the step of its base class: both fire the hooks."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p *= 0.9
        return loss


def steps(model: Any, optimizer: Any, rank: int, count: int = 5) -> None:
    for step in range(count):
        loss_of(model, make_batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapped(rank: int, size: int) -> Any:
    results = []
    for wrap in (
        lambda o: o,
        lambda o: WithoutInit(o, "optimizer"),
        lambda o: WithoutInit(o, "original_optimizer"),
        Imitation,
        lambda o: WithoutInit(WithoutInit(o, "optimizer"), "optimizer"),
    ):
        model = make_model(rank)
        optimizer = wrap(sgd(model))
        sync = attach(model, optimizer, offbeat.LocalSGD(period=2))
        steps(model, optimizer, rank)
        sync.clip_grad_norm_(1.0, optimizer)
        results.append((flat(model), sync.step, sync.stats.syncs))
        sync.detach()
    return results


def test_the_optimizer_inside_a_wrapper_is_attached() -> None:
    """Every step of the wrapper counts, and the model equals that of the plain optimizer."""
    for plain, *others in run(wrapped, workers=2):
        assert plain[1:] == (5, 2)
        for model, *counts in others:
            assert counts == [5, 2]
            assert torch.equal(model, plain[0])


def lookahead(rank: int, size: int, scheduled: bool) -> Any:
    fresh = type("Slow", (Slow,), {"step": Slow.step})  # torch changes a class once for all
    model = make_model(0)
    optimizer = fresh(sgd(model), every=3)
    sync = attach(model, optimizer, offbeat.LocalSGD(period=1))
    if scheduled:
        StepLR(optimizer, 100)
    steps(model, optimizer, rank)
    found = flat(model), sync.step, sync.stats.syncs
    sync.finish()
    steps(model, optimizer, 0, 1)  # and works as before
    return found


def lookahead_reference(size: int) -> Tensor:
    """Let each worker step, including slow weights; then average."""
    reference = Simulated.start(size, "sgd")
    optimizers = [Slow(optimizer, every=3) for optimizer in reference.optimizers]
    for step in range(5):
        for rank, (model, optimizer) in enumerate(zip(reference.models, optimizers, strict=True)):
            train_step(model, optimizer, make_batch(rank, step))
        reference.average()
    return reference.flat()[0]


@pytest.mark.parametrize("scheduled", [False, True])
def test_hooks_fire_where_the_class_has_none(scheduled: bool) -> None:
    """They fire from the first step on, around the whole step."""
    for model, count, syncs in run(lookahead, scheduled, workers=2):
        assert (count, syncs) == (5, 5)
        close(model, lookahead_reference(2))


def nested(rank: int, size: int) -> Any:
    model = make_model(0)
    optimizer = Decayed(model.parameters(), lr=0.05)
    sgd(model)  # now the base class fires hooks, too
    sync = attach(model, optimizer, offbeat.LocalSGD(period=1))
    for step in range(3):
        train_step(model, optimizer, make_batch(rank, step))
    return flat(model), sync.step


def test_a_step_inside_a_step_is_one_step() -> None:
    """The hooks fire for both. The inner step counts, and its mean enters the rest of the outer."""
    reference = Simulated.start(2, "sgd")
    for step in range(3):
        reference.step(step)
        for model in reference.models:
            assign(model, 0.9 * flat(model))
        reference.average()
    for model, count in run(nested, workers=2):
        assert count == 3
        close(model, reference.flat()[0])


class Sharp(Optimizer):
    """Sharpness-aware minimization (Foret et al. 2020), in one step or in two halves."""

    def __init__(self, inside: Optimizer, radius: float = 0.1) -> None:
        super().__init__(inside.param_groups, {})
        self.param_groups, self.inside, self._radius = inside.param_groups, inside, radius
        self._before: list[Tensor] = []

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        self._before = [p.data.clone() for p in parameters]
        for p in parameters:
            p += self._radius * p.grad / norm
        self.zero_grad()

    def second_step(self) -> None:
        for p, before in zip(self.param_groups[0]["params"], self._before, strict=True):
            p.data = before
        self.inside.step()

    def step(self, closure: Any) -> Any:
        self.first_step()
        closure()
        self.second_step()


def sharp_step(model: Any, optimizer: Sharp, batch: Any, *, halves: bool = False) -> None:
    """Take one step; with ``halves``, by the two halves that many loops call."""

    def closure() -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    closure()
    if halves:
        optimizer.first_step()
        closure()
        optimizer.second_step()
    else:
        optimizer.step(closure)
    optimizer.zero_grad()


def sharp(rank: int, size: int, text: str) -> Any:
    found = []
    for halves in (False, True):
        model = make_model(rank)
        optimizer = Sharp(sgd(model))
        sync = attach(model, optimizer.inside if halves else optimizer, text)
        for step in range(4):
            sharp_step(model, optimizer, make_batch(rank, step), halves=halves)
        found.append((flat(model), sync.step, sync.stats.syncs))
        sync.finish()
    model = make_model(rank)
    optimizer = Sharp(sgd(model))
    sync = attach(model, optimizer, text)
    with pytest.raises(offbeat.AttachError, match="SGD inside this Sharp took a step outside of"):
        sharp_step(model, optimizer, make_batch(rank, 0), halves=True)
    sync.detach()
    sharp_step(model, optimizer, make_batch(rank, 0), halves=True)  # and works as before
    return found


def sharp_reference(size: int, text: str) -> Tensor:
    """Under BSP both gradients of a step are means, as under DDP."""
    reference = Simulated.start(size, "sgd")
    optimizers = [Sharp(optimizer) for optimizer in reference.optimizers]
    for step in range(4):
        batches = [make_batch(rank, step) for rank in range(size)]
        workers = list(zip(reference.models, optimizers, batches, strict=True))
        if text == "local:period=1":
            for model, optimizer, batch in workers:
                sharp_step(model, optimizer, batch)
            reference.average()
            continue
        for act in (Sharp.first_step, Sharp.second_step):
            for model, _, batch in workers:
                loss_of(model, batch).backward()
            for p, q in zip(*(model.parameters() for model in reference.models), strict=True):
                assert p.grad is not None
                assert q.grad is not None
                p.grad = q.grad = (p.grad + q.grad) / 2
            for optimizer in optimizers:
                act(optimizer)
                optimizer.zero_grad()
    return reference.flat()[0]


@pytest.mark.parametrize("text", ["local:period=1", "bsp"])
def test_a_step_of_two_gradients_is_synchronized_once(text: str) -> None:
    """As a whole, or by halves with the inner optimizer attached.

    Otherwise the step would be missed.
    """
    expected = sharp_reference(2, text)
    for found in run(sharp, text, workers=2):
        for model, count, syncs in found:
            assert (count, syncs) == (4, 4)
            close(model, expected)


def refusing(rank: int, size: int) -> Any:
    model = make_model(0)
    unknown = WithoutInit(sgd(model), "inner")
    with pytest.raises(offbeat.AttachError, match="step hooks of this WithoutInit do not work"):
        attach(model, unknown, offbeat.BSP())
    zero = type("ZeroRedundancyOptimizer", (SGD,), {"__module__": "torch.distributed.optim.zero"})
    with pytest.raises(offbeat.AttachError, match="ZeroRedundancyOptimizer communicates in its"):
        attach(model, zero(model.parameters(), lr=0.1), offbeat.BSP())
    return True


def test_optimizers_without_hooks_are_refused_before_anything_is_sent() -> None:
    """Only one of two workers calls attach(): a message would hang or fail."""
    assert refusing(0, 2)
