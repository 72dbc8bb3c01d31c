"""Models that ``fully_shard`` divides inside nodes, on real processes: values of whole models."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from loops import attach, close, error_of
from pages import code_on
from problems import loss_of, make_batch, make_model, train_step
from workers import run
from worlds import simulated

STEPS = 9
TEXTS = [
    "local:period=2",
    "async:schedule=cyclic,staleness=4",
    "selsync:delta=0.05",
    "bsp",
    "diloco:period=4,overlap=1",
    "streaming:schedule=cyclic,staleness=4,parts=1",
    "selsync:target_lssr=0.5,aggregate=gradients",
]


def divided(
    model: nn.Module, *, reshards: bool = True, workers: int = 2, **options: Any
) -> nn.Module:
    """``model`` given to ``fully_shard``, layer by layer, over the workers of this node."""
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    shape = dist.get_world_size() // workers, workers
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("across", "inside"))["inside"]
    for layer in model.children():
        if not isinstance(layer, nn.Tanh):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshards, **options)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards, **options)
    return model


def whole(tensors: Any) -> Tensor:
    """All numbers, gathered where they are divided."""
    full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.detach().reshape(-1) for t in full]).clone()


def with_statistics(seed: int) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), *make_model(seed))


def trained(rank: int, text: str, *, shards: bool) -> Any:
    """Each model, what a look at the consensus shows, and what was counted."""
    model: nn.Module = with_statistics(rank // 2)  # a node divides one model
    model = divided(model, reshards=False) if shards else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sync = attach(model, optimizer, text, max_grad_norm=0.5, node_group="auto")
    trace, shown = [], []
    for step in range(STEPS - rank // 2):  # nodes may take different numbers of steps
        optimizer.zero_grad()
        loss_of(model, make_batch(rank, step)).backward()
        if step % 3 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        trace.append(whole(model.parameters()))
        if step == 4:
            with sync.consensus(), torch.no_grad():
                shown.append(model.eval()(make_batch(0, 99)[0]))  # leaves gathered parameters
                if shards:
                    shown.append(whole([p for p in optimizer.param_groups[0]["params"]]))
                else:
                    shown.append(whole(model.parameters()))
            model.train()
    sync.finish()
    if shards:
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
    end = torch.cat([whole(model.parameters()), whole(b.double() for b in model.buffers())])
    return trace, shown, end, sync.stats.payload_bytes, sync.stats.syncs


def shard_by_shard(rank: int, size: int, texts: list[str]) -> Any:
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    return [trained(rank, text, shards=True) for text in texts]


def all_on_each(rank: int, size: int, texts: list[str]) -> Any:
    return [trained(rank, text, shards=False) for text in texts]


@pytest.mark.parametrize("texts", [TEXTS[:2], pytest.param(TEXTS[2:], marks=pytest.mark.nightly)])
def test_shards_train_as_whole_models_do(texts: list[str]) -> None:
    """Every step, the consensus, the end and the decisions are those of nodes of whole models.

    With clips of the norm over all shards, statistics, and an evaluation in between, after which
    modules hold gathered parameters.
    """
    found = run(shard_by_shard, texts, workers=4)
    expected = simulated(all_on_each, texts, workers=4, workers_per_node=2)
    for shards, wholes in zip(found, expected, strict=True):
        for text, one, other in zip(texts, shards, wholes, strict=True):
            for a, b in zip(
                [*one[0], *one[1], one[2]], [*other[0], *other[1], other[2]], strict=True
            ):
                close(a, b, 1e-9)
            assert one[4] == other[4], text
            assert torch.equal(one[2], found[0][texts.index(text)][2])


def in_turn(rank: int, size: int) -> Any:
    """A lone node, and nodes of one worker; two optimizers, and a frozen layer."""
    found = []
    for workers, text in ((size, "local:period=2"), (1, "bsp")):
        os.environ.update(LOCAL_RANK=str(rank % workers), LOCAL_WORLD_SIZE=str(workers))
        model = make_model(0)
        for p in model[2].parameters():
            p.requires_grad_(False)
        model = divided(model, workers=workers)
        first, _, middle, last = model.children()
        optimizers = [
            torch.optim.SGD([*first.parameters(), *middle.parameters()], lr=0.05),
            torch.optim.SGD(last.parameters(), lr=0.05),
        ]
        sync = attach(model, optimizers, text, node_group="auto")
        for step in range(3):
            model.zero_grad()
            loss_of(model, make_batch(rank, step)).backward()
            for optimizer in optimizers:
                optimizer.step()
        sync.finish()
        found.append(whole(model.parameters()))
    return found


@pytest.mark.nightly
def test_any_number_of_workers_may_share_a_model() -> None:
    """The mean of all gradients, by hand."""
    model = make_model(0)
    for step in range(3):
        model.zero_grad()
        for rank in range(4):
            (loss_of(model, make_batch(rank, step)) / 4).backward()
        with torch.no_grad():
            for p in [*model[0].parameters(), *model[3].parameters()]:
                p -= 0.05 * p.grad  # type: ignore[operator]
    for found in run(in_turn, workers=4):
        for one in found:
            close(one, whole(model.parameters()))


class Scaled:
    """A worker with a GradScaler and a schedule, whose gradients overflow once."""

    def __init__(self, rank: int, text: str, *, shards: bool) -> None:
        self.rank = rank
        model: nn.Module = with_statistics(rank // 2)
        self.model = divided(model) if shards else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.sync = attach(self.model, self.optimizer, text, scaler=self.scaler, node_group="auto")
        self.states = {"scheduler": self.scheduler, "scaler": self.scaler}

    def steps(self, first: int, end: int) -> list[Tensor]:
        trace = []
        for step in range(first, end):
            self.optimizer.zero_grad()
            loss = loss_of(self.model, make_batch(self.rank, step))
            factor = float("inf") if (self.rank, step) == (1, 2) else 1.0
            self.scaler.scale(factor * loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            scale = torch.tensor([self.scaler.get_scale()], dtype=torch.float64)
            trace.append(torch.cat([whole(self.model.parameters()), scale]))
        return trace

    def end(self) -> Tensor:
        counted = self.sync.stats.steps, self.sync.stats.syncs, self.sync.stats.payload_bytes
        self.sync.finish()
        return torch.cat([whole(self.model.parameters()), torch.tensor(counted).double()])


def scaled(rank: int, size: int, text: str) -> Any:
    training = Scaled(rank, text, shards=False)
    trace = training.steps(0, STEPS)
    return [*trace, training.end()[:-1]]  # the bytes of shards are others


def resumed(rank: int, size: int, text: str, folder: str) -> Any:
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    training = Scaled(rank, text, shards=True)
    trace = [*training.steps(0, STEPS), training.end()]
    training = Scaled(rank, text, shards=True)
    again = training.steps(0, 5)
    path = offbeat.save(folder, training.sync, **training.states)
    saved = torch.load(path, weights_only=True)
    training.sync.detach()
    training = Scaled(rank, text, shards=True)
    found = offbeat.load(folder, training.sync, **training.states)
    assert found is not None
    again += [*training.steps(found.step, STEPS), training.end()]
    return trace, again, sum(t.numel() for t in saved["model"].values() if t.dim() == 2)


@pytest.mark.parametrize(
    "text", ["local:period=2", *(pytest.param(t, marks=pytest.mark.nightly) for t in TEXTS[1:])]
)
def test_shards_are_scaled_and_resumed(text: str, tmp_path: Path) -> None:
    """The node whose one worker overflows skips the step; a file holds a worker's own shards."""
    results = run(resumed, text, str(tmp_path), workers=4)
    expected = simulated(scaled, text, workers=4, workers_per_node=2)
    matrices = sum(p.numel() for p in make_model().parameters() if p.dim() == 2)
    assert [results[0][2] + results[1][2], results[2][2] + results[3][2]] == [matrices] * 2
    for (trace, again, _), other in zip(results, expected, strict=True):
        for one, same_again in zip(trace, again, strict=True):
            assert torch.equal(one, same_again)
        for one, of_whole in zip(trace[:-1], other[:-1], strict=True):
            close(one, of_whole, 1e-9)
        close(trace[-1][:-1], other[-1], 1e-9)
    assert results[0][0][2][-1] == 4.0  # it was halved


