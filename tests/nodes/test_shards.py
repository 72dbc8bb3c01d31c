"""Models that ``fully_shard`` shards inside nodes, on two nodes of two real processes.

The rows of a Linear layer are divided among the workers of a node, so the shards of these models
differ in size and some are empty.
"""

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from cells import some
from loops import attach, close, error_of
from problems import loss_of, make_batch, make_model, train_step
from replays import part_of_each_number, recorded, require_replayed, whole
from workers import run
from worlds import simulated

STEPS = 9
FIXED = [
    "local:period=2",
    "diloco:period=4,overlap=1",
    "bsp",
    "selsync:delta=0.05",
    "async:schedule=cyclic,staleness=4",
    "streaming:schedule=cyclic,staleness=4,parts=1",
    "selsync:target_lssr=0.5",
    "diloco:period=4,outer_momentum=0",
]
"""Strategies whose schedule does not depend on time, and whose only part is the model."""


def divided(
    model: nn.Module,
    *,
    layers: bool = True,
    reshards: bool = True,
    workers: int = 2,
    **options: Any,
) -> nn.Module:
    """Apply ``fully_shard`` with ``options`` to ``model`` over the workers of this node.

    Without ``layers`` it is applied to the root alone, which is faster and gives the same shards.
    """
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    shape = dist.get_world_size() // workers, workers
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("across", "inside"))["inside"]
    options |= {"mesh": mesh, "reshard_after_forward": reshards}
    for layer in model.children() if layers else ():
        if list(layer.parameters()):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def model_of(model: nn.Module) -> Tensor:
    """Return all parameters and buffers."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return whole([*model.parameters(), *model.buffers()])


def with_statistics(seed: int) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), *make_model(seed))


def trained(rank: int, text: str, *, shards: bool) -> Any:
    """Return the model after each step, in a consensus and at the end; and ``stats.syncs``."""
    model: nn.Module = with_statistics(rank // 2)  # the same in a node
    model = divided(model, reshards=False) if shards else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sync = attach(model, optimizer, text, node_group="auto")
    trace = []
    for step in range(STEPS - rank // 2):  # nodes may take different numbers of steps
        optimizer.zero_grad()
        loss_of(model, make_batch(rank, step)).backward()
        if step % 3 == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        elif step % 3 == 2:
            sync.clip_grad_norm_(0.3)
        optimizer.step()
        trace.append(whole(model.parameters()))
        if step == 4:
            with sync.consensus(), torch.no_grad():
                trace.append(model.eval()(make_batch(0, 99)[0]))  # leaves gathered parameters
                trace.append(whole(model.parameters()))
            model.train()
    sync.finish()
    return [*trace, model_of(model)], sync.stats.syncs


def shard_by_shard(rank: int, size: int, texts: list[str]) -> Any:
    return [trained(rank, text, shards=True) for text in texts]


def all_on_each(rank: int, size: int, texts: list[str]) -> Any:
    return [trained(rank, text, shards=False) for text in texts]


@pytest.mark.parametrize("texts", some([FIXED[:3], FIXED[3:]], 0))
def test_shards_train_as_whole_models_do(texts: list[str]) -> None:
    """Every step, the consensus, the end and the decisions are those of nodes without shards.

    Includes clipping by the norm over all shards, buffers, and an evaluation that leaves modules
    with gathered parameters.
    """
    found = run(shard_by_shard, texts, workers=4, workers_per_node=2)
    expected = simulated(all_on_each, texts, workers=4, workers_per_node=2)
    for shards, wholes in zip(found, expected, strict=True):
        for i, ((one, synced), (other, expect)) in enumerate(zip(shards, wholes, strict=True)):
            for a, b in zip(one, other, strict=True):
                close(a.double(), b.double(), 1e-9)
            assert synced == expect, texts[i]
            assert torch.equal(one[-1], found[0][i][0][-1])


# -- parts of equal bytes --------------------------------------------------------------------------


REPLAYED = {
    "streaming:schedule=cyclic,outer_gain=1,parts=3,staleness=4": 3,
    "streaming:schedule=cyclic,outer_gain=1,parts=24,staleness=4": 24,
    "streaming:schedule=cyclic,outer_gain=1,parts=5,staleness=12": 5,
    "streaming:outer_gain=1,parts=24": 24,
    "async:schedule=eager,staleness=4": 1,
}
"""The number of parts."""


def in_parts(rank: int, size: int) -> Any:
    steps = 3 * STEPS - rank // 2  # one node takes a step less
    return [
        recorded(rank, text, divided(make_model(rank // 2), layers=False), steps)
        for text in REPLAYED
    ]


def test_parts_of_shards_land_as_they_arrive() -> None:
    """The workers of a node hold 24 and 16 numbers: of 24 parts one of them has 8 empty ones."""
    assert part_of_each_number(24, rows=True).bincount().tolist() == [2] * 16 + [1] * 8
    results = run(in_parts, workers=4, workers_per_node=2)
    for i, parts in enumerate(REPLAYED.values()):
        require_replayed([found[i] for found in results], parts, rows=True)


# -- lossy wires -----------------------------------------------------------------------------------

LOSSY = [
    ("streaming:parts=3,staleness=6", "int2"),
    ("streaming:schedule=cyclic,staleness=4,parts=24", "int8"),
    ("async:schedule=eager,staleness=3,outer_momentum=0.5", "int8"),
    ("diloco:period=4,fragments=3,overlap=1", "int8"),
    ("selsync:target_lssr=0.5", "int2"),
    ("bsp", "int8"),
]
"""Eager parts, parts in turn, fragments, models and gradients."""


def uneven(seed: int) -> nn.Module:
    """Return a model large enough for quantization, with odd numbers of rows."""
    torch.manual_seed(seed)
    hidden = nn.Linear(4, 63), nn.Tanh(), nn.Linear(63, 67), nn.Tanh()
    return nn.Sequential(nn.BatchNorm1d(4), *hidden, nn.Linear(67, 1))


def one_row(seed: int) -> nn.Module:
    """Return a model of which the second worker of a node has no parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1, bias=False))


