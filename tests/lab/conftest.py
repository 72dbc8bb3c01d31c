"""Fixtures of the tests of the lab: one thread per process, no models left over, narrow models."""

from collections.abc import Iterator

import pytest
import torch

from lab import tiny
from offbeat_lab.recipes.models import resnet
from offbeat_lab.recipes.models.resnet import ResNet


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def recipe_tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the recipe ``tiny``, and delete its models at the end, also of a failed run."""
    monkeypatch.setitem(tiny.RECIPES, "tiny", tiny.RECIPE)
    yield
    tiny.built.clear()


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recipes build models with fewer layers."""
    monkeypatch.setattr(resnet, "ResNet", lambda _, classes: ResNet((1, 1), classes))
