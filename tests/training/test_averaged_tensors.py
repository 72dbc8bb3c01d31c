"""Averaged tensors: only trainable parameters, and the modules ``also`` of a consensus."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offbeat
from loops import attach, close, error_of, everything, sgd, start
from problems import flat, make_batch, make_model, train_step
from worlds import run

STEPS = 5
TEXTS = ["bsp", "local:period=2", "streaming", "easgd:period=2"]


def adapted(seed: int) -> nn.Sequential:
    """A large frozen layer and small trainable ones, as with LoRA."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        large = nn.Linear(4, 500), nn.Linear(500, 4)
    model = nn.Sequential(*large, make_model(seed)).double()
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    return model


def frozen(rank: int, size: int) -> Any:
    found = []
    for text in ("bsp", "local:period=2"):
        sent = []
        for everything_held in (True, False):
            model = adapted(rank)
            held = [p for p in model.parameters() if p.requires_grad or everything_held]
            optimizer = torch.optim.SGD(held, lr=0.05)
            sync = attach(model, optimizer, text)
            for step in range(4):
                train_step(model, optimizer, make_batch(rank, step))
            sent.append((sync.stats.payload_bytes, flat(model)))
            if everything_held:
                model[0].requires_grad_(True)
                late = error_of(lambda m=model, o=optimizer: train_step(m, o, make_batch(rank, 9)))
            sync.detach()
        found.append((sent, late))
    return found


def test_frozen_parameters_are_not_sent_although_the_optimizer_holds_them() -> None:
    """Bytes and model equal those without them in the optimizer. Unfreezing later is refused."""
    for of_rank in run(frozen, workers=2):
        for ((bytes_held, model_held), (bytes_plain, model_plain)), late in of_rank:
            assert bytes_held == bytes_plain
            assert torch.equal(model_held, model_plain)
            assert "frozen at attach() no longer are, and would not be averaged" in late[1]


def test_an_optimizer_of_frozen_parameters_is_refused() -> None:
    model = make_model().requires_grad_(False)
    with pytest.raises(offbeat.AttachError, match="all parameters of the SGD are frozen"):
        offbeat.attach(model, sgd(model), offbeat.BSP())


def with_local_buffers(rank: int, size: int, text: str) -> Any:
    layers = parametrizations.spectral_norm(nn.Linear(4, 4)), spectral_norm(nn.Linear(4, 4))
    model = nn.Sequential(*layers, make_model(rank)).double()
    model.register_buffer("queue", torch.eye(4))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["queue"])
    optimizer = sgd(model)
    sync = attach(model, optimizer, text)
    for step in range(STEPS):
        train_step(model, optimizer, make_batch(rank, step))
        key = torch.randn(4, generator=torch.Generator().manual_seed(10 * step + rank))
        model.queue[step % 4] = normalize(key, dim=0)

    def unit_vectors() -> list[torch.Tensor]:
        names = "queue", "0.parametrizations.weight.0._u", "1.weight_v"
        return [model.get_buffer(name).clone() for name in names]

    local = unit_vectors()
    with sync.consensus():
        inside = unit_vectors()
    back = unit_vectors()
    sync.finish()
    return local, inside, back, unit_vectors()


@pytest.mark.parametrize("text", TEXTS)
def test_vectors_whose_mean_is_meaningless_become_those_of_rank_0(text: str) -> None:
    """Buffers that DDP ignores, and the vectors of a spectral norm, stay local."""
    results = run(with_local_buffers, text, workers=2)
    first = results[0][0]
    for local, inside, back, final in results:
        for index in range(3):
            assert local[index].norm(dim=-1).sub(1).abs().max() < 1e-6
            assert torch.equal(back[index], local[index])
            assert torch.equal(inside[index], first[index])
            assert torch.equal(final[index], first[index])
    for index in range(1 if text == "bsp" else 3):  # equal weights have equal vectors
        assert not torch.equal(first[index], results[1][0][index])


