"""DistributedDataParallel around an attached model: switched off or refused."""

import contextlib
import re
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import offbeat
from loops import attach, error_of, everything, sgd
from offbeat.strategies.base import Strategy
from problems import loss_of, make_batch, make_model
from workers import run

STEPS = 7


def with_statistics(seed: int = 0) -> nn.Sequential:
    """A model whose buffers change in each pass."""
    return nn.Sequential(make_model(seed), nn.BatchNorm1d(1, dtype=torch.float64))


def bare(model: nn.Module, strategy: Strategy) -> tuple[Any, nn.Module]:
    return attach(model, sgd(model), strategy), model


def wrapper_given(model: nn.Module, strategy: Strategy) -> tuple[Any, nn.Module]:
    wrapper = DistributedDataParallel(model)
    return attach(wrapper, sgd(model), strategy), wrapper


class Own(DistributedDataParallel):
    """A subclass, as frameworks define them."""


class Outside(nn.Module):
    """A module around the wrapper, as that of Lightning Fabric."""

    def __init__(self, wrapper: nn.Module) -> None:
        super().__init__()
        self.wrapper = wrapper

    def forward(self, x: Tensor) -> Any:
        return self.wrapper(x)


def wrapped_twice(model: nn.Module, strategy: Strategy) -> tuple[Any, nn.Module]:
    outside = Outside(Own(model, find_unused_parameters=True))
    return attach(outside, sgd(model), strategy), outside.wrapper


def wrapped_in_part(model: nn.Module, strategy: Strategy) -> tuple[Any, nn.Module]:
    """Wrap the networks of a model one by one."""
    assert isinstance(model, nn.Sequential)
    wrapped = nn.Sequential(DistributedDataParallel(model[0], gradient_as_bucket_view=True))
    wrapped.append(DistributedDataParallel(model[1]))
    return attach(wrapped, sgd(model), strategy), wrapped


def trained(
    rank: int, prepare: Callable[..., tuple[Any, nn.Module]], strategy: Strategy
) -> tuple[list[Tensor], int, list[Tensor]]:
    """Return the model and bytes before the end, and the final model.

    Two of three passes are in no_sync.
    """
    model = with_statistics(rank)
    sync, called = prepare(model, strategy)
    no_sync = called.no_sync if isinstance(called, DistributedDataParallel) else sync.no_sync
    optimizer = sync._worker.optimizers[0].optimizer
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(3):
            with no_sync() if micro < 2 else contextlib.nullcontext():
                loss_of(called, make_batch(rank, 3 * step + micro)).backward()
        optimizer.step()
    before, sent = everything(model), sync.stats.payload_bytes
    sync.finish()
    return before, sent, everything(model)


def reduces(rank: int, wrapper: nn.Module) -> bool:
    """Return True if the gradients of all workers are equal after one pass."""
    wrapper.zero_grad()
    loss_of(wrapper, make_batch(rank, 99)).backward()
    mine = torch.cat([p.grad.reshape(-1) for p in wrapper.parameters() if p.grad is not None])
    all_of_them = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(one, mine) for one in all_of_them)


def everywhere(rank: int, size: int) -> Any:
    ways = [bare, wrapper_given, wrapped_twice, wrapped_in_part]
    return [
        [trained(rank, way, strategy) for way in ways]
        for strategy in (offbeat.LocalSGD(period=3), offbeat.BSP())
    ]


def test_a_wrapper_changes_nothing() -> None:
    """Parameters, statistics and bytes equal those of the bare loop bit for bit."""
    results = run(everywhere, workers=2)
    for of_rank in results:
        for plain, *wrapped in of_rank:
            for before, sent, after in wrapped:
                assert sent == plain[1]
                for one, other in zip((*plain[0], *plain[2]), (*before, *after), strict=True):
                    assert torch.equal(one, other)
    (local, _), (other_local, _) = results
    assert not torch.equal(local[0][0][0], other_local[0][0][0]), "between two means they differ"


