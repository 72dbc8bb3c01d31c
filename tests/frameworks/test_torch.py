"""Tools of torch around a training loop give the values of DDP with the same tools."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from frameworks.real import SAMPLES, STEPS, ddp, same, state
from loops import attach
from problems import loss_of, make_batch, make_model
from workers import run

Step = Callable[[Tensor, Tensor], object]
Way = Callable[[nn.Module, nn.Module], tuple[Step, list[torch.optim.Optimizer]]]


def stepping(
    optimizers: list[torch.optim.Optimizer], backward: Callable[[Tensor, Tensor], object]
) -> tuple[Step, list[torch.optim.Optimizer]]:
    def step(x: Tensor, y: Tensor) -> None:
        for one in optimizers:
            one.zero_grad()
        backward(x, y)
        for one in optimizers:
            one.step()

    return step, optimizers


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05)]


def loss(called: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(called(x), y)


def checkpointed(model: nn.Module, called: nn.Module) -> Any:
    """Activations are recomputed during backward."""

    def backward(x: Tensor, y: Tensor) -> None:
        loss(lambda z: checkpoint(called, z, use_reentrant=False), x, y).backward()

    return stepping(sgd(model), backward)


def autocast(model: nn.Module, called: nn.Module) -> Any:
    def backward(x: Tensor, y: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(called, x, y)
        value.backward()

    return stepping(sgd(model), backward)


def muon(model: nn.Module, called: nn.Module) -> Any:
    """Matrices are trained by Muon, all other parameters by AdamW."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]
    return stepping(optimizers, lambda x, y: loss(called, x, y).backward())


def compiled(model: nn.Module, called: nn.Module) -> Any:
    """Inductor compiles the model and the step of the optimizer, except its hooks."""
    fast: Any = torch.compile(called)
    optimizers = sgd(model)

    @torch.compile
    def all_step() -> None:
        optimizers[0].step()

    def step(x: Tensor, y: Tensor) -> None:
        optimizers[0].zero_grad()
        loss(fast, x, y).backward()
        all_step()

    return step, optimizers


def compiled_in_place(model: nn.Module, called: nn.Module) -> Any:
    model.compile(backend="aot_eager")
    return stepping(sgd(model), lambda x, y: loss(called, x, y).backward())


def train(rank: int, way: Way, text: str | None, dtype: torch.dtype) -> Any:
    """Train under the strategy ``text``. None: under DDP."""
    model = make_model(rank, dtype)
    called = DistributedDataParallel(model) if text is None else model
    step, optimizers = way(model, called)
    sync = None if text is None else attach(called, optimizers, text)
    for number in range(STEPS):
        step(*make_batch(rank, number, SAMPLES, dtype))
    before = state(model)
    if sync is None:
        return before
    sync.finish()
    return before, state(model), sync.stats.steps, sync.stats.syncs


def every(rank: int, size: int, ways: list[Way], dtype: torch.dtype) -> Any:
    texts = (None, "bsp", "local:period=1", "streaming")
    return [[train(rank, way, text, dtype) for text in texts] for way in ways]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ways", "dtype"),
    [
        ([checkpointed], torch.float64),
        # The mean of two gradients is exact, so BSP has the same bits. LocalSGD rounds elsewhere.
        ([autocast, muon], torch.float32),
        *(
            pytest.param([way], torch.float64, marks=pytest.mark.filterwarnings("default"))
            for way in (compiled, compiled_in_place)
        ),
    ],
)
def test_tools_of_torch_train_as_under_ddp(ways: list[Way], dtype: torch.dtype) -> None:
    """BSP equals DDP, and so does LocalSGD of one step in double precision. All end alike."""
    results = run(every, ways, dtype, workers=2, seconds=110)
    for index, way in enumerate(ways):
        for of_rank in results:
            plain, bsp, local, streaming = of_rank[index]
            same(bsp[0], plain, 1e-12)
            if dtype == torch.float64:
                same(local[0], plain, 1e-12)
            for one, other in zip((bsp, local, streaming), results[0][index][1:], strict=True):
                same(one[1], other[1])
                assert one[2] == STEPS, way.__name__
            assert bsp[3] == local[3] == STEPS


def in_backward(rank: int, size: int) -> Any:
    """Each parameter's own optimizer steps and frees the gradient as soon as it exists."""
    found = []
    for text in ("bsp", "local:period=1"):
        model = make_model(rank)
        each = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

        def step(parameter: Tensor, each: Any = each) -> None:
            each[parameter].step()
            each[parameter].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        sync = attach(model, list(each.values()), text)
        for number in range(STEPS):
            loss_of(model, make_batch(rank, number)).backward()
        assert sync.step == sync.stats.syncs == STEPS
        found.append(state(model))
        sync.finish()
    return ddp(rank), found


def test_steps_during_backward_are_one_iteration() -> None:
    for plain, found in run(in_backward, workers=2):
        for one in found:
            same(one, plain, 1e-12)
