"""``model.load_state_dict`` on an attached model."""

import copy
import io
import pickle
import sys
import warnings
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from loops import attach, sgd
from problems import flat, make_batch, make_model, train_step
from workers import run
from worlds import simulated

LOADS = r"model.load_state_dict\(\) on an attached model"


def load_after_attach(rank: int, size: int, text: str) -> None:
    """Every way to load values into the model, or into a part of it, on one worker or on all."""
    model = make_model(seed=rank)
    optimizer = sgd(model)
    weights = make_model(seed=7).state_dict()
    ways = (
        lambda: model.load_state_dict(weights),
        lambda: model.load_state_dict(weights, assign=True),
        lambda: model[0].load_state_dict(make_model(seed=7)[0].state_dict()),
        lambda: nn.ModuleDict({"a": model}).load_state_dict(
            {f"a.{k}": v for k, v in weights.items()}
        ),
    )
    for way in ways:
        for steps in (0, 1):
            optimizer = sgd(model)
            sync = attach(model, optimizer, text, wire="float32")
            for step in range(steps):
                train_step(model, optimizer, make_batch(rank, step))
            before = flat(model)
            with pytest.raises(offbeat.AttachError, match=f"rank {rank}: {LOADS}.*offbeat.load"):
                way()
            assert torch.equal(flat(model), before)
            train_step(model, optimizer, make_batch(rank, 1))
            sync.detach()
    model.load_state_dict(make_model(seed=3).state_dict())  # no longer attached
    assert not model._load_state_dict_pre_hooks


@pytest.mark.parametrize("text", ["bsp", "diloco:period=3", "streaming"])
def test_a_model_loaded_after_attach_is_refused(text: str) -> None:
    """At once. Nothing is loaded, and training can continue."""
    simulated(load_after_attach, text, workers=2)


def best_at_the_end(rank: int, size: int, folder: Path) -> torch.Tensor:
    """Call the callback in the order of the Trainer, which loads the best model at its end."""
    transformers: Any = ModuleType("transformers")
    transformers.TrainerCallback = object
    sys.modules["transformers"] = transformers
    from offbeat.integrations.transformers import OffbeatCallback

    arguments = Namespace(eval_on_start=False, load_best_model_at_end=True, output_dir=folder)
    state = Namespace(global_step=0, best_model_checkpoint="checkpoint-1")
    stop = Namespace(should_evaluate=False, should_save=False, should_training_stop=True)
    model, callback = make_model(seed=rank), OffbeatCallback(offbeat.LocalSGD(period=9))
    optimizer = sgd(model)
    callback.on_train_begin(arguments, state, None, model=model, optimizer=optimizer)
    train_step(model, optimizer, make_batch(rank, 0))
    callback.on_epoch_end(arguments, state, stop)
    callback.on_save(arguments, state, stop)
    model.load_state_dict(make_model(seed=9).state_dict())
    callback.on_train_end(arguments, state, stop, model=model)
    return flat(model)


def test_the_trainer_can_load_the_best_model_at_the_end(tmp_path: Path) -> None:
    for end in run(best_at_the_end, tmp_path, workers=2):
        assert torch.equal(end, flat(make_model(seed=9)))


def copies(rank: int, size: int) -> None:
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        scripted = torch.jit.script(make_model())
    attach(scripted, sgd(scripted), offbeat.BSP()).detach()
    model = make_model()
    sync = attach(model, sgd(model), offbeat.BSP())
    file = io.BytesIO()
    torch.save(model, file)
    assert b"offbeat" not in file.getvalue(), "the file can be read without Offbeat"
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        duplicate.load_state_dict(make_model(seed=7).state_dict())
    train_step(model, sync._worker.optimizers[0].optimizer, make_batch(0, 0))
    sync.finish()


def test_copies_of_an_attached_model_are_independent() -> None:
    """They can be pickled, and loading into them has no effect. TorchScript can be attached."""
    simulated(copies, workers=1)
