"""The methods of a synchronizer: clipping, consensus, finish, and the errors of misuse."""

import contextlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from loops import attach, close, error_of, sgd, start
from offbeat.simulate import DeadlockError
from problems import PARAMETERS, flat, loss_of, make_batch, make_model, train_step
from worlds import real, run, simulated


def interrupted(rank: int, size: int) -> None:
    model = make_model(seed=rank)
    optimizer = sgd(model)
    with attach(model, optimizer, offbeat.LocalSGD(period=100)) as sync:
        train_step(model, optimizer, make_batch(rank, 0))
        own = flat(model)
        with contextlib.suppress(KeyError), sync.consensus():
            model.load_state_dict(make_model(seed=9).state_dict())
            with torch.no_grad():
                model[0].weight.zero_()
            raise KeyError
        assert torch.equal(flat(model), own)
        train_step(model, optimizer, make_batch(rank, 1))


def test_changes_inside_a_consensus_are_undone_after_an_exception() -> None:
    """Also if a model is loaded there. Training then continues."""
    run(interrupted, workers=2)


def evaluating(rank: int, size: int, inference: bool) -> Tensor:
    model = make_model(seed=rank, dtype=torch.float32)
    optimizer = sgd(model)
    sync = attach(model, optimizer, "streaming:staleness=2,parts=1")
    for step in range(8):
        batch = make_batch(rank, step, dtype=torch.float32)
        train_step(model, optimizer, batch)
        if step % 3 == 2:
            with torch.inference_mode(inference), sync.consensus():
                model(batch[0])
    with torch.inference_mode(inference):
        sync.finish()
    train_step(model, optimizer, batch)
    return flat(model)


def test_a_consensus_inside_inference_mode() -> None:
    """Tensors that are made there are written in later steps."""
    plain, inference = (simulated(evaluating, mode, workers=2) for mode in (False, True))
    assert all(map(torch.equal, plain, inference))
    assert all(model.isfinite().all() for model in real(evaluating, True, workers=2))


def barrier(rank: int, size: int, inside: bool) -> int:
    """Rank 1 takes ten more steps than rank 0, and a part may be two steps old."""
    model = make_model(seed=rank, dtype=torch.float32)
    sync = attach(model, sgd(model), "streaming:staleness=2,parts=1")
    for step in range([2, 12][rank]):
        train_step(
            model, sync._worker.optimizers[0].optimizer, make_batch(rank, step, dtype=torch.float32)
        )
    with sync.consensus() if inside else contextlib.nullcontext():
        dist.barrier()
    sync.finish()
    return sync.stats.steps


def test_other_collectives_belong_inside_a_consensus() -> None:
    """On real processes: an early worker keeps voting there. A bare barrier would deadlock."""
    assert real(barrier, True, workers=2) == [2, 12]
    with pytest.raises(DeadlockError, match=r"dist\.barrier"):
        simulated(barrier, False, workers=2)


def means(rank: int, size: int, text: str) -> dict[str, Any]:
    """Rank 1 takes ten more steps than rank 0, and a part may be two steps old."""
    model = make_model(seed=rank, dtype=torch.float32)
    optimizer = sgd(model)
    sync = attach(model, optimizer, text)
    for step in range([2, 12][rank]):
        train_step(model, optimizer, make_batch(rank, step, dtype=torch.float32))
    own = flat(model)
    seen: dict[str, Any] = {"number": sync.mean(rank + 0.5), "integer": sync.mean(rank)}
    seen["tensor"] = sync.mean(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16) * (rank + 1))
    seen["counts"] = sync.mean(torch.tensor(rank))
    assert text != "local:period=100" or torch.equal(flat(model), own), "no mean of the models"
    with sync.consensus():
        seen["inside"] = sync.mean(float(rank))
    seen["complex"] = error_of(lambda: sync.mean(torch.tensor(1j)))
    seen["text"] = error_of(lambda: sync.mean("1"))
    seen["sizes"] = error_of(lambda: sync.mean(torch.ones(rank + 1)))
    sync.detach()
    seen["after"] = error_of(lambda: sync.mean(1.0))
    return seen


@pytest.mark.parametrize("text", ["streaming:staleness=2,parts=1", "bsp", "local:period=100"])
def test_a_mean_of_numbers_answers_the_workers_that_still_train(text: str) -> None:
    """Another collective in its place would deadlock, as a test above shows."""
    for seen in run(means, text, workers=2):
        assert (seen["number"], seen["integer"], seen["inside"]) == (1.0, 0.5, 0.5)
        assert torch.equal(seen["tensor"], torch.tensor([[1.5, 3.0]], dtype=torch.bfloat16))
        assert torch.equal(seen["counts"], torch.tensor(0.5))
        assert "TypeError" in seen["complex"][0]
        assert "TypeError" in seen["text"][0]
        assert "MismatchError" in seen["sizes"][0]
        assert "rank 1 has 2 numbers in mean(), and rank 0 has 1" in seen["sizes"][1]
        assert "mean() after finish() or detach()" in seen["after"][1]