def all_alike(rank: int, size: int, make: Callable[[int], nn.Module]) -> Any:
    """Return, for each row, a consensus, the end and decisions. Steps take different times."""
    found = []
    for text, wire in LOSSY:
        model = divided(make(rank // 2), layers=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sync = attach(model, optimizer, text, wire=wire, node_group="auto")
        for step in range(10 - rank // 2):
            time.sleep(0.002 * ((rank + step) % 3))
            train_step(model, optimizer, make_batch(rank, step, 8, torch.float32))
            if step == 6:
                with sync.consensus():
                    shown = model_of(model)
        details, syncs = dict(sync.stats.details), sync.stats.syncs
        details.pop("landing_seconds", None)
        sync.finish()
        found.append((shown, model_of(model), details, syncs))
    return found


@pytest.mark.parametrize("make", [uneven, one_row])
def test_all_workers_end_equal_and_nodes_decide_alike(make: Callable[[int], nn.Module]) -> None:
    """In a consensus and at the end. A worker may hold no parameters."""
    results = run(all_alike, make, workers=4, workers_per_node=2, seconds=110)
    for i, row in enumerate(LOSSY):
        shown, end, _, syncs = results[0][i]
        assert shown.isfinite().all(), row
        assert end.isfinite().all(), row
        assert not torch.equal(shown, end), row
        assert syncs > 0, row
        for rank, of_rank in enumerate(results):
            assert torch.equal(of_rank[i][0], shown), (row, "consensus")
            assert torch.equal(of_rank[i][1], end), (row, "end")
            assert of_rank[i][2:] == results[rank ^ 1][i][2:], (row, "decisions of a node")


# -- other features of attach ------------------------------------------------------------------


class Scaled:
    """A training with a GradScaler and a learning-rate schedule, whose gradients overflow once."""

    def __init__(self, rank: int, text: str, wire: Any = None, *, shards: bool) -> None:
        self.rank = rank
        model: nn.Module = with_statistics(rank // 2)
        self.model = divided(model, layers=False, reshards=False) if shards else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.7)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        options = {"scaler": self.scaler, "wire": wire, "node_group": "auto"}
        self.sync = attach(self.model, self.optimizer, text, **options)
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

    def evaluate(self) -> None:
        """Leave modules with gathered parameters."""
        with torch.no_grad():
            self.model.eval()(make_batch(self.rank, 99)[0])
        self.model.train()

    def end(self) -> Tensor:
        counted = self.sync.stats.steps, self.sync.stats.syncs, self.sync.stats.payload_bytes
        self.sync.finish()
        return torch.cat([whole(self.model.parameters()), torch.tensor(counted).double()])


def scaled(rank: int, size: int, texts: list[str]) -> Any:
    found = []
    for text in texts:
        training = Scaled(rank, text, shards=False)
        # without the bytes, which differ with shards
        found.append([*training.steps(0, STEPS), training.end()[:-1]])
    return found


def resumed(rank: int, size: int, rows: list[tuple[str, Any]], folder: str) -> Any:
    """Train, train with a save, and with a save and a load. Count the saved numbers."""
    found = []
    for i, row in enumerate(rows):
        training = Scaled(rank, *row, shards=True)
        plain = [*training.steps(0, STEPS), training.end()]
        training = Scaled(rank, *row, shards=True)
        trace = training.steps(0, 5)
        training.sync.state_dict()  # lands what is in flight
        trace += [*training.steps(5, STEPS), training.end()]
        training = Scaled(rank, *row, shards=True)
        again = training.steps(0, 5)
        training.evaluate()
        path = offbeat.save(f"{folder}/{i}", training.sync, **training.states)
        saved = torch.load(path, weights_only=True)
        training.sync.detach()
        training = Scaled(rank, *row, shards=True)
        training.evaluate()
        loaded = offbeat.load(f"{folder}/{i}", training.sync, **training.states)
        assert loaded is not None
        again += [*training.steps(loaded.step, STEPS), training.end()]
        found.append(
            (plain, trace, again, sum(t.numel() for t in saved["model"].values() if t.dim() == 2))
        )
    return found


SAVED = [(FIXED[1], None), ("streaming:schedule=cyclic,parts=3", "int8")]
ALL_SAVED = [[(text, wire) for text in FIXED] for wire in (None, "int8")]


@pytest.mark.parametrize("rows", some([SAVED, *ALL_SAVED], 0))
def test_a_saved_training_resumes_bit_for_bit(rows: list[tuple[str, Any]], tmp_path: Path) -> None:
    """A file holds the local shards of one worker. A node with an overflow skips the step.

    With an exact wire every step is that of nodes without shards.
    """
    exact = [i for i, (text, wire) in enumerate(rows) if wire is None and text in FIXED]
    results = run(resumed, rows, str(tmp_path), workers=4, workers_per_node=2)
    expected = simulated(scaled, [rows[i][0] for i in exact], workers=4, workers_per_node=2)
    matrices = sum(p.numel() for p in make_model().parameters() if p.dim() == 2)
    for rank, found in enumerate(results):
        for i, (_, trace, again, numbers) in enumerate(found):
            assert numbers + results[rank ^ 1][i][3] == matrices
            for one, same in zip(trace, again, strict=True):
                assert torch.equal(one, same), rows[i]
            assert results[0][i][0][2][-1] == 4.0, "the scale was halved"
        for i, wholes in zip(exact, expected[rank], strict=True):
            trace = found[i][0]
            for one, other in zip([*trace[:-1], trace[-1][:-1]], wholes, strict=True):
                close(one, other, 1e-9)


# -- errors ----------------------------------------------------------------------------------------


def meshes(case: str) -> nn.Module:
    """Return a model sharded in a way that ``node_group`` refuses, or in the supported way."""
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
    ("", {"min_workers": 1}, "min_workers with node_group"),
]


def refused(rank: int, size: int) -> Any:
    """Collect errors of rank 0 alone, then of all workers."""
    found = []
    for case, options, _ in REFUSED:
        model, given = meshes(case), {"strategy": "local:period=2", "node_group": "auto", **options}
        if rank == 0:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            found.append(error_of(lambda m=model, o=optimizer, g=given: attach(m, o, **g)))
    model = divided(make_model(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    together = []
    sync = attach(model, optimizer, "local:period=2", node_group="auto")
    together.append(error_of(lambda: sync.finish(also=[nn.Linear(1, 1)])))
    sync.detach()
    sync = attach(model, optimizer, "local:period=2", node_group="auto")
    train_step(model, optimizer, make_batch(rank, 0))
    with sync.consensus():
        together.append(error_of(lambda: offbeat.save("never", sync)))
    sync.finish()
    return found, together, whole(model.parameters())


def test_unsupported_uses_of_shards_are_refused() -> None:
    """Errors that follow from the arguments alone are raised before any message is sent."""
    results = run(refused, workers=4, workers_per_node=2)
    for (kinds, text), (_, _, part) in zip(results[0][0], REFUSED, strict=True):
        assert "AttachError" in kinds, text
        assert part in text
    for _, (also, saved), end in results:
        assert "finish(also=…) with a model that fully_shard has divided" in also[1]
        assert "torch.distributed.checkpoint" in saved[1]
        assert torch.equal(end, results[0][2])
