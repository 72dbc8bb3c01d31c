"""Quantised sums: bounds computed here, error feedback, and the order of the second stages."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import offbeat
from offbeat.fabric import Accounting, Communicator, SingleCommunicator, TorchCommunicator, Wire
from offbeat.fabric.codec import BLOCK, CODECS
from workers import run

Function = Callable[[Wire, Accounting], Any]
both = pytest.mark.parametrize("precision", ["bfloat16", "int8"])
SIZE = 3


def _on_gloo(rank: int, size: int, function: Function, precision: Any) -> Any:
    fabric = Accounting(TorchCommunicator(None, timeout_seconds=20))
    result = function(Wire(fabric, precision), fabric)
    dist.barrier()  # who leaves early would end connections that others are still making
    return result


def gloo(function: Function, precision: str) -> list[Any]:
    return run(_on_gloo, function, precision, workers=SIZE)


def simulated(function: Function, precision: str) -> list[Any]:
    def work() -> Any:
        fabric = Accounting(dist.group.WORLD.make_communicator())  # type: ignore[union-attr]
        return function(Wire(fabric, precision), fabric)  # type: ignore[arg-type]

    return offbeat.simulate(work, workers=SIZE, network=offbeat.Network("100Mbit/s")).results


every_world = pytest.mark.parametrize("world", [gloo, simulated], ids=["gloo", "simulated"])


def values(seed: int, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers whose size changes from place to place by many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(elements, generator=generator, dtype=torch.float64)
    return (x * torch.logspace(-6, 3, elements, dtype=torch.float64)).to(dtype)


def largest(x: Tensor) -> Tensor:
    """The largest absolute value of each block, for each element."""
    blocks = [part.abs().max().expand(part.numel()) for part in x.double().split(BLOCK)]
    return torch.cat(blocks)


def most(x: Tensor, precision: str) -> Tensor:
    """The largest error that rounding ``x`` may make, for each element."""
    if precision == "bfloat16":
        return x.double().abs() * 2**-8 + 1e-38
    return largest(x) / 254 * (1 + 1e-4) + 1e-28


def round_trip(x: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """What ``x`` decodes to, and the error that the codec reports."""
    codec = CODECS[precision]()
    blocks = -(-x.numel() // BLOCK)
    errors = torch.zeros(blocks * BLOCK)
    payload = torch.full((blocks * codec.block_bytes,), 7, dtype=torch.uint8)
    codec.encode(errors, payload, plus=x)
    out = torch.empty_like(x)
    codec.decode(payload, out)
    total = torch.ones(blocks * BLOCK)
    codec.add(payload, total)
    torch.testing.assert_close(total[: x.numel()], 1 + out.float(), equal_nan=True)
    return out, errors[: x.numel()]


# -- codecs ---------------------------------------------------------------------------------------


@both
@given(
    elements=st.integers(1, 4 * BLOCK + 1),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e10]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(deadline=None, max_examples=60)
def test_the_error_is_bounded(
    precision: str, elements: int, seed: int, scale: float, dtype: torch.dtype
) -> None:
    """|x − decode(encode(x))| ≤ largest of the block / 254 (int8); x = decoded + error."""
    x = values(seed, elements, dtype) * scale
    decoded, errors = round_trip(x, precision)
    assert decoded.dtype == dtype
    assert ((decoded.double() - x.double()).abs() <= most(x, precision)).all()
    torch.testing.assert_close(
        decoded.double() + errors, x.double(), rtol=2e-7, atol=1e-6 * float(x.abs().max())
    )


@both
def test_many_pieces_and_odd_ends(precision: str) -> None:
    """A tensor longer than what is worked on at a time, which ends inside of a block."""
    x = values(0, 1300 * BLOCK + 17)
    decoded, _ = round_trip(x, precision)
    assert ((decoded.double() - x.double()).abs() <= most(x, precision)).all()


@both
def test_zeros_are_exact_and_tiny_blocks_are_kept_for_later(precision: str) -> None:
    x = torch.zeros(2 * BLOCK + 5)
    x[BLOCK + 3] = 1e-35
    decoded, errors = round_trip(x, precision)
    assert not decoded[:BLOCK].any()
    assert not decoded[BLOCK + 4 :].any()
    assert torch.equal(decoded + errors, x)


def test_int8_keeps_what_it_can_represent() -> None:
    """Multiples of the scale are exact, and rounding is to the nearest."""
    x = torch.arange(-127.0, 128.0) / 4
    decoded, errors = round_trip(x, "int8")
    assert torch.equal(decoded, x)
    assert not errors.any()
    decoded, _ = round_trip(torch.tensor([127.0, 2.4, 2.6, -2.4, -2.6]), "int8")
    assert decoded.tolist() == [127.0, 2.0, 3.0, -2.0, -3.0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e300])
def test_a_block_that_is_not_finite_decodes_to_nan(bad: float) -> None:
    """int8: the whole block, never garbage, and nothing else; its error is forgotten."""
    x = values(1, 3 * BLOCK, torch.float64)
    x[BLOCK + 9] = bad
    decoded, errors = round_trip(x, "int8")
    assert decoded[BLOCK : 2 * BLOCK].isnan().all()
    assert decoded[:BLOCK].isfinite().all()
    assert decoded[2 * BLOCK :].isfinite().all()
    assert errors.isfinite().all()
    assert not errors[BLOCK : 2 * BLOCK].any()


def test_bfloat16_keeps_what_is_not_finite() -> None:
    """Each number by itself; what overflows becomes infinite; no error is poisoned."""
    x = torch.tensor([math.inf, -math.inf, math.nan, 3.4e38, 1.0])
    decoded, errors = round_trip(x, "bfloat16")
    assert decoded[:2].tolist() == [math.inf, -math.inf]
    assert decoded[2].isnan()
    assert decoded[3:].tolist() == [math.inf, 1.0]
    assert not errors.any()


def test_bytes_of_a_block() -> None:
    assert CODECS["int8"].block_bytes == BLOCK + 4
    assert CODECS["bfloat16"].block_bytes == 2 * BLOCK


# -- sums -----------------------------------------------------------------------------------------

ELEMENTS = 10_007


def quantised(wire: Wire, fabric: Accounting) -> Any:
    results = []
    for dtype in (torch.float32, torch.float64):
        x = values(fabric.rank, ELEMENTS, dtype)
        handle = wire.sum(x, stream=str(dtype), what="test")
        result = handle.wait()
        results.append(result)
        assert result is x
        assert handle.done()
        assert handle.wait() is x
    return results


@both
def test_a_sum_is_within_its_bound_and_the_same_bits_everywhere(precision: str) -> None:
    """Errors add up: one rounding of each worker's numbers, one of their sum; none on the way."""
    on_gloo, in_simulator = gloo(quantised, precision), simulated(quantised, precision)
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


