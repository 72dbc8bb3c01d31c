"""One thread for the models here: they are small, and another test process may run beside."""

from collections.abc import Iterator

import pytest
import torch

from offbeat.lab.recipes import plain_cnns, resnet
from offbeat.lab.recipes.resnet import ResNet


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes build models with fewer and narrower layers; all else of them is as it is."""
    monkeypatch.setattr(plain_cnns, "HIDDEN", 16)
    monkeypatch.setattr(plain_cnns, "VGG11", (8, "pool", 8, "pool", 512, "pool"))
    monkeypatch.setattr(resnet, "ResNet", lambda block, _, classes: ResNet(block, (1, 1), classes))
