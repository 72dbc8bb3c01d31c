"""The linear scaling warm-up."""

import pytest
import torch

from offbeat import LinearScalingWarmup


def optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.1, 0.02)]
    return torch.optim.SGD(groups)


def test_rate_rises_linearly_to_n_times() -> None:
    """lr increases from η to n·η in warmup_steps steps and stays there, in every group."""
    one = optimizer()
    warmup = LinearScalingWarmup(one, workers=4, warmup_steps=10)
    for t in range(16):
        factor = 1 + 3 * min(t, 10) / 10
        rates = [group["lr"] for group in one.param_groups]
        assert rates == pytest.approx([0.1 * factor, 0.02 * factor])
        one.step()
        warmup.step()


def test_it_resumes() -> None:
    """A loaded state continues the same rates."""
    one = optimizer()
    warmup = LinearScalingWarmup(one, workers=4, warmup_steps=10)
    for _ in range(5):
        one.step()
        warmup.step()
    other = optimizer()
    again = LinearScalingWarmup(other, workers=4, warmup_steps=10)
    other.load_state_dict(one.state_dict())
    again.load_state_dict(warmup.state_dict())
    for thing in (one, warmup, other, again):
        thing.step()
    assert one.param_groups[0]["lr"] == other.param_groups[0]["lr"]


@pytest.mark.parametrize(("workers", "steps"), [(0, 5), (4, -1)])
def test_invalid_settings_are_refused(workers: int, steps: int) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        LinearScalingWarmup(optimizer(), workers=workers, warmup_steps=steps)
