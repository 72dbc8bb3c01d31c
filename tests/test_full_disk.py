"""A full disk: a checkpoint is refused on all workers, a log ends, and training continues."""

import logging
from pathlib import Path
from typing import Any

import pytest

import offbeat
from disks import fill, small_disk
from loops import attach, error_of, sgd, start
from problems import flat, make_batch, make_model, train_step
from worlds import simulated


def save_twice(rank: int, size: int, disk: Path) -> Any:
    model, optimizer, sync = start(rank, "local:period=1")
    train_step(model, optimizer, make_batch(rank, 0))
    offbeat.save(disk / "checkpoints", sync)
    saved = flat(model)
    if rank == 1:
        fill(disk)
    train_step(model, optimizer, make_batch(rank, 1))  # all meet here: it is full for all
    kinds, text = error_of(lambda: offbeat.save(disk / "checkpoints", sync))
    left = sorted(path.name for path in (disk / "checkpoints").iterdir())
    train_step(model, optimizer, make_batch(rank, 2))
    sync.finish()

    again = make_model(seed=rank)
    other = attach(again, sgd(again), "local:period=1")
    found = offbeat.load(disk / "checkpoints", other)
    other.finish()
    return kinds[0], text, left, sync.step, found and found.step, bool((flat(again) == saved).all())


def test_a_checkpoint_that_does_not_fit_is_refused_by_all(tmp_path: Path) -> None:
    """The checkpoint before remains, no partial file does, and training continues."""
    with small_disk(tmp_path / "disk") as disk:
        results = simulated(save_twice, disk, workers=2)
    for kind, text, left, steps, found, same in results:
        assert kind == "CheckpointError"
        assert text.startswith("rank 0 cannot take part in offbeat.save(), so no worker does: ")
        assert "could not be written: [Errno 28] No space left on device" in text
        assert left == ["step-1.rank0.pt", "step-1.rank1.pt"]
        assert (steps, found, same) == (3, 1, True)


def log_on(rank: int, size: int, disk: Path) -> int:
    model = make_model(seed=rank)
    optimizer = sgd(model)
    with attach(model, optimizer, "local:period=2", log=disk / "log.jsonl") as sync:
        for step in range(40):
            if step == 2 and rank == 0:
                fill(disk)
            train_step(model, optimizer, make_batch(rank, step))
    return int(sync.step)


def test_a_log_that_does_not_fit_ends_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each worker warns once and names the file."""
    with small_disk(tmp_path / "disk") as disk:
        assert simulated(log_on, disk, workers=2) == [40, 40]
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(messages) == 2
    for one in messages:
        assert "log.rank" in one
        assert "No space left on device" in one
