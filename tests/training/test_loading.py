"""``model.load_state_dict`` on an attached model."""

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from loops import attach, error_of, sgd
from problems import flat, make_batch, make_model, train_step
from worlds import simulated

STRATEGIES = [
    "bsp",
    "local:period=3",
    "diloco:period=3",
    "diloco:period=4,overlap=2,fragments=2",
    "fedavg:period=3",
    "streaming:schedule=cyclic,parts=2,staleness=4",
    "selsync:delta=0",
]


def resume(rank: int, size: int, text: str, late: str) -> torch.Tensor:
    """Load the weights of a checkpoint before ``attach``, or after it as ``late`` says."""
    weights = make_model(seed=7).state_dict()
    model = make_model(seed=rank)
    if not late:
        model.load_state_dict(weights)
    sync = attach(model, sgd(model), text, wire="float32")
    if late == "inside":
        nn.ModuleDict({"a": model}).load_state_dict({f"a.{k}": v for k, v in weights.items()})
    if late == "modules":
        for name, module in model.named_children():
            module.load_state_dict(make_model(seed=7).get_submodule(name).state_dict())
    if late == "consensus":
        model.load_state_dict(weights)
        with sync.consensus():
            assert torch.equal(flat(model), flat(make_model(seed=7)))
            model.load_state_dict(make_model(seed=9).state_dict())  # it is undone
    for step in range(6):
        train_step(model, sync._worker.optimizers[0].optimizer, make_batch(rank, step))
    sync.finish()
    return flat(model)


@pytest.mark.parametrize("text", STRATEGIES)
def test_a_model_loaded_before_the_first_step_is_the_start(text: str) -> None:
    """Training gives the bits of a model that was loaded before ``attach``."""
    want = simulated(resume, text, "", workers=2)[0]
    for late in ("inside", "modules", "consensus"):
        for got in simulated(resume, text, late, workers=2):
            assert torch.equal(got, want), late


def load_differently(rank: int, size: int, text: str, seeds: list[int | None]) -> Any:
    model = make_model(seed=rank)
    sync = attach(model, sgd(model), text)
    seed = seeds[rank]
    if seed is not None:
        model.load_state_dict(make_model(seed=seed).state_dict())

    def train() -> None:
        for step in range(6):
            train_step(model, sync._worker.optimizers[0].optimizer, make_batch(rank, step))
        sync.finish()

    return error_of(train)


@pytest.mark.parametrize("text", ["bsp", "diloco:period=3", "streaming:staleness=4"])
def test_all_workers_must_load_the_same_model(text: str) -> None:
    for rank, (kinds, error) in enumerate(
        simulated(load_differently, text, [7, None, None], workers=3)
    ):
        assert kinds[:1] == ["MismatchError"], error
        assert f"rank {rank} has {'' if rank == 0 else 'not '}loaded values" in error
    for kinds, error in simulated(load_differently, text, [7, 8], workers=2):
        assert kinds[:1] == ["MismatchError"], error


def load_late(rank: int, size: int, text: str) -> Any:
    seen = {}
    model = make_model(seed=rank)
    optimizer = sgd(model)
    sync = attach(model, optimizer, text, wire="float32")
    model.load_state_dict(make_model(seed=7).state_dict(), assign=True)
    replaced = error_of(lambda: train_step(model, optimizer, make_batch(rank, 0)))[1]
    assert "parameter '0.bias' of the model was replaced" in replaced
    sync.detach()
    optimizer = sgd(model)
    sync = attach(model, optimizer, text, wire="float32")
    train_step(model, optimizer, make_batch(rank, 0))
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    seen["step"] = error_of(lambda: train_step(model, optimizer, make_batch(rank, 1)))
    seen["consensus"] = error_of(lambda: sync.consensus().__enter__())
    seen["save"] = error_of(sync.state_dict)
    sync.finish()
    model.load_state_dict(make_model(seed=3).state_dict())  # no longer attached
    return seen, len(model._load_state_dict_post_hooks)


def test_a_model_loaded_after_a_step_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """``finish`` only warns: its mean replaces the values."""
    for seen, hooks in simulated(load_late, "diloco:period=3", workers=2):
        assert hooks == 0
        for kinds, error in seen.values():
            assert kinds[:1] == ["AttachError"]
            assert "after model.load_state_dict() on an attached model" in error
            assert "offbeat.load()" in error
    assert caplog.text.count("finish() after model.load_state_dict()") == 2


def server(rank: int, size: int) -> Any:
    model = make_model(seed=rank)
    sync = attach(model, sgd(model), "easgd:period=2")
    model.load_state_dict(make_model(seed=7).state_dict())
    found = error_of(
        lambda: train_step(model, sync._worker.optimizers[0].optimizer, make_batch(rank, 0))
    )
    sync.detach()
    return found


def test_a_parameter_server_cannot_start_again() -> None:
    for kinds, error in simulated(server, workers=2):
        assert kinds[:1] == ["AttachError"]
        assert "does not support model.load_state_dict() after attach(): load before" in error


def copies(rank: int, size: int) -> None:
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        scripted = torch.jit.script(make_model())
    attach(scripted, sgd(scripted), offbeat.BSP()).detach()
    model = make_model()
    sync = attach(model, sgd(model), offbeat.BSP())
    file = io.BytesIO()
    torch.save(model, file)
    assert b"offbeat" not in file.getvalue(), "the file can be read without Offbeat"
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.load_state_dict(make_model(seed=7).state_dict())
    train_step(model, sync._worker.optimizers[0].optimizer, make_batch(0, 0))
    sync.finish()


def test_copies_of_an_attached_model_are_independent() -> None:
    """They can be pickled, and loading into them has no effect. TorchScript can be attached."""
    simulated(copies, workers=1)
