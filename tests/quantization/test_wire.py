"""Means of gradients over a lossy wire: error bounds, and which of them are sent exactly.

``test_message.py`` tests the errors that are kept, ``averaging/test_shared_model.py`` their effect.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.averaging.gradients import GradientMean
from offbeat.quantization.block_format import BLOCK
from offbeat.quantization.wire import Wire
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Team
from quantization.rounding import largest, most, values
from quantization.wires import SIZE, gloo, simulated

both = pytest.mark.parametrize("precision", ["int8", "int4", "int2"])
ELEMENTS = 10_007


def average(wire: Wire, gradient: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the mean of the workers' gradients, and the quantization errors."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    mean = GradientMean(wire, [[parameter]])
    mean.reduce([], contribute=True)
    return parameter.grad, mean.errors


def means_of_each_dtype(wire: Wire, team: Team) -> Any:
    dtypes = torch.float32, torch.float64
    return [average(wire, values(team.rank, ELEMENTS, dtype))[0] for dtype in dtypes]


@both
def test_a_mean_is_within_its_bound_and_the_same_bits_everywhere(precision: str) -> None:
    """One quantization of each contribution and one of the sum. No partial sum is quantized."""
    on_gloo = gloo(means_of_each_dtype, precision)
    in_simulator = simulated(means_of_each_dtype, precision)
    for index, dtype in enumerate((torch.float32, torch.float64)):
        each = [values(rank, ELEMENTS, dtype).double() for rank in range(SIZE)]
        exact = sum(each)
        first = sum(most(x, precision) for x in each)
        bound = first + most(exact.abs() + largest(first), precision) + 1e-6 * exact.abs()
        for result in (*on_gloo, *in_simulator):
            assert result[index].dtype == dtype
            assert ((SIZE * result[index].double() - exact).abs() <= bound).all()
            assert torch.equal(result[index], on_gloo[0][index])
        assert not torch.allclose(SIZE * on_gloo[0][index].double(), exact, rtol=1e-4, atol=0)


def cost(wire: Wire, team: Team) -> list[int]:
    counts = []
    for elements in (3 * 40 * BLOCK, 3 * BLOCK, 100):
        before = team.account.payload_bytes
        average(wire, torch.ones(elements))
        counts.append(team.account.payload_bytes - before)
    return counts


def test_payload_bytes_count_quantized_bytes() -> None:
    """All chunks in the first stage, one in the second. A small tensor is sent exactly.

    The agreement has two numbers in float64.
    """
    assert simulated(cost, "int8") == [[160 * 516 + 16, 4 * 516 + 16, 400 + 16]] * SIZE
    assert simulated(cost, "int4") == [[160 * 260 + 16, 4 * 260 + 16, 400 + 16]] * SIZE


def test_a_float32_wire_and_a_single_worker_keep_no_errors() -> None:
    results = simulated(lambda wire, team: average(wire, values(0, 4000)), "float32", workers=4)
    for precision in ("float32", "int8"):
        wire = Wire(Team(SingleCommunicator()), precision)
        assert wire.exact
        results.append(average(wire, values(0, 4000)))
    for mean, errors in results:
        assert torch.equal(mean, values(0, 4000))
        assert errors == []
