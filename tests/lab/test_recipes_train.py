"""Every recipe in the real training loop: two steps of two simulated workers."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from lab.standins import write_cifar, write_idx_files, write_text
from offbeat import Compute, Network
from offbeat_lab.compare import run_and_record
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import VirtualCluster
from offbeat_lab.recipes import RECIPES, Setup, Task, stdlib_lm
from offbeat_lab.recipes.custom import first_samples
from offbeat_lab.recipes.held_out import HeldOut


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with small stand-ins for all data sets."""
    folder = tmp_path_factory.mktemp("data")
    write_cifar(folder, train=8, test=4)
    write_idx_files(folder, train=8, test=4)
    return write_text(folder)


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
@pytest.mark.usefixtures("narrow", "small")
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