def moving_average(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


def with_averages(rank: int, size: int, text: str) -> Any:
    model, optimizer, sync = start(rank, text)
    ema, statistics = moving_average(model), nn.BatchNorm1d(3)
    also = [ema, statistics]
    begin = everything(ema)
    with torch.no_grad():
        statistics.running_mean += 1.0 + rank  # type: ignore[operator]
        statistics.num_batches_tracked += 5 * rank  # type: ignore[operator]
    for step in range(STEPS - rank):  # one worker has a step less
        train_step(model, optimizer, make_batch(rank, step))
        ema.update_parameters(model)
    own = everything(ema)
    with sync.consensus():
        without = everything(ema)
    with sync.consensus(also=also):
        inside = everything(ema)
    back = everything(ema)
    sync.finish(also=also)
    return begin, own, without, inside, back, everything(ema), everything(statistics)


@pytest.mark.parametrize("text", TEXTS)
def test_further_modules_are_the_mean_in_a_consensus(text: str) -> None:
    """With ``also`` they are the mean in consensus and after finish, and local in between."""
    results = run(with_averages, text, workers=2)
    owns = [result[1] for result in results]
    for begin, own, without, inside, back, final, statistics in results:
        for one, other in zip(begin, results[0][0], strict=True):
            assert torch.equal(one, other)
        for i, (mean, again) in enumerate(zip(inside, final, strict=True)):
            if mean.is_floating_point():
                close(mean, (owns[0][i] + owns[1][i]) / 2)
            else:
                assert mean == max(owns[0][i], owns[1][i])
            assert torch.equal(mean, again)
        for one, local, other in zip(own, without, back, strict=True):
            assert torch.equal(one, local)
            assert torch.equal(one, other)
        close(statistics[2], torch.full((3,), 1.5))
        assert statistics[4] == 5


def early(rank: int, size: int, text: str) -> Any:
    """Worker 0 enters a consensus every second step. Worker 1 ends after the first two."""
    model, ema = make_model(rank), nn.Linear(1, 1)
    optimizer = sgd(model)
    sync = attach(model, optimizer, text)
    nn.init.constant_(ema.weight, 1.0 + 2 * rank)
    inside = []
    for step in range(8 if rank == 0 else 2):
        train_step(model, optimizer, make_batch(rank, step))
        if step % 2:
            with sync.consensus(also=[ema]):
                inside.append(ema.weight.item())
            with sync.consensus():
                inside.append(ema.weight.item())
    sync.finish(also=[ema])
    return inside, ema.weight.item()


@pytest.mark.parametrize("text", TEXTS)
def test_a_worker_in_finish_takes_part_with_its_modules(text: str) -> None:
    """Its modules enter each consensus that averages modules, and no other one."""
    assert run(early, text, workers=2) == [([2.0, 1.0] * 4, 2.0), ([2.0, 3.0], 2.0)]


def wrong_modules(rank: int, size: int) -> Any:
    model, other = make_model(0), nn.Linear(2, 2)
    sync = attach(model, sgd(model), "bsp")

    def look(also: Any) -> None:
        with sync.consensus(also=also):
            pass

    found = [
        error_of(lambda: look(other)),
        error_of(lambda: look([[other]])),
        error_of(lambda: look(flat(model))),
        error_of(lambda: look([other, model[0]])),
        error_of(lambda: sync.finish(also=[model[0]])),
    ]
    for step in range(2):
        train_step(model, sync._worker.optimizers[0].optimizer, make_batch(rank, step))
    found.append(error_of(lambda: look([nn.Linear(2, 2 + rank)])))
    sync.detach()
    sync = attach(model, sgd(model), "bsp")
    found.append(error_of(lambda: look([other] if rank else [])))
    sync.detach()
    sync = attach(model, sgd(model), "bsp")
    found.append(error_of(lambda: sync.finish(also=[other] if rank else [])))
    sync.detach()
    return found


def test_wrong_modules_are_refused() -> None:
    """They must be modules with tensors of their own, the same on all workers.

    Wrong arguments are found before anything is sent, so training continues.
    """
    expected = [
        ("TypeError", "consensus(also=…) takes a list of modules such as [ema], got a Linear"),
        ("TypeError", "consensus(also=…) takes a list of modules such as [ema], got a list"),
        ("TypeError", "consensus(also=…) takes a list of modules such as [ema], got a Tensor"),
        ("AttachError", "consensus(also=…): a module shares tensors with the model"),
        ("AttachError", "finish(also=…): a module shares tensors with the model"),
        ("MismatchError", "rank 1 has other modules in consensus(also=…) or finish(also=…)"),
        ("MismatchError", "rank 0 has other modules in consensus(also=…) or finish(also=…)"),
        ("MismatchError", "rank 0 has other modules in consensus(also=…) or finish(also=…)"),
    ]
    for found in run(wrong_modules, workers=2):
        for (kinds, text), (kind, words) in zip(found, expected, strict=True):
            assert kinds[0] == kind, text
            assert words in text
