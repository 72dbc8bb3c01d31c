"""Idioms of public training scripts (nanoGPT, minGPT-ddp, imagenet, …), moved to Offbeat."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat
from loops import Quick, attach, error_of, sgd
from problems import flat, loss_of, make_batch, make_model, train_step
from workers import run

STRATEGIES = ["bsp", "local:period=4", "diloco:period=5", "streaming:staleness=6"]


def batch_of(rank: int, step: int) -> Any:
    return make_batch(rank, step, dtype=torch.float32)


def evaluate_and_stop_early(rank: int, text: str, steps: list[int]) -> torch.Tensor:
    """Rank 0 alone evaluates, in a consensus that all enter. Workers stop at different steps."""
    model = make_model(seed=rank, dtype=torch.float32)
    optimizer = sgd(model)
    sync = attach(model, optimizer, text)
    losses = []
    for step in range(max(steps)):
        train_step(model, optimizer, batch_of(rank, step))
        if step % 3 == 2:
            with sync.consensus():
                if sync.rank == 0:
                    losses.append(loss_of(model, batch_of(9, 0)).item())
        if step + 1 == steps[rank]:
            break
    sync.finish()
    assert len(losses) == (steps[0] // 3 if rank == 0 else 0)
    return flat(model)


def evaluate_outside(rank: int) -> tuple[list[str], str]:
    """Enter the consensus on rank 0 only."""
    model = make_model(seed=rank, dtype=torch.float32)
    optimizer = sgd(model)

    def train() -> None:
        with attach(model, optimizer, "streaming:staleness=6") as sync:
            for step in range(12):
                train_step(model, optimizer, batch_of(rank, step))
                if rank == 0 and step == 2:
                    with sync.consensus():
                        pass

    return error_of(train)


def resume(rank: int, text: str, path: Path) -> torch.Tensor:
    """Load rank 0's checkpoint after ``attach`` on all ranks, and train with a rate of 0."""
    model = make_model(seed=rank, dtype=torch.float32)
    optimizer = sgd(model, lr=0.0)
    sync = attach(model, optimizer, text)
    model.load_state_dict(torch.load(path))
    for step in range(6):
        train_step(model, optimizer, batch_of(rank, step))
    sync.finish()
    return flat(model)