# -- errors ---------------------------------------------------------------------------------------


def meshes(case: str) -> nn.Module:
    """A model divided in a way that ``node_group`` cannot take, or in the one that it can."""
    fsdp = importlib.import_module("torch.distributed.fsdp")
    parallel = importlib.import_module("torch.distributed.tensor.parallel")
    model = make_model(0)
    if case == "all":
        fsdp.fully_shard(model, mesh=dist.init_device_mesh("cpu", (4,)))
    elif case == "two":
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))
        fsdp.fully_shard(model, mesh=mesh)
    elif case == "some":
        inside = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
        fsdp.fully_shard(model[0], mesh=inside)
    elif case == "tensors":
        inside = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
        parallel.parallelize_module(model, inside, {"0": parallel.ColwiseParallel()})
    else:
        divided(model)
    return model


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("", {"node_group": None}, "every worker must hold the whole model"),
    ("all", {}, "its mesh has the ranks [0, 1, 2, 3], and the node of node_group [0, 1]"),
    ("two", {}, "its mesh has 2 dimensions"),
    ("some", {}, "'2.weight' cannot be trained between nodes: it is no DTensor, and others are"),
    ("tensors", {}, "not given to fully_shard (tensor parallelism)"),
    ("", {"non_finite": "raise"}, "non_finite with a model that fully_shard has divided"),
    ("", {"companions": [nn.Linear(1, 1)]}, "companions with a model that fully_shard"),
    ("", {"optimizer_state": "average"}, 'optimizer_state="average" with a model that fully'),
    ("", {"strategy": "diloco:period=4,fragments=2"}, "cuts the model into parts"),
    ("", {"strategy": "streaming:schedule=cyclic,parts=2"}, "cuts the model into parts"),
    ("", {"strategy": "streaming:parts=1"}, "it depends on when messages arrive"),
    ("", {"strategy": "async:schedule=eager"}, "it depends on when messages arrive"),
]


