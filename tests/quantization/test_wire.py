"""Quantized sums: error bounds, contributions, bytes and errors.

``averaging/test_shared_model`` tests error feedback.
"""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.quantization.kernels import BLOCK
from offbeat.quantization.wire import Wire
from offbeat.transport.single_process import SingleCommunicator
from offbeat.transport.team import Team
from quantization.rounding import largest, most, values
from quantization.wires import SIZE, every_world, gloo, simulated

both = pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4", "int2"])
ELEMENTS = 10_007


def sum_of_each_dtype(wire: Wire, team: Team) -> Any:
    results = []
    for dtype in (torch.float32, torch.float64):
        x = values(team.rank, ELEMENTS, dtype)
        handle = wire.sum(x, stream=str(dtype), what="test")
        results.append(handle.wait())
        assert results[-1] is x
        assert handle.done()
        assert handle.wait() is x
    return results


@both
def test_a_sum_is_within_its_bound_and_the_same_bits_everywhere(precision: str) -> None:
    """One quantization of each contribution and one of the sum. No partial sum is quantized."""
    on_gloo = gloo(sum_of_each_dtype, precision)
    in_simulator = simulated(sum_of_each_dtype, precision)
    for index, dtype in enumerate((torch.float32, torch.float64)):
        each = [values(rank, ELEMENTS, dtype).double() for rank in range(SIZE)]
        exact = sum(each)
        first = sum(most(x, precision) for x in each)
        bound = first + most(exact.abs() + largest(first), precision) + 1e-6 * exact.abs()
        for result in (*on_gloo, *in_simulator):
            assert result[index].dtype == dtype
            assert ((result[index].double() - exact).abs() <= bound).all()
            assert torch.equal(result[index], on_gloo[0][index])
        assert not torch.equal(on_gloo[0][index].double(), exact)


def weighted(wire: Wire, team: Team) -> Any:
    def total(*contributors: int) -> Tensor:
        x, contribute = values(team.rank, 4000), team.rank in contributors
        return wire.sum(x, stream="a", what="test", contribute=contribute).wait()

    total(0, 1, 2)
    before = vars(copy.deepcopy(wire.errors["a"]))
    nobody = total()
    unmoved = vars(copy.deepcopy(wire.errors["a"]))
    some = total(0, 2)
    return before, nobody, unmoved, some, vars(copy.deepcopy(wire.errors["a"]))


@both
def test_a_worker_that_does_not_contribute_keeps_its_errors(precision: str) -> None:
    """It sends zeros, whatever the tensor holds. If no worker contributes, the sum is 0."""
    results = simulated(weighted, precision)
    exact = values(0, 4000).double() + values(2, 4000).double()
    kept = [  # by all workers, before and after the last sum
        sum(r[when]["sent"].reshape(-1)[:4000].double() for r in results)
        + torch.cat([r[when]["summed"] for r in results])[:4000]
        for when in (0, 4)
    ]
    for rank, (before, nobody, unmoved, some, after) in enumerate(results):
        assert before["sent"].any()
        assert not nobody.any()
        for name in ("sent", "summed"):
            assert torch.equal(before[name], unmoved[name])
        assert torch.equal(before["sent"], after["sent"]) == (rank == 1)
        scale = float(exact.abs().max())
        torch.testing.assert_close(some + kept[1], exact + kept[0], rtol=1e-5, atol=1e-6 * scale)


def poisoned(wire: Wire, team: Team) -> Any:
    x = values(team.rank, ELEMENTS)
    if team.rank == 1:
        x[600], x[9000] = math.nan, math.inf
    bad = wire.sum(x, stream="a", what="test").wait()
    good = wire.sum(values(team.rank, ELEMENTS), stream="a", what="test").wait()
    return bad, good


@pytest.mark.sampled
@both
@every_world
def test_non_finite_values_reach_all_workers_and_leave_no_error(world: Any, precision: str) -> None:
    """The next sum is finite."""
    for bad, good in world(poisoned, precision):
        assert not bad[600].isfinite()
        assert not bad[9000].isfinite()
        assert bad[2 * BLOCK : 17 * BLOCK].isfinite().all()
        assert good.isfinite().all()


def cost(wire: Wire, team: Team) -> list[int]:
    counts = []
    for elements in (3 * 40 * BLOCK, 3 * BLOCK, 100):
        before = team.account.payload_bytes
        handle = wire.sum(torch.ones(elements), stream=str(elements), what="test")
        at_once = team.account.payload_bytes - before
        handle.wait()
        assert team.account.payload_bytes - before == at_once
        counts.append(at_once)
    with team.account.paused():
        handle = wire.sum(torch.ones(4000), stream="paused", what="test")
    before = team.account.payload_bytes
    handle.wait()
    assert team.account.payload_bytes == before
    return counts


def test_payload_bytes_count_quantized_bytes() -> None:
    """All chunks in the first stage, one in the second. A small tensor is sent exactly."""
    assert simulated(cost, "int8") == [[160 * 516, 4 * 516, 400]] * SIZE
    assert simulated(cost, "bfloat16") == [[160 * 1024, 4 * 1024, 400]] * SIZE


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_a_single_worker_does_not_quantize(precision: Any) -> None:
    wire = Wire(Team(SingleCommunicator()), precision)
    x = values(0, 4000)
    handle = wire.sum(x.clone(), stream="a", what="test")
    assert wire.exact
    assert handle.done()
    assert torch.equal(handle.wait(), x)
    assert wire.errors == {}


def test_a_float32_wire_is_the_sum_of_the_communicator() -> None:
    def work(wire: Wire, team: Team) -> Any:
        x = values(team.rank, 4000)
        quiet = wire.sum(x.clone(), stream="a", what="test", contribute=team.rank > 0).wait()
        return wire.sum(x, stream="a", what="test").wait(), quiet, wire.errors

    for total, without, state in simulated(work, "float32"):
        assert torch.equal(total, values(0, 4000) + values(1, 4000) + values(2, 4000))
        assert torch.equal(without, values(1, 4000) + values(2, 4000))
        assert state == {}


def test_a_stream_has_one_size() -> None:
    def work(wire: Wire, team: Team) -> None:
        wire.sum(torch.ones(4000), stream="a", what="test").wait()
        with pytest.raises(ValueError, match=r"stream 'a' .*use one stream per tensor"):
            wire.sum(torch.ones(9000), stream="a", what="test")

    assert simulated(work, "int8") == [None] * SIZE