def by_callbacks(rank: int, size: int) -> Any:
    """Train under both callbacks, with stand-ins for the frameworks. Twice under the first one."""
    transformers = types.ModuleType("transformers")
    transformers.TrainerCallback = type("TrainerCallback", (), {})  # type: ignore[attr-defined]
    lightning = types.ModuleType("lightning.pytorch")
    lightning.Callback = type("Callback", (), {})  # type: ignore[attr-defined]
    sys.modules.update({one.__name__: one for one in (transformers, lightning)})
    sys.modules["lightning"] = types.ModuleType("lightning")
    from offbeat.integrations.lightning import OffbeatCallback as OfLightning
    from offbeat.integrations.transformers import OffbeatCallback as OfTransformers

    found = []
    of_trainer = OfTransformers(offbeat.LocalSGD(period=9))
    of_lightning = OfLightning(offbeat.LocalSGD(period=9))
    arguments = types.SimpleNamespace(eval_on_start=False, load_best_model_at_end=False)
    started = types.SimpleNamespace(global_step=0)
    model: Any = make_model(rank)
    for _ in range(2):
        wrapper = DistributedDataParallel(model)
        told = {"model": model, "optimizer": sgd(model)}
        of_trainer.on_train_begin(arguments, started, None, **told)
        found.append(reduces(rank, wrapper))
        of_trainer.on_train_end(arguments, started, None, **told)
        found.append(reduces(rank, wrapper))
    model = make_model(rank)
    model.on_save_checkpoint = lambda checkpoint: None
    wrapper = DistributedDataParallel(model)
    trainer = types.SimpleNamespace(
        strategy=types.SimpleNamespace(model=wrapper),
        precision_plugin=None,
        optimizers=[sgd(model)],
    )
    of_lightning.on_train_start(trainer, model)
    found.append(reduces(rank, wrapper))
    of_lightning.on_train_end(trainer, model)
    found.append(reduces(rank, wrapper))
    return found


def test_the_callbacks_switch_the_wrapper_of_their_framework_off() -> None:
    """Also that of a second training. The Trainer does not tell a callback its wrapper."""
    assert run(by_callbacks, workers=2) == [[False, True] * 3] * 2


def test_an_engine_of_deepspeed_is_refused() -> None:
    """It is refused on one worker alone: nothing is sent."""

    class DeepSpeedEngine(Outside):
        __module__ = "deepspeed.runtime.engine"

    model = make_model(0)
    with pytest.raises(offbeat.AttachError, match="inside a DeepSpeedEngine of DeepSpeed"):
        offbeat.attach(DeepSpeedEngine(model), sgd(model))


def communicating() -> list[Any]:
    """Return the message of attach for torch's optimizers that communicate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing them is deprecated in part
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
    model = make_model(0)
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    averaging = PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=4))
    given = sharded, averaging
    return [error_of(lambda o=o: attach(model, o, offbeat.BSP())) for o in given]  # type: ignore[misc]


def life(rank: int, size: int) -> Any:
    model = make_model(rank)
    wrapper = DistributedDataParallel(model)
    found = [reduces(rank, wrapper)]
    sync = attach(wrapper, sgd(model), offbeat.LocalSGD(period=3))
    found.append(reduces(rank, wrapper))
    sync.finish()
    found.append(reduces(rank, wrapper))
    found.append(reduces(rank, DistributedDataParallel(make_model(rank))))
    errors = []
    mesh = init_device_mesh("cpu", (size,))
    divided = nn.Linear(4, 4)
    divided.weight = nn.Parameter(distribute_tensor(divided.weight, mesh, [Shard(0)]))
    errors.append(error_of(lambda: attach(divided, sgd(divided), offbeat.BSP())))
    errors += communicating()
    static = DistributedDataParallel(make_model(0), static_graph=True)
    errors.append(error_of(lambda: attach(static, sgd(static), offbeat.BSP())))
    several = [DistributedDataParallel(make_model(rank), static_graph=i == 1) for i in range(3)]
    whole = nn.Sequential(*several)
    errors.append(error_of(lambda: attach(whole, sgd(whole), offbeat.BSP())))
    found += [reduces(rank, several[i]) for i in (0, 2)]
    alone = dist.new_group([rank], use_local_synchronization=True)
    for group, inner in ((alone, None), (None, alone)):
        wrapper = DistributedDataParallel(make_model(rank), process_group=inner)
        try:
            attach(wrapper, sgd(wrapper), offbeat.LocalSGD(period=3), group=group)
        except offbeat.AttachError as error:
            errors.append((["AttachError"], str(error)))
    return found, errors


def test_a_wrapper_reduces_again_after_the_end() -> None:
    """Wrappers of other models reduce all the time, and those of a model that attach refuses.

    Options that cannot be switched off, and wrappers over other ranks, are refused on every worker.
    """
    for found, errors in run(life, workers=2):
        assert found == [True, False, True, True, True, True]
        assert "it is a DTensor, divided among workers" in errors[0][1]
        for _, text in errors[1:3]:
            assert "communicates in its step by itself" in text
        assert all("static_graph" in text for _, text in errors[3:5])
        for ranks, (_, text) in zip(["0, 1", "."], errors[5:], strict=True):
            assert re.search(f"over ranks? {ranks}, and attach.* over ranks? .*node_group", text)