def refused(rank: int, size: int) -> Any:
    """What rank 0 alone is told; then what all are of a checkpoint, as the page has it."""
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    found = []
    for case, options, _ in REFUSED:
        model, given = meshes(case), {"strategy": "local:period=2", "node_group": "auto", **options}
        if rank == 0:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            found.append(error_of(lambda m=model, o=optimizer, g=given: attach(m, o, **g)))
    model = make_model(0)
    model.layers = list(model)[:1]  # as the page calls them
    fsdp = importlib.import_module("torch.distributed.fsdp")
    names = {"model": model, "nodes": 2, "gpus": 2, "fully_shard": fsdp.fully_shard}
    page = code_on("coming-from-ddp", "fully_shard(layer").replace('"cuda"', '"cpu"')
    exec(page, names | {"torch": torch, "dist": dist, "offbeat": offbeat}, names)
    optimizer, sync = names["optimizer"], names["sync"]
    train_step(model, optimizer, make_batch(rank, 0))
    with sync.consensus():
        kinds, text = error_of(lambda: offbeat.save("never", sync))
    sync.finish()
    return found, kinds, text, whole(model.parameters())


def test_what_shards_cannot_do_is_refused_before_anything_is_sent() -> None:
    """By one worker that attaches alone, too."""
    results = run(refused, workers=4)
    for (kinds, text), (_, _, part) in zip(results[0][0], REFUSED, strict=True):
        assert "AttachError" in kinds, text
        assert part in text
    for _, kinds, text, end in results:
        assert "AttachError" in kinds
        assert "torch.distributed.checkpoint" in text
        assert torch.equal(end, results[0][3])
