"""Sizes of the models, schedules, and every recipe in the training loop on stand-in files."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from lab.standins import write_cifar, write_idx_files, write_text
from offbeat import Compute, Network
from offbeat_lab.compare import run_and_record
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import VirtualCluster
from offbeat_lab.recipes import RECIPES, Setup, Task, find_recipe, stdlib_lm
from offbeat_lab.recipes.custom import first_samples
from offbeat_lab.recipes.held_out import HeldOut
from offbeat_lab.recipes.models.resnet import resnet101
from offbeat_lab.recipes.models.transformers import ByteTransformer, WordTransformer
from offbeat_lab.recipes.schedules import decay_at, decay_every
from offbeat_lab.train import choose_backend

# With another head for another number of classes, as published for 1000: 44,549,160 in
# torchvision, whose first layer has 7×7 weights in place of 3×3.
STEM = 3 * 64 * (49 - 9)


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (lambda: resnet101(1000), 44_549_160 - STEM),
        (lambda: resnet101(10), 42_512_970),
        (lambda: WordTransformer(267_735, 35), 107_845_735),
        (lambda: WordTransformer(33_278, 35), 13_828_478),
    ],
)
def test_models_have_the_published_sizes(make: Callable[[], nn.Module], parameters: int) -> None:
    """The numbers of parameters are those of torchvision. The meta device needs no memory."""
    with torch.device("meta"):
        model = make()
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("make", [ByteTransformer, lambda: WordTransformer(50, 35)])
def test_a_language_model_is_causal(make: Callable[[], nn.Module]) -> None:
    """A token changes the predictions from its position on, and positions matter."""
    torch.manual_seed(0)
    model = make().eval()
    text = torch.randint(50, (1, 35))
    other = text.clone()
    other[0, 20] = (text[0, 20] + 1) % 50
    change = (model(text) - model(other)).abs().amax(-1)[0]
    assert change[:20].max() < 1e-5
    assert change[20:].min() > 0
    swapped = text.roll(1, 1)
    assert not torch.allclose(model(text).roll(1, 1)[0, 5], model(swapped)[0, 5])


# Schedules


def rates(task_or_scheduler: object, steps: int) -> list[float]:
    scheduler = getattr(task_or_scheduler, "scheduler", task_or_scheduler)
    optimizer = scheduler.optimizer
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def sgd(lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)


def test_rates_decay_by_the_samples_of_all_workers() -> None:
    """1 and 4 workers change the rate after the same number of samples."""
    alone = rates(decay_at(sgd(), [40, 80], 0.1, samples_per_step=4), 24)
    assert alone == pytest.approx([1.0] * 10 + [0.1] * 10 + [0.01] * 4)
    four = rates(decay_at(sgd(), [40, 80], 0.1, samples_per_step=16), 6)
    assert four == pytest.approx([1.0] * 3 + [0.1] * 2 + [0.01])  # 48 samples are past 40
    assert four == alone[::4]
    alone = rates(decay_every(sgd(), 40, 0.8, samples_per_step=4), 24)
    assert alone == pytest.approx([1.0] * 10 + [0.8] * 10 + [0.64] * 4)
    assert rates(decay_every(sgd(), 40, 0.8, samples_per_step=16), 6) == alone[::4]


# Every recipe in the real training loop


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with small stand-ins for all data sets."""
    folder = tmp_path_factory.mktemp("data")
    write_cifar(folder)
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


def build(name: str, data: Path, workers: int = 1) -> Task:
    recipe = find_recipe(name)
    return recipe.build(Setup(workers, recipe.epochs, data=data))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("name", "batch_size", "settings"),
    [
        ("cifar10:resnet101", 32, {"initial_lr": 0.1, "momentum": 0.9, "weight_decay": 4e-4}),
        ("wikitext:transformer", 20, {"initial_lr": 2.0, "momentum": 0, "weight_decay": 0}),
    ],
)
def test_recipes_of_the_papers_have_their_settings(
    name: str, batch_size: int, settings: dict[str, float], data: Path
) -> None:
    """Every parameter has a gradient."""
    task = build(name, data)
    (group,) = task.optimizer.param_groups
    assert (task.batch_size, type(task.optimizer)) == (batch_size, torch.optim.SGD)
    assert group.items() >= settings.items()
    task.loss(task.model, task.dataset[[0, 1]]).backward()
    assert all(p.grad is not None and p.grad.any() for p in task.model.parameters())


@pytest.mark.usefixtures("narrow")
def test_steps_cover_the_epochs(data: Path) -> None:
    """The paper's decay happens within the run."""
    name = "cifar10:resnet101"
    one, sixteen = build(name, data), build(name, data, workers=16)
    assert (one.steps, sixteen.steps) == (293, 19)  # 234 × 40 images, 32 and 512 a step
    found = rates(build(name, data, workers=4), 74)  # 128 images a step
    assert found == pytest.approx([0.1] * 35 + [0.01] * 12 + [0.001] * 27)  # 110 and 150 epochs


def test_perplexity_of_a_uniform_guess_is_the_vocabulary(data: Path) -> None:
    """With equal logits, the perplexity is the number of words."""
    task = build("wikitext:transformer", data)
    nn.init.zeros_(task.model.head.weight)
    words = task.model.head.out_features
    assert task.evaluate(task.model)["test perplexity"] == pytest.approx(words)
    assert task.clip_norm == 2.0


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
