"""The sink for Weights & Biases, with wandb itself, offline."""

import time
from pathlib import Path

import pytest
import torch

import offbeat

wandb = pytest.importorskip("wandb")


def test_a_run_ends_with_the_last_point_of_each_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that the user logs to the same run keep their own steps, and the run stays open."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="offbeat", dir=str(tmp_path), mode="offline")
    sink = offbeat.WandB(run)
    run.log({"mine": 1.0}, step=100)
    sink.write({"step": 1, "decision": "local", "loss": torch.tensor(2.5)})
    sink.write({"step": 2, "decision": "sync", "loss": torch.tensor(1.5), "note": "x"})
    sink.close()
    run.log({"mine": 2.0})
    last = {name: value for name, value in dict(run.summary).items() if name[0] != "_"}
    run.finish()
    offbeats = {"step": 2, "decision": 1, "loss": 1.5}
    assert last == {"mine": 2.0, **{f"offbeat/{name}": value for name, value in offbeats.items()}}


def test_a_new_run_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts as wandb's environment variables say."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("SILENT", "true"), ("MODE", "offline"), ("DIR", str(tmp_path))):
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # it reads its environment once
    sink = offbeat.WandB()
    assert wandb.run is not None
    sink.write({"step": 1, "loss": 0.5})
    sink.close()
    assert wandb.run is None
    (written,) = tmp_path.rglob("*.wandb")
    deadline = time.monotonic() + 20  # a process of wandb's own writes it, after the end, too
    while b"offbeat/loss" not in written.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
