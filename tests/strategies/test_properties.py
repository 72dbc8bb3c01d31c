"""Properties of every strategy around the training loop: tensors, hooks, telemetry, faults.

``test_conformance`` tests the values that strategies compute.
"""

import contextlib
import gc
import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

import worlds
from loops import attach, close, start
from offbeat.strategies.base import GlobalModel
from problems import OPTIMIZERS, flat, loss_of, make_batch, make_model, train_step
from strategies.rows import ROWS, Row, each, first_of_each
from worlds import run

Step = Callable[[nn.Module, Optimizer, tuple[Tensor, Tensor]], None]


def train(
    rank: int, size: int, text: str, steps: Sequence[int], step_of: Step = train_step
) -> dict[str, Any]:
    """Train unequal models on unequal data; return the model after every step, and the end."""
    model, optimizer, sync = start(rank, text, "momentum")
    trace = []
    for step in range(steps[rank]):
        step_of(model, optimizer, make_batch(rank, step), *([sync] if step_of is halves else []))
        trace.append(flat(model))
    counted = (sync.step, sync.stats.steps, sync.stats.syncs)
    sync.finish()
    return {"trace": torch.stack([*trace, flat(model)]), "counted": counted}


# -- the training loop stays as it is -------------------------------------------------------------


def loop(rank: int, size: int, text: str | None, alive: weakref.WeakSet[Any]) -> Any:
    """A script with a schedule, hooks and a consensus. Without ``text`` it trains alone.

    Returns:
        The learning rates, the hooks that fired, and whether all tensors are where they were.
    """
    model = nn.Sequential(make_model(seed=rank), nn.BatchNorm1d(1).double())
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    tensors = [*model.parameters(), *model.buffers()]
    before = [t.data_ptr() for t in tensors]
    rates, events, stayed = [], list[str](), []

    def check() -> None:
        now = [*model.parameters(), *model.buffers()]
        same = all(a is b for a, b in zip(now, tensors, strict=True))
        whole = all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
        stayed.append(same and whole and [t.data_ptr() for t in now] == before)

    optimizer.register_step_pre_hook(lambda *_: events.append("pre"))
    sync = None if text is None else attach(model, optimizer, text)
    optimizer.register_step_post_hook(lambda *_: events.append("post"))
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
    for step in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        train_step(model, optimizer, make_batch(rank, step))
        scheduler.step()
        check()
    if sync is not None:
        with sync.consensus():
            check()
        sync.finish()
        alive.add(sync)
    check()
    alive.update([model, optimizer])
    return rates, events, all(stayed)


@first_of_each(ROWS)
def test_the_loop_of_the_user_is_as_before(row: Row) -> None:
    """No tensor is replaced or becomes a view of a larger one.

    OneCycleLR gives the rates of plain training, and hooks fire once a step. When a simulated run
    has ended, it holds nothing: the garbage collector, which does not count bytes, is off.
    """
    alone = loop(0, 1, None, weakref.WeakSet())
    assert alone[1:] == (["pre", "post"] * 8, True)
    assert len(set(alone[0])) == 8
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    gc.disable()
    try:
        assert worlds.run(loop, row.text, alive, workers=2) == [alone] * 2
        assert not [*alive]
    finally:
        gc.enable()


def halves(model: nn.Module, optimizer: Optimizer, batch: Any, sync: Any) -> None:
    """Take one step from two backward passes."""
    optimizer.zero_grad()
    for half in range(2):
        x, y = (part[half::2] for part in batch)
        with sync.no_sync() if half == 0 else contextlib.nullcontext():
            (loss_of(model, (x, y)) / 2).backward()
    optimizer.step()


def by_closure(model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    expected = loss_of(model, batch).item()
    assert optimizer.step(closure=closure).item() == pytest.approx(expected, rel=1e-12)


@first_of_each(ROWS)
def test_accumulated_gradients_and_closures_are_one_step(row: Row) -> None:
    """Two backward passes train like one over the whole batch. So do closures."""
    size = row.repeatable
    plain, halved, closed = (
        run(train, row.text, [9] * size, step_of, workers=size)
        for step_of in (train_step, halves, by_closure)
    )
    for a, b, c in zip(plain, halved, closed, strict=True):
        close(b["trace"], a["trace"])
        assert torch.equal(c["trace"], a["trace"])
        assert a["counted"] == b["counted"] == c["counted"]


def warming_up(rank: int, size: int, batches: list[int]) -> list[list[bool]]:
    """Return of each step whether it had a mean, in one list for each of two epochs."""
    model, optimizer, sync = start(rank, "local:period=4, warmup_steps=6")
    epochs, means = [], 0
    for epoch in range(2):
        seen = []
        for step in range(batches[rank]):
            train_step(model, optimizer, make_batch(rank, 100 * epoch + step))
            seen.append(sync.stats.syncs > means)
            means = sync.stats.syncs
        epochs.append(seen)
        with sync.consensus():
            pass
    sync.finish()
    return epochs


@pytest.mark.parametrize("batches", [[5, 5], [3, 5]])
def test_a_warm_up_ends_on_all_workers_at_once(batches: list[int]) -> None:
    """Otherwise a worker with fewer steps would request means that the others do not.

    The first epoch has 5 means. The sixth mean, in the first step of the second epoch, ends the
    warm-up. The next one follows four steps later.
    """
    for rank, epochs in enumerate(run(warming_up, batches, workers=2)):
        steps = batches[rank]
        assert epochs == [[True] * steps, [True, False, False, False, True][:steps]]


# -- words -------------------------------------------------------------------------------------


def strictly(text: str) -> Any:
    """Parse JSON by the standard, without NaN and infinity."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def told(rank: int, size: int, text: str, folder: str) -> tuple[str, dict[str, Any]]:
    model, optimizer, sync = start(rank, text, "momentum", log=f"{folder}/run.jsonl")
    for step in range(8):
        train_step(model, optimizer, make_batch(rank, step))
    during = json.dumps(sync.stats.to_dict(), allow_nan=False)
    sync.finish()
    json.dumps(sync.stats.to_dict(), allow_nan=False)
    return during, sync.stats.details


@each(ROWS)
def test_telemetry_is_json(row: Row, tmp_path: Path) -> None:
    """Records and totals are plain values, and finite.

    All strategies with a global model count launches and landings, and if they do not block,
    staleness.
    """
    averages = row.strategy.averages()
    for rank, (during, details) in enumerate(run(told, row.text, str(tmp_path), workers=2)):
        assert strictly(during)["steps"] == 8
        lines = (tmp_path / f"run.rank{rank}.jsonl").read_text().splitlines()
        records = [strictly(line) for line in lines]
        assert [record["step"] for record in records] == list(range(1, 9))
        assert {record["decision"] for record in records} <= {"sync", "local"}
        assert {record["rank"] for record in records} == {rank}
        if not isinstance(averages, GlobalModel):
            continue
        assert details["parts"] >= 1
        assert details["launches"] == details["landings"] > 0
        late = {"landing_seconds", "staleness_max", "staleness_histogram"}
        assert (late <= details.keys()) is not averages.blocking
        if not averages.blocking:
            histogram = details["staleness_histogram"]
            assert sum(histogram.values()) == 8
            assert max(histogram) == details["staleness_max"] <= averages.bound
            assert details["landing_seconds"] > 0