def repeated(wire: Wire, fabric: Accounting) -> Any:
    x = values(fabric.rank, 4000)
    fed = fresh = torch.zeros(4000, dtype=torch.float64)
    for i in range(64):
        fed = fed + wire.sum(x.clone(), stream="a", what="test").wait()
        fresh = fresh + wire.sum(x.clone(), stream=f"b {i}", what="test").wait()
    errors = wire.state_dict()["a"]
    return fed, fresh, errors["sent"].reshape(-1)[:4000].double(), errors["summed"].double()


@both
def test_error_feedback_loses_nothing(precision: str) -> None:
    """The sum of T results is T times the exact one but for the errors kept, which do not grow.

    So the time average converges like 1/T; without feedback it does not.
    """
    results = simulated(repeated, precision)
    exact = sum(values(rank, 4000).double() for rank in range(SIZE))
    kept = sum(sent for _, _, sent, _ in results)
    kept += torch.cat([summed for *_, summed in results])[:4000]
    bound = sum(2 * most(values(rank, 4000), precision) for rank in range(SIZE))
    bound += most(exact.abs() + largest(bound), precision)
    for fed, fresh, _, _ in results:
        scale = float(exact.abs().max())
        torch.testing.assert_close(fed + kept, 64 * exact, rtol=1e-5, atol=1e-5 * scale)
        assert ((fed / 64 - exact).abs() <= bound / 64 + 1e-5 * exact.abs() + 1e-9).all()
        assert (fresh / 64 - exact).norm() > 10 * (fed / 64 - exact).norm()


def weighted(wire: Wire, fabric: Accounting) -> Any:
    def total(*contributors: int) -> Tensor:
        x, contribute = values(fabric.rank, 4000), fabric.rank in contributors
        return wire.sum(x, stream="a", what="test", contribute=contribute).wait()

    total(0, 1, 2)
    before = wire.state_dict()["a"]
    nobody = total()
    unmoved = wire.state_dict()["a"]
    some = total(0, 2)
    return before, nobody, unmoved, some, wire.state_dict()["a"]


