"""Values that other implementations publish."""

import torch
from torch import nn

import offbeat
from worlds import run


def streaming_diloco(rank: int, size: int) -> list[float]:
    """Return the first scalar before each of ten steps with the gradient 2."""
    model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy = offbeat.DiLoCo(period=6, fragments=2, outer_lr=2.0, outer_momentum=0.0)
    sync = offbeat.attach(model, optimizer, strategy)
    values = []
    for _ in range(10):
        values.append(model[0].item())
        optimizer.zero_grad()
        (2 * (model[0] + model[1])).sum().backward()
        optimizer.step()
    sync.finish()
    return values


def test_streaming_diloco_has_the_values_of_torchft() -> None:
    """Those of torchft's regression test without delay and with ``fragment_update_alpha`` 0.

    Its other cases mix the local with the global model, or drop the local steps of the delay.
    """
    expected = [1, -1, -3, -11, -13, -15, -17, -19, -21, -35]
    assert run(streaming_diloco, workers=2) == [expected] * 2