def evaluated(rank: int, size: int) -> bool:
    model, optimizer, sync = start(rank, offbeat.LocalSGD(period=100))
    weights = sync.consensus()(lambda: flat(model))
    same = True
    for step in range(2):
        train_step(model, optimizer, make_batch(rank, step))
        own = flat(model)
        close(weights(), sync.mean(own))
        same = same and torch.equal(flat(model), own)
    sync.finish()
    return same


def test_stats_count_no_time_twice_that_calls_inside_a_consensus_take() -> None:
    """Each of the four steps computes for 50 ms. Before each, the workers evaluate."""

    def worker() -> Any:
        rank = dist.get_rank()
        model, optimizer, sync = start(rank, "local:period=100")
        for step in range(4):
            with sync.consensus():
                sync.mean(float(rank))
                sync.state_dict()
            train_step(model, optimizer, make_batch(rank, step))
        return sync.stats.compute_seconds

    found = offbeat.simulate(worker, workers=2, network=offbeat.Network("1Mbit/s", latency="30ms"))
    assert found.results == pytest.approx([4 * 0.05] * 2)


def test_a_consensus_is_a_decorator() -> None:
    """Every call of the function enters a consensus of its own."""
    assert run(evaluated, workers=2) == [True, True]


def misuse(rank: int, size: int) -> dict[str, tuple[list[str], str]]:
    """Misuse a synchronizer in every way, on both workers; training then continues."""
    seen = {}
    model, optimizer, sync = start(rank, offbeat.LocalSGD(period=2))

    other = make_model()
    seen["model twice"] = error_of(lambda: attach(model, sgd(model), offbeat.BSP()))
    seen["optimizer twice"] = error_of(
        lambda: attach(nn.ModuleList([model, other]), optimizer, offbeat.BSP())
    )
    train_step(model, optimizer, make_batch(rank, 0))

    def nest() -> None:
        with sync.consensus():
            pass

    own = flat(model)
    with sync.consensus():
        seen["nested consensus"] = error_of(nest)
        mean = flat(model)
        loss_of(model, make_batch(rank, 1)).backward()
        seen["step inside consensus"] = error_of(optimizer.step)
        seen["clip inside consensus"] = error_of(lambda: sync.clip_grad_norm_(1.0))
        seen["finish inside consensus"] = error_of(sync.finish)
        assert torch.equal(flat(model), mean)
    assert torch.equal(flat(model), own)
    stranger = error_of(lambda: sync.clip_grad_norm_(1.0, sgd(other)))
    seen["clip a stranger"] = stranger
    train_step(model, optimizer, make_batch(rank, 1))
    assert sync.step == 2
    sync.finish()
    seen["consensus after finish"] = error_of(nest)

    model = make_model(seed=rank)
    optimizer = sgd(model[0])
    sync = attach(model, optimizer, offbeat.BSP())
    train_step(model, optimizer, make_batch(rank, 0))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    seen["group added"] = error_of(lambda: train_step(model, optimizer, make_batch(rank, 1)))
    del optimizer.param_groups[1]
    held = optimizer.param_groups[0]["params"]
    held.append(model[2].weight)
    seen["parameter added"] = error_of(lambda: train_step(model, optimizer, make_batch(rank, 1)))
    held.pop()
    model[0].bias = held[1] = nn.Parameter(model[0].bias.detach().clone())
    seen["parameter replaced"] = error_of(lambda: train_step(model, optimizer, make_batch(rank, 1)))
    seen["replaced in the model"] = error_of(sync.finish)
    sync.detach()
    seen["consensus after detach"] = error_of(
        lambda: contextlib.ExitStack().enter_context(sync.consensus())
    )

    assert flat(model).numel() == PARAMETERS
    return seen


EDITED = [
    "local:period=1",
    "selsync:delta=0",
    "fedavg:period=2",
    "diloco:period=2,outer_lr=1.0,outer_momentum=0.0",
    "async:staleness=4",
]


