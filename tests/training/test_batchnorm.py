"""BatchNorm: recalibrated statistics, and statistics in a consensus."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offbeat


class Net(nn.Module):
    """A model with every kind of BatchNorm, one without statistics, Dropout, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.BatchNorm1d(3, momentum=0.3)
        self.two = nn.BatchNorm2d(2)
        self.three = nn.BatchNorm3d(2, affine=False)
        self.lazy = nn.LazyBatchNorm1d()
        self.bare = nn.BatchNorm1d(3, track_running_stats=False)
        self.drop = nn.Dropout(0.5)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        assert not self.drop.training
        assert not torch.is_grad_enabled()
        self.seen.append(x)
        x = self.lazy(self.one(x))
        self.two(x[:, :2, None, None].repeat(1, 1, 2, 2))
        self.three(x[:, :2, None, None, None])
        return self.drop(self.bare(x))


def batches(count: int, samples: int = 6) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(samples, 3, generator=generator) * (i + 1) + i, torch.zeros(samples))
        for i in range(count)
    ]


def test_statistics_are_means_over_the_batches() -> None:
    """1/K Σ mean and 1/K Σ var of the inputs. The affine part is the identity here."""
    model = Net()
    model.eval()
    model.lazy(torch.zeros(2, 3))
    with torch.no_grad():
        model.one.running_mean.fill_(99)  # type: ignore[union-attr]
    model.train()
    model.drop.eval()
    data = batches(5)
    modes = [module.training for module in model.modules()]
    offbeat.recalibrate_batchnorm(model, data, 4)
    assert [module.training for module in model.modules()] == modes
    assert (model.one.momentum, model.two.momentum) == (0.3, 0.1)
    assert len(model.seen) == 4
    inputs = [x.double().tolist() for x, _ in data[:4]]
    for column in range(3):
        means, variances = [], []
        for rows in inputs:
            values = [row[column] for row in rows]
            means.append(sum(values) / 6)
            variances.append(sum((value - means[-1]) ** 2 for value in values) / 5)
        assert model.one.running_mean[column].item() == pytest.approx(sum(means) / 4, rel=1e-5)  # type: ignore[index]
        assert model.one.running_var[column].item() == pytest.approx(sum(variances) / 4, rel=1e-5)  # type: ignore[index]
    assert model.one.num_batches_tracked == 4
    for layer in (model.two, model.three, model.lazy):  # their inputs are normalised
        torch.testing.assert_close(layer.running_mean, torch.zeros_like(layer.running_mean))
        assert layer.num_batches_tracked == 4
    torch.testing.assert_close(model.lazy.running_var, torch.full((3,), 1.2), rtol=1e-4, atol=0)
    assert model.bare.running_mean is None


def test_a_short_loader_is_used_up_and_forward_may_be_given() -> None:
    """With ``forward``, batches may have another form. The model is called as in training."""
    model = nn.Sequential(nn.BatchNorm1d(3))
    data = [{"x": x} for x, _ in batches(2)]
    offbeat.recalibrate_batchnorm(model, data, 9, forward=lambda m, batch: m(batch["x"]))
    mean = (data[0]["x"].mean(0) + data[1]["x"].mean(0)) / 2
    torch.testing.assert_close(model[0].running_mean, mean)
    offbeat.recalibrate_batchnorm(model, [data[1]["x"]], 1)  # a plain tensor
    torch.testing.assert_close(model[0].running_mean, data[1]["x"].mean(0))


@pytest.mark.parametrize(
    ("loader", "count", "error", "words"),
    [
        ([], 3, ValueError, "the loader gave no batch"),
        ([{"x": 1}], 3, TypeError, "a batch is a dict .* forward=lambda model, batch"),
        ([torch.zeros(2, 3), torch.zeros(2, 5)], 2, RuntimeError, "running_mean"),
        ([], 0, ValueError, "batches must be at least 1"),
        ([], 1.5, TypeError, "batches must be an integer"),
    ],
)
def test_an_error_restores_everything(loader: Any, count: Any, error: Any, words: str) -> None:
    """Statistics, modes and momenta are restored."""
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=0.2), nn.Dropout())
    model(torch.arange(12.0).reshape(4, 3))
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=words):
        offbeat.recalibrate_batchnorm(model, loader, count)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert (model[0].momentum, model[0].training, model[1].training) == (0.2, True, False)