def keep_ddp(rank: int, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Add two lines to a script with DistributedDataParallel. Return its model, and that without.

    The wrapped model trains first.
    """
    ends = []
    for wrap in (DistributedDataParallel, lambda model: model):
        model: nn.Module = wrap(make_model(seed=rank, dtype=torch.float32))
        optimizer = sgd(model)
        sync = attach(model, optimizer, text)
        for step in range(6):
            train_step(model, optimizer, batch_of(rank, step))
        sync.finish()
        ends.append(flat(model))
    return ends[0], ends[1]


def interrupt(rank: int) -> tuple[str, list[str], torch.Tensor]:
    """Press Ctrl-C on rank 0 in its first synchronization, and follow the advice."""
    model = make_model(seed=rank, dtype=torch.float32)
    optimizer = sgd(model)
    sync = attach(model, optimizer, "diloco:period=2")
    kinds = []
    if rank == 0:

        def press(*args: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

        sync._iteration.flow.pipeline.land = press
    with contextlib.suppress(KeyboardInterrupt):
        for step in range(6):
            kinds += error_of(lambda s=step: train_step(model, optimizer, batch_of(rank, s)))[0]
    advice = error_of(lambda: train_step(model, optimizer, batch_of(rank, 9)))[1]
    sync.detach()
    with attach(model, optimizer, "diloco:period=2"):
        for step in range(4):
            train_step(model, optimizer, batch_of(rank, step))
    return advice, kinds, flat(model)


def cross(rank: int) -> tuple[list[str], str]:
    """Finish two synchronizers in another order on each rank."""
    models = [make_model(seed=rank) for _ in range(2)]
    syncs = [attach(m, sgd(m), "bsp", group=Quick(), timeout_seconds=1) for m in models]
    result = error_of(syncs[rank].finish)
    for sync in syncs:
        sync.detach()
    return result


def script(rank: int, size: int, folder: str) -> dict[str, Any]:
    path = Path(folder, "model.pt")
    if rank == 0:
        torch.save(make_model(seed=7, dtype=torch.float32).state_dict(), path)
    dist.barrier()  # of the script, before ``attach``
    seen: dict[str, Any] = {"outside": evaluate_outside(rank)}
    for text in STRATEGIES:
        seen[f"stop {text}"] = evaluate_and_stop_early(rank, text, [5, 13])
        seen[f"end {text}"] = evaluate_and_stop_early(rank, text, [11, 4])
        seen[f"resume {text}"] = resume(rank, text, path)
    seen["ddp"] = keep_ddp(rank, "local:period=4")
    seen["interrupt"] = interrupt(rank)
    seen["cross"] = cross(rank)
    return seen


def test_scripts_of_two_processes(tmp_path: Path) -> None:
    """All ranks end with the same model. A consensus on one rank is an error on both."""
    first, second = run(script, str(tmp_path), workers=2)
    loaded = flat(make_model(seed=7, dtype=torch.float32))
    advice, _, model = first.pop("interrupt")
    assert "interrupted by KeyboardInterrupt" in advice
    assert "Call detach() here: the others then raise a CommunicationError" in advice
    _, kinds, other = second.pop("interrupt")
    assert "CommunicationError" in kinds
    assert torch.equal(model, other), "both have attached again"
    for seen in (first, second):
        kinds, error = seen.pop("cross")
        assert kinds[:1] == ["CommunicationTimeout"], error
        assert "in finish() of another synchronizer" in error
        kinds, error = seen.pop("outside")
        assert kinds[:1] == ["MismatchError"], error
        wrapped, plain = seen.pop("ddp")
        assert torch.equal(wrapped, plain)
        for name, model in seen.items():
            assert torch.equal(model, first[name]), name
            if name.startswith("resume"):
                torch.testing.assert_close(model, loaded, rtol=0, atol=1e-6)


# -- a single process ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*STRATEGIES, "selsync", "async", "fedavg:period=2", "easgd"])
def test_a_script_without_a_process_group_trains_alone(text: str, tmp_path: Path) -> None:
    """Every member works, and the model is that of a plain loop."""
    model, plain = make_model(), make_model()
    ema = torch.optim.swa_utils.AveragedModel(model)
    optimizer, other = sgd(model), sgd(plain)
    sync = attach(model, optimizer, text, wire="float32")
    sync.follow(ema)
    sync.monitor(distance_every=2, gradient_change=True)
    assert offbeat.load(tmp_path, sync) is None
    exact = text.split(":")[0] not in ("diloco", "easgd")  # these move elsewhere
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, make_batch(0, step)).backward()
        norm = sync.clip_grad_norm_(1.0)
        sync.record(norm=norm)
        optimizer.step()
        other.zero_grad()
        loss_of(plain, make_batch(0, step)).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        if exact:
            torch.testing.assert_close(norm, expected)
        other.step()
        if step == 3:
            offbeat.save(tmp_path, sync)
            with sync.consensus():
                loss_of(model, make_batch(0, 9))
    assert (sync.rank, sync.size, sync.step, sync.stats.steps) == (0, 1, 6, 6)
    found = offbeat.load(tmp_path, sync)
    assert found is not None
    assert (found.step, sync.step) == (4, 4)
    for step in (4, 5):
        optimizer.zero_grad()
        loss_of(model, make_batch(0, step)).backward()
        sync.clip_grad_norm_(1.0)
        optimizer.step()
    sync.finish()
    if exact:
        torch.testing.assert_close(flat(model), flat(plain))


def test_a_node_of_a_single_process_is_that_process() -> None:
    model = make_model()
    with attach(model, sgd(model), "bsp", node_group="auto") as sync:
        assert sync.size == 1
