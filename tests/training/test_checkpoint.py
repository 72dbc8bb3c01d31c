"""A run that is saved and resumed is the same run, over every wire."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loops import attach, everything
from problems import OPTIMIZERS, loss_of, make_batch, make_model, make_wide
from worlds import run

ROWS = [
    ("bsp", "float32"),
    ("local:period=3,warmup_steps=2", "float32"),
    ("selsync:delta=0.02,window=4,smoothing=0.3", "float32"),
    ("selsync:delta=0.02,flags=deferred,max_interval=3", "float32"),
    ("selsync:delta=0.02,aggregate=gradients", "float32"),
    ("selsync:target_lssr=0.5", "float32"),
    ("async:staleness=8", "float32"),
    ("async:staleness=4,outer_lr=0.7,outer_momentum=0.9", "float32"),
    ("bsp", "int8"),
    ("local:period=3", "int8"),
    ("selsync:delta=0.05,flags=deferred", "bfloat16"),
    ("async:staleness=4", "int8"),
    ("fedavg:period=4,fraction=0.6", "float32"),
    ("diloco:period=4,outer_momentum=0.3,fragments=2,overlap=1", "bfloat16"),
]
STEPS = 14


def values(model: nn.Module) -> Tensor:
    return torch.cat([t.reshape(-1).double() for t in everything(model)])


def train_from(
    text: str, wire: str, rank: int, saved: bytes | None, save_at: int | None
) -> tuple[Tensor, dict[str, Any], bytes]:
    """Train to the end, from ``saved`` or from the start; save before step ``save_at``."""
    exact = wire == "float32"
    dtype = torch.float64 if exact else torch.float32
    seed = rank if saved is None else rank + 10  # whatever is there before the state is loaded
    model: nn.Module = make_wide(seed, norm=True)
    if exact:
        model = nn.Sequential(make_model(seed), nn.BatchNorm1d(1).double())
    optimizer = OPTIMIZERS["momentum" if exact else "adamw"](model.parameters())
    sync = attach(model, optimizer, text, wire=wire)
    if saved is not None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sync.load_state_dict(state["sync"])
    trace = []
    while sync.step < STEPS:
        if sync.step == save_at:
            file = io.BytesIO()
            states = (model.state_dict(), optimizer.state_dict(), sync.state_dict())
            torch.save(dict(zip(("model", "optimizer", "sync"), states, strict=True)), file)
            saved = file.getvalue()
        optimizer.zero_grad()
        loss_of(model, make_batch(rank, sync.step, dtype=dtype)).backward()
        optimizer.step()
        trace.append(values(model))
    stats = sync.stats
    sync.finish()
    trace.append(values(model))
    numbers = {"steps": stats.steps, "syncs": stats.syncs, "flags": stats.flags}
    return torch.stack(trace), {**numbers, "bytes": stats.payload_bytes}, saved or b""


def resume(rank: int, size: int, text: str, wire: str) -> Any:
    whole, numbers, _ = train_from(text, wire, rank, None, None)
    seen = []
    for at in (5, 6):
        watched, same, saved = train_from(text, wire, rank, None, at)
        resumed, again, _ = train_from(text, wire, rank, saved, None)
        seen.append((at, watched, resumed, same, again))
    return whole, numbers, seen


@pytest.mark.parametrize(
    ("text", "wire"),
    [*ROWS[:1], *(pytest.param(*row, marks=pytest.mark.nightly) for row in ROWS[1:])],
)
def test_a_resumed_run_goes_on_bit_for_bit(text: str, wire: str) -> None:
    """Pitfalls 20 and 24: saving changes nothing, and a new process continues the same run.

    Errors and references of the wire, outer momentum and what is in flight are in the state.
    """
    for whole, numbers, seen in run(resume, text, wire, workers=3):
        for at, watched, resumed, same, again in seen:
            for i, (a, b) in enumerate(zip(watched, whole, strict=True)):
                assert torch.equal(a, b), (at, "saving changed step", i)
            for i, (a, b) in enumerate(zip(resumed, whole[at:], strict=True)):
                assert torch.equal(a, b), (at, "resuming changed step", at + i)
            assert numbers == same == again, at