def edited(rank: int, size: int, text: str) -> Any:
    """Return the local model after an edit and the consensus, twice, and the final model."""
    model, optimizer, sync = start(rank, text, wire="float32")
    found = []
    for _ in range(2):
        for step in range(4):
            train_step(model, optimizer, make_batch(rank, step))
        with torch.no_grad():
            for p in model.parameters():
                p += 0.01 * (rank + 1)
        found.append(flat(model))
        with sync.consensus():
            found.append(flat(model))
    sync.finish()
    return [*found, flat(model)]


@pytest.mark.parametrize("text", EDITED)
def test_changes_between_steps_are_averaged(text: str) -> None:
    """Also right after a synchronization: schedule-free optimizers write their result then."""
    results = run(edited, text, workers=3)
    for _, first, _, second, end in results:
        close(first, sum(own for own, *_ in results) / 3, 1e-9)
        close(second, sum(own for _, _, own, *_ in results) / 3, 1e-9)
        close(end, second, 1e-9)  # although the consensus has restored the local models


def clipped_weights(rank: int, size: int) -> Tensor:
    """Rank 1 takes two steps more than rank 0. All clip their weights after each step."""
    model, optimizer, sync = start(0, "bsp")
    for step in range(3 + 2 * rank):
        train_step(model, optimizer, make_batch(rank, step))
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-1, 1)
    with sync.consensus():
        seen = flat(model)
    sync.finish()
    return seen


def test_bsp_shows_the_newest_model_although_weights_were_clipped() -> None:
    first, second = run(clipped_weights, workers=2)
    assert torch.equal(first, second)


def projected(rank: int, size: int, text: str) -> tuple[float, float]:
    """Return how far the mean exceeds the bound of the local models, inside and at the end."""
    model, optimizer, sync = start(0, text)
    bound = 0.5
    for step in range(40 + (3 * rank if text == "bsp" else 0)):
        train_step(model, optimizer, make_batch(rank, step))
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-bound, bound)
    with sync.consensus():
        inside = flat(model).abs().max().item() - bound
    sync.finish()
    return inside, flat(model).abs().max().item() - bound


@pytest.mark.parametrize("text", ["bsp", "local:period=3", "selsync", "streaming"])
def test_a_convex_constraint_holds_under_strategies_that_wait_for_the_mean(text: str) -> None:
    """Under streaming averaging messages land after the last projection."""
    for excess in run(projected, text, workers=3):
        for each in excess:
            assert (each > 1e-3) if text == "streaming" else (each < 1e-12)


def edited_at_the_end(rank: int, size: int, text: str) -> Tensor:
    """All rates are 0, so only the edits change the models. Workers end one by one."""
    model = make_model(seed=rank)
    optimizer = sgd(model, lr=0.0)
    with attach(model, optimizer, text, wire="float32"):
        for step in range(4 + 3 * rank):
            train_step(model, optimizer, make_batch(rank, step))
        with torch.no_grad():
            for p in model.parameters():
                p += 10.0**rank
    return flat(model)


@pytest.mark.parametrize(
    "text", ["streaming:outer_gain=1", "async:schedule=eager,staleness=4", "local:period=2"]
)
def test_each_change_before_the_end_counts_as_its_share(text: str) -> None:
    """The share does not depend on the number of workers that still train."""
    expected = flat(make_model(0)) + (1 + 10 + 100) / 3
    for end in run(edited_at_the_end, text, workers=3):
        close(end, expected, 1e-9)


def test_misuse_is_an_attach_error_that_says_what_to_do() -> None:
    """Attaching twice, a consensus or step at the wrong moment, a changed optimizer: refused."""
    expected = {
        "model twice": r"this Sequential is attached already: finish\(\) or detach\(\)",
        "optimizer twice": r"this SGD is attached already: finish\(\) or detach\(\)",
        "nested consensus": r"consensus\(\) inside consensus\(\)",
        "step inside consensus": r"a training step inside consensus\(\)",
        "clip inside consensus": r"inside consensus\(\)",
        "finish inside consensus": r"finish\(\) inside consensus\(\)",
        "clip a stranger": "not attached",
        "consensus after finish": r"consensus\(\) after finish\(\) or detach\(\)",
        "consensus after detach": r"consensus\(\) after finish\(\) or detach\(\)",
        "group added": r"were added to the optimizer.*attach again",
        "parameter added": r"were added to the optimizer.*attach again",
        "replaced in the model": r"parameter '0.bias' of the model was replaced or converted",
        "parameter replaced": r"were added to the optimizer, removed or replaced",
    }
    for seen in run(misuse, workers=2):
        assert seen.keys() == expected.keys()
        for name, pattern in expected.items():
            kinds, text = seen[name]
            assert kinds[:1] == ["AttachError"], (name, text)
            assert re.search(pattern, text), (name, text)
