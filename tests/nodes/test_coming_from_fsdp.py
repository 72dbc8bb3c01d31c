"""The page "From FSDP or HSDP to Offbeat": both versions of its script, and what stays the same."""

import importlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cells import nightly
from loops import attach
from nodes.test_shards import divided
from pages import DOCS, ROOT
from problems import loss_of, make_batch
from replays import whole
from workers import run

SCRIPT = ROOT / "examples" / "train_fsdp.py"


def version_for_hsdp() -> str:
    """Return the script without the change that the page shows."""
    source = SCRIPT.read_text(encoding="utf-8")
    diff = (DOCS / "coming-from-fsdp.md").read_text("utf-8").partition("```diff\n")[2]
    for hunk in re.split(r"^ +# …\n", diff.partition("```")[0], flags=re.MULTILINE):
        lines = [line or " " for line in hunk.splitlines()]
        before, after = (
            "".join(f"{line[1:]}\n" for line in lines if line[0] != other) for other in "+-"
        )
        assert source.count(after) == 1, after
        source = source.replace(after, before)
    return source


def train(rank: int, size: int, source: str, folder: Path) -> Tensor:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    script: dict[str, Any] = {"__name__": "script"}
    exec(compile(source, SCRIPT, "exec"), script)
    model = script["main"](folder, 100)
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])


def test_the_page_shows_the_change_of_the_example() -> None:
    source = version_for_hsdp()
    compile(source, SCRIPT, "exec")
    assert "offbeat." not in source
    assert "set_state_dict" in source


@pytest.mark.nightly
@pytest.mark.timeout(500)
@pytest.mark.filterwarnings("ignore::UserWarning")  # from torch
def test_the_example_ends_with_the_loss_of_hsdp(tmp_path: Path) -> None:
    script: dict[str, Any] = {"__name__": "script"}
    exec(compile(SCRIPT.read_text(encoding="utf-8"), SCRIPT, "exec"), script)
    losses = []
    for name, source in ("hsdp", version_for_hsdp()), ("offbeat", SCRIPT.read_text("utf-8")):
        folder = tmp_path / name
        options = {"workers": 4, "newcomers": 0, "workers_per_node": 2, "seconds": 200}
        ends = run(train, source, folder, **options)
        assert all(torch.equal(end, ends[0]) for end in ends)
        model = script["GPT"]()
        before = script["loss_of"](model, script["HELD_OUT"]).item()
        state = {"model": model.state_dict()}
        script["dcp"].load(state, checkpoint_id=folder / "model")
        torch.testing.assert_close(nn.utils.parameters_to_vector(model.parameters()), ends[0])
        losses.append(script["loss_of"](model, script["HELD_OUT"]).item())
        assert losses[-1] < 0.6 * before
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


# -- what stays the same ---------------------------------------------------------------------------

KINDS = ["checkpointing", "compiled", "meta", "accumulated", "clipped", "fused", "bfloat16"]


def layers(kind: str, *, shards: bool) -> nn.Module:
    """Return a model, if wanted one that ``fully_shard`` has divided with an option."""
    fsdp = importlib.import_module("torch.distributed.fsdp")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
    model.append(nn.Linear(4, 1))
    if not shards:
        return model
    values = model.state_dict()
    for i in range(2):
        if kind == "checkpointing":
            wrapper = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
            model[i] = importlib.import_module(wrapper).checkpoint_wrapper(model[i])
        elif kind == "compiled":
            model[i] = torch.compile(model[i], backend="eager")
    model = model.to("meta" if kind == "meta" else "cpu")
    options: dict[str, Any] = {}
    if kind == "bfloat16":
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    divided(model, layers=kind != "meta", **options)
    if kind == "meta":
        model.to_empty(device="cpu")
        states = importlib.import_module("torch.distributed.checkpoint.state_dict")
        full = states.StateDictOptions(full_state_dict=True)
        states.set_model_state_dict(model, values, options=full)
    return model


def ended(rank: int, kind: str, *, shards: bool) -> Tensor:
    """Train for a few steps. Return all parameters and a mean of the losses."""
    model: Any = layers(kind, shards=shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=kind == "fused" and shards)
    text = "streaming:schedule=cyclic,staleness=4,parts=1"
    sync = attach(model, optimizer, text, node_group="auto")
    for step in range(9):
        if kind == "accumulated":
            if shards:
                model.set_requires_gradient_sync(False)
            loss_of(model, make_batch(rank, 50 + step, dtype=torch.float32)).backward()
            if shards:
                model.set_requires_gradient_sync(True)
        loss = loss_of(model, make_batch(rank, step, dtype=torch.float32))
        loss.backward()
        if kind == "clipped":  # as torchtitan does
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            norm = norm.full_tensor() if shards else norm
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        optimizer.step()
        optimizer.zero_grad()
    mean = torch.tensor([sync.mean(loss.item())])
    sync.finish()
    return torch.cat([whole(model.parameters()), mean])


def both(rank: int, size: int, kind: str) -> tuple[Tensor, Tensor]:
    return ended(rank, kind, shards=True), ended(rank, kind, shards=False)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # from torch.compile
@pytest.mark.parametrize("kind", nightly(KINDS))
def test_options_of_fully_shard_train_as_whole_models_do(kind: str) -> None:
    """Machines with and without shards end equal, except in bfloat16."""
    results = run(both, kind, workers=4, workers_per_node=2, seconds=100)
    for shards, wholes in results:
        assert torch.equal(shards, results[0][0])
        exact = torch.allclose(shards, wholes, rtol=0, atol=1e-5)
        assert exact == (kind != "bfloat16")
        torch.testing.assert_close(shards, wholes, rtol=0, atol=0.05)
