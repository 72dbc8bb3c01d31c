"""``offbeat to-dcp``: torch.distributed.checkpoint reads in other layouts what ``save`` wrote.

Its modules take a second to import. So only functions import them.
"""

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from cells import nightly
from loops import attach, error_of, sgd
from offbeat.errors import CheckpointError
from problems import make_batch, make_model, train_step
from workers import run
from worlds import simulated

State = dict[str, Any]


def module(name: str) -> Any:
    return importlib.import_module(name)


def to_dcp(*arguments: Any, step: int | None = None) -> None:
    """Call the implementation of the command."""
    module("offbeat.cli.checkpoints").to_dcp(*arguments, step=step)


def uneven(seed: int, *, compiled: bool = False) -> nn.Sequential:
    """Return a model with odd numbers of rows, one of them for two workers."""
    torch.manual_seed(seed)
    part: Any = nn.Sequential(nn.Linear(7, 3), nn.Tanh())
    part = torch.compile(part, backend="eager") if compiled else part
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 7), part, nn.Linear(3, 1))


def divided(model: nn.Sequential) -> nn.Module:
    """Divide a model among two workers with ``fully_shard``; the second layer by its columns."""
    fully_shard = module("torch.distributed.fsdp").fully_shard
    shard = module("torch.distributed.tensor").Shard
    shape = dist.get_world_size() // 2, 2
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("across", "inside"))["inside"]
    fully_shard(model[1], mesh=mesh, shard_placement_fn=lambda p: shard(p.dim() - 1))
    fully_shard(model, mesh=mesh)
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose order is not that of the model."""
    groups = [[p for p in model.parameters() if p.dim() == dim] for dim in (2, 1)]
    return torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "lr": 0.02}])


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool = False) -> State:
    states = module("torch.distributed.checkpoint.state_dict")
    options = states.StateDictOptions(full_state_dict=full)
    found = states.get_state_dict(model, optimizer, options=options)
    return {"model": found[0], "optimizer": found[1]}


def saved(rank: int, size: int, folder: Path, kind: str) -> State:
    """Train, save, and return the model of a consensus at this step, with the local optimizer."""
    model = uneven(rank // 2, compiled="compiled" in kind)
    model = divided(model) if "shards" in kind else model
    optimizer = adam(model)
    sync = attach(model, optimizer, "streaming:parts=3", node_group="auto")
    with torch.compiler.set_stance("force_eager"):
        for step in range(5):
            train_step(model, optimizer, make_batch(rank, step, dtype=torch.float32))
    optimizer.param_groups[1]["lr"] /= 4  # as a schedule does
    offbeat.save(folder, sync)
    with sync.consensus():
        return state_of(model, optimizer, full=True)


def reloaded(rank: int, size: int, output: Path) -> State:
    """Load into a model that is divided in each node, attach, and return all of it."""
    model = divided(uneven(9))
    optimizer = adam(model)
    state = state_of(model, optimizer)
    module("torch.distributed.checkpoint").load(state, checkpoint_id=output)
    names = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    module("torch.distributed.checkpoint.state_dict").set_state_dict(model, optimizer, **names)
    with attach(model, optimizer, "streaming", node_group="auto"):
        return state_of(model, optimizer, full=True)


def require_equal(found: State, expected: State) -> None:
    """Compare two states. Models are means, of which rounding differs."""
    torch.testing.assert_close(found["model"], expected["model"], rtol=0, atol=1e-6)
    found, expected = found["optimizer"], expected["optimizer"]
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)
    assert found["param_groups"] == expected["param_groups"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["shards", *nightly(["whole", "shards compiled"])])
def test_dcp_loads_a_checkpoint_in_other_layouts(kind: str, tmp_path: Path) -> None:
    """What 2 × 2 workers have saved continues in one process, and in another number of nodes."""
    folder, output = tmp_path / "saved", tmp_path / "dcp"
    expected = run(saved, folder, kind, workers=4, workers_per_node=2)[0]
    to_dcp(folder, output)
    model = uneven(9)
    state = state_of(model, adam(model))
    module("torch.distributed.checkpoint").load(state, checkpoint_id=output)
    require_equal(state, expected)
    workers = 2 if kind == "shards" else 6
    for found in run(reloaded, output, workers=workers, workers_per_node=2):
        require_equal(found, expected)


# -- workers with whole models ---------------------------------------------------------------------


def with_buffers(seed: int) -> nn.Module:
    """Return a model with buffers that become a mean, remain local, or are no floats."""
    model = nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), *make_model(seed))
    model.register_buffer("queue", torch.full((3,), float(seed)))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["queue"])
    model.register_buffer("flag", torch.tensor(seed == 0))
    return model


def saved_twice(rank: int, size: int, folder: Path) -> dict[str, Tensor]:
    """Save at steps 3 and 5. Return the consensus at step 5."""
    model = with_buffers(rank)
    optimizer = sgd(model)
    sync = attach(model, optimizer, "local:period=4")
    for step in range(5):
        train_step(model, optimizer, make_batch(rank, step))
        if step in (2, 4):
            offbeat.save(folder, sync)
    with sync.consensus():
        return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_model_is_the_mean_and_files_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = tmp_path / "saved", tmp_path / "dcp"
    expected = simulated(saved_twice, folder, workers=2)[0]
    to_dcp(folder, output)
    assert f"{output} holds step 5" in " ".join(capsys.readouterr().out.split())
    state = {"model": with_buffers(9).state_dict()}
    module("torch.distributed.checkpoint").load(state, checkpoint_id=output)
    torch.testing.assert_close(state["model"], expected, rtol=0, atol=1e-12)

    def refusal(step: int | None = None, to: Path = tmp_path / "new") -> str:
        kinds, text = error_of(lambda: to_dcp(folder, to, step=step))
        assert "CheckpointError" in kinds
        assert not (tmp_path / "new").exists()
        return text

    assert "exists" in refusal(to=output)
    assert "has no step-4.rank0.pt" in refusal(4)
    (folder / "step-5.rank1.pt").unlink()
    assert "step-5.rank1.pt cannot be read" in refusal()
    shutil.copy(folder / "step-3.rank1.pt", folder / "step-5.rank1.pt")
    assert "not saved together" in refusal()
    to_dcp(folder, tmp_path / "new", step=3)


def test_state_that_differs_between_shards_is_refused() -> None:
    """Factors of a shard, as of Adafactor, cannot be joined to those of the whole."""
    joined = module("offbeat.checkpoint.to_dcp")._joined
    node = [{"layout": {"shards": {"w": 0}}, "model": {"w": torch.zeros(4, 2)}}]
    assert joined("w", node, [torch.tensor(3.0)] * 2) == 3
    assert joined("w", node, [torch.ones(4, 2)] * 2).shape == (8, 2)
    with pytest.raises(CheckpointError, match="state of 'w' has neither the shape"):
        joined("w", node, [torch.zeros(2), torch.ones(2)])
