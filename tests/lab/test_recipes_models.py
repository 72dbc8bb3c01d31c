"""The language model, and every recipe in the training loop on stand-in files."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.standins import write_idx_files
from offbeat import Compute, Network
from offbeat_lab.compare import run_and_record
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import VirtualCluster
from offbeat_lab.recipes import RECIPES, Setup, Task, stdlib_lm
from offbeat_lab.recipes.custom import first_samples
from offbeat_lab.recipes.held_out import HeldOut
from offbeat_lab.recipes.stdlib_lm import ByteTransformer
from offbeat_lab.train import choose_backend


def test_the_language_model_is_causal() -> None:
    """A token changes the predictions from its position on, and positions matter."""
    torch.manual_seed(0)
    model = ByteTransformer().eval()
    text = torch.randint(50, (1, 35))
    other = text.clone()
    other[0, 20] = (text[0, 20] + 1) % 50
    change = (model(text) - model(other)).abs().amax(-1)[0]
    assert change[:20].max() < 1e-5
    assert change[20:].min() > 0
    swapped = text.roll(1, 1)
    assert not torch.allclose(model(text).roll(1, 1)[0, 5], model(swapped)[0, 5])


# Every recipe in the real training loop


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a small stand-in for MNIST."""
    return write_idx_files(tmp_path_factory.mktemp("data"), train=8, test=4)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use less text."""
    train, test = stdlib_lm.load()
    monkeypatch.setattr(stdlib_lm, "load", lambda: (train[:16], test[:4]))


def shorten(task: Task) -> Task:
    """Use two samples per step and at most four for evaluation."""
    held_out = task.evaluate
    assert isinstance(held_out, HeldOut)
    few = replace(held_out, dataset=first_samples(held_out.dataset, 4))
    return replace(task, batch_size=2, evaluate=few)


@pytest.mark.sampled
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "strategy"), [*((name, "local:period=2") for name in RECIPES), ("digits", "downpour")]
)
def test_two_steps_of_the_recipe(
    name: str, strategy: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule, clipping, a factor on the rate and evaluation after each step work together."""
    recipe = RECIPES[name]

    def build(setup: Setup) -> Task:
        return replace(shorten(recipe.build(setup)), steps=2)

    monkeypatch.setitem(RECIPES, name, replace(recipe, build=build))
    where = str(data) if recipe.needs_data else None
    job = Job(name, strategy, 2, epochs=1, data=where, evaluations=2, lr_scale=0.5)
    place = VirtualCluster(Network("1Gbit/s"), Compute("5ms"))
    result = run_and_record(job, lambda event: None, place)
    assert [point.step for point in result.points] == [1, 2]
    for point in result.points:
        assert point.metric == point.metrics[recipe.metric]
        assert all(math.isfinite(value) for value in point.metrics.values())
    assert [one.steps for one in result.stats] == [2, 2]
    assert result.payload_bytes > 0


# Where it trains


@pytest.mark.parametrize(
    ("gpus", "local", "backend"), [(0, "1", "gloo"), (1, "2", "gloo"), (4, "4", "nccl")]
)
def test_each_process_needs_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, local: str, backend: str
) -> None:
    """The backend is NCCL if each local process has a GPU, else gloo."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert choose_backend() == backend