@both
def test_who_does_not_contribute_keeps_its_errors(precision: str) -> None:
    """Weight 0 sends zeros, whatever the tensor holds; if nobody contributes, the sum is 0."""
    results = simulated(weighted, precision)
    exact = values(0, 4000).double() + values(2, 4000).double()
    kept = sum(r[0]["sent"].reshape(-1)[:4000].double() for r in (results[0], results[2]))
    kept += torch.cat([r[0]["summed"] for r in results])[:4000].double()
    first = sum(2 * most(values(rank, 4000), precision) for rank in (0, 2))
    bound = first + 2 * most(exact.abs() + largest(first), precision) + 1e-6 * exact.abs()
    for rank, (before, nobody, unmoved, some, after) in enumerate(results):
        assert before["sent"].any()
        assert not nobody.any()
        for name in ("sent", "summed"):
            assert torch.equal(before[name], unmoved[name])
        assert torch.equal(before["sent"], after["sent"]) == (rank == 1)
        assert ((some - exact - kept).abs() <= bound).all()


def tentative(wire: Wire, fabric: Accounting) -> Any:
    seen = []
    for i in range(4):
        x = values(10 * i + fabric.rank, 4000)
        wrong = wire.sum(values(99, 4000), stream="a", what="test", tentative=True)
        wrong.wait()
        wire.take_back("a")
        seen.append(wire.sum(x.clone(), stream="a", what="test", tentative=i % 2 == 0).wait())
        plain = wire.sum(x.clone(), stream="b", what="test").wait()
        assert torch.equal(seen[-1], plain)
    assert torch.equal(wire.state_dict()["a"]["sent"], wire.state_dict()["b"]["sent"])
    assert torch.equal(wire.state_dict()["a"]["summed"], wire.state_dict()["b"]["summed"])
    return seen


@both
def test_a_tentative_sum_can_be_taken_back(precision: str) -> None:
    """Errors of both stages are again what they were."""
    assert len(simulated(tentative, precision)) == SIZE


def poisoned(wire: Wire, fabric: Accounting) -> Any:
    x = values(fabric.rank, ELEMENTS)
    if fabric.rank == 1:
        x[600], x[9000] = math.nan, math.inf
    bad = wire.sum(x, stream="a", what="test").wait()
    good = wire.sum(values(fabric.rank, ELEMENTS), stream="a", what="test").wait()
    return bad, good


@both
@every_world
def test_what_is_not_finite_is_seen_by_all_and_gone_next_time(world: Any, precision: str) -> None:
    """An overflow on one worker reaches every worker, and poisons no error."""
    for bad, good in world(poisoned, precision):
        assert not bad[600].isfinite()
        assert not bad[9000].isfinite()
        assert bad[2 * BLOCK : 17 * BLOCK].isfinite().all()
        assert good.isfinite().all()


# -- order and blocking ---------------------------------------------------------------------------

LENGTHS = [5000, 700, 3000, 10, 9000, 2000, 4001]  # the fourth one goes as it is


def in_any_order(wire: Wire, fabric: Accounting) -> Any:
    """Every worker asks and waits at other moments, in another order, between other operations."""
    moments = random.Random(fabric.rank)
    results = []
    for repetition in range(3):
        handles = []
        for i, length in enumerate(LENGTHS):
            x = values(100 * repetition + 10 * i + fabric.rank, length)
            handles.append(wire.sum(x, stream=str(i), what=f"sum {i}"))
            for _ in range(moments.randrange(4)):
                moments.choice(handles).done()
            if i == 4:
                assert fabric.any(fabric.rank == 1, what="test").wait()
        order = list(range(len(LENGTHS)))
        moments.shuffle(order)
        totals = {i: handles[i].wait() for i in order}
        results.append([totals[i] for i in range(len(LENGTHS))])
    return results


def in_order(wire: Wire, fabric: Accounting) -> Any:
    return [
        [
            wire.sum(
                values(100 * repetition + 10 * i + fabric.rank, length), stream=str(i), what="test"
            ).wait()
            for i, length in enumerate(LENGTHS)
        ]
        for repetition in range(3)
    ]


@every_world
def test_the_moments_of_asking_do_not_matter(world: Any) -> None:
    """Second stages start in the order of the first ones, whoever asks when."""
    expected = simulated(in_order, "int8")
    for result in world(in_any_order, "int8"):
        for got, want in zip(result, expected[0], strict=True):
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                if LENGTHS[i] > 10:
                    assert torch.equal(a, b)


def ask_early(wire: Wire, fabric: Accounting) -> bool:
    tensor = torch.zeros(1)
    if fabric.rank == 0:
        handle = wire.sum(torch.ones(4000), stream="a", what="test")
        early = handle.done()
        for other in range(1, fabric.size):  # only now let the others start
            fabric.send(tensor, destination=other, tag=5, what="go").wait()
    else:
        fabric.receive(tensor, source=0, tag=5, what="go").wait()
        handle, early = wire.sum(torch.ones(4000), stream="a", what="test"), False
    while not handle.done():
        pass  # asking alone brings it to its end
    return not early and bool((handle.wait() == fabric.size).all())


@every_world
def test_done_never_blocks_and_drives_both_stages(world: Any) -> None:
    assert all(world(ask_early, "int8"))


def blocked_elsewhere(wire: Wire, fabric: Accounting) -> float:
    handle = wire.sum(torch.ones(4000), stream="a", what="test")
    if fabric.rank == 0:  # the others are in any() already, and have not asked for the sum
        total = handle.wait()
        fabric.any(True, what="test").wait()
    else:
        fabric.any(True, what="test").wait()
        total = handle.wait()
    return float(total[0])


@every_world
def test_who_waits_for_something_else_does_not_hold_up_a_sum(world: Any) -> None:
    """Before a worker blocks in another operation it starts the second stages others need."""
    assert world(blocked_elsewhere, "int8") == [SIZE] * SIZE


# -- what it costs --------------------------------------------------------------------------------


def cost(wire: Wire, fabric: Accounting) -> list[int]:
    counts = []
    for elements in (3 * 40 * BLOCK, 3 * BLOCK, 100):
        before = fabric.payload_bytes
        handle = wire.sum(torch.ones(elements), stream=str(elements), what="test")
        at_once = fabric.payload_bytes - before
        handle.wait()
        assert fabric.payload_bytes - before == at_once
        counts.append(at_once)
    with fabric.paused():
        handle = wire.sum(torch.ones(4000), stream="paused", what="test")
    before = fabric.payload_bytes
    handle.wait()
    assert fabric.payload_bytes == before
    return counts


def test_payload_bytes_are_those_after_compression() -> None:
    """All chunks in the first stage, one in the second; a small tensor goes as it is."""
    assert simulated(cost, "int8") == [[160 * 516, 4 * 516, 400]] * SIZE
    assert simulated(cost, "bfloat16") == [[160 * 1024, 4 * 1024, 400]] * SIZE


def test_the_simulated_link_carries_a_quarter() -> None:
    """Bytes sent for one int8 sum against one exact sum of a large tensor."""

    def work(precision: Any) -> Callable[[], None]:
        def one() -> None:
            fabric = dist.group.WORLD.make_communicator()  # type: ignore[union-attr]
            Wire(fabric, precision).sum(torch.ones(300_000), stream="a", what="test").wait()

        return one

    sent = {
        precision: offbeat.simulate(work(precision), workers=4).sent_bytes[0]
        for precision in ("float32", "bfloat16", "int8")
    }
    assert sent["float32"] / sent["int8"] == pytest.approx(4 / (1 + 4 / BLOCK), rel=0.01)
    assert sent["float32"] / sent["bfloat16"] == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_a_lone_worker_loses_nothing(precision: Any) -> None:
    wire = Wire(SingleCommunicator(), precision)
    x = values(0, 4000)
    handle = wire.sum(x.clone(), stream="a", what="test")
    assert wire.exact
    assert handle.done()
    assert torch.equal(handle.wait(), x)
    assert wire.state_dict() == {}


def test_float32_is_the_communicators_sum() -> None:
    def work(wire: Wire, fabric: Communicator) -> Any:
        x = values(fabric.rank, 4000)
        quiet = wire.sum(x.clone(), stream="a", what="test", contribute=fabric.rank > 0).wait()
        return wire.sum(x, stream="a", what="test").wait(), quiet, wire.state_dict()

    for total, without, state in simulated(work, "float32"):
        assert torch.equal(total, values(0, 4000) + values(1, 4000) + values(2, 4000))
        assert torch.equal(without, values(1, 4000) + values(2, 4000))
        assert state == {}


# -- mistakes -------------------------------------------------------------------------------------


def test_a_stream_is_of_one_size() -> None:
    def work(wire: Wire, fabric: Communicator) -> str:
        wire.sum(torch.ones(4000), stream="a", what="test").wait()
        try:
            wire.sum(torch.ones(9000), stream="a", what="test")
        except ValueError as error:
            return str(error)
        return ""

    for text in simulated(work, "int8"):
        assert "stream 'a'" in text
        assert "a stream of its own" in text


def test_unknown_precisions_are_refused() -> None:
    message = 'wire must be "float32", "bfloat16" or "int8", got \'int4\''
    with pytest.raises(ValueError, match=message):
        Wire(SingleCommunicator(), "int4")  # type: ignore[arg-type]
