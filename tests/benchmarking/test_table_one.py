"""The arithmetic of SelSync's Table I, on numbers worked out by hand."""

import math

import pytest
from benchmarks.papers import table_one
from benchmarks.papers.cluster import CLUSTER
from benchmarks.papers.selsync import _simulated
from benchmarks.papers.table_one import MODELS, Row

from offbeat import BSP, SelSync

MODEL = {one.name: one for one in MODELS}


def test_an_overall_speed_up_has_the_iterations_in_it():
    """Twice the iterations and still 3 times as fast: a step is 6 times as fast."""
    row = Row("half", 2.0, 3.0, lssr=0.75)
    assert row.per_step == 6.0
    assert row.limit == 4.0
    assert row.impossible
    assert not Row("half", 1.0, 3.0, lssr=0.75).impossible
    assert not Row("half", 2.0, 3.0).impossible  # nothing is known of its steps


def test_what_each_row_of_table_1_needs():
    """The products of the paper's own figures, and both rows of VGG11 beyond their limits."""
    needed = {n: [round(r.per_step, 1) for r in one.selsync] for n, one in MODEL.items()}
    assert needed == {
        "ResNet-101": [3.8, 3.9],
        "VGG11": [41.3, 103.4],
        "AlexNet": [4.2, 4.6],
        "Transformer": [3.3, 3.4],
    }
    impossible = {n: [r.impossible for r in one.selsync] for n, one in MODEL.items()}
    assert impossible.pop("VGG11") == [True, True]
    assert not any(map(any, impossible.values()))


def test_the_step_time_of_a_speed_up():
    """m = 1, a mean every 4 steps: t = 1/2 gives (0.5 + 1)/(0.5 + 0.25) = 2, and no t gives 4."""
    assert table_one.per_step(0.5, 1.0, 0.75) == 2.0
    assert table_one.step_of(2.0, 1.0, 0.75) == pytest.approx(0.5)
    assert table_one.step_of(4.0, 1.0, 0.75) is None
    assert table_one.lssr_of(2.0, 0.5, 1.0) == pytest.approx(0.75)
    # flags of 0.1 at each step: 1.5 / 0.85
    assert table_one.per_step(0.5, 1.0, 0.75, 0.1) == pytest.approx(1.5 / 0.85)
    assert table_one.step_of(1.5 / 0.85, 1.0, 0.75, 0.1) == pytest.approx(0.5)


def test_the_step_time_and_period_of_two_rows():
    """m = 1, t = 1: a mean every 4 steps gains 2/1.25, every 2 steps 2/1.5."""
    step, period = table_one.step_of_pair(2 / 1.25, 2 / 1.5, 1.0)
    assert (step, period) == pytest.approx((1.0, 2.0))
    step, period = table_one.step_of_pair(3.0, 3.0, 1.0)  # (0.5 + 1)/0.5, means cost nothing
    assert step == pytest.approx(0.5)
    assert math.isinf(period)


def test_the_step_time_of_a_throughput():
    """Four workers that wait as long as they compute do the work of two."""
    assert table_one.step_of_throughput(2.0, 4, 1.0) == pytest.approx(1.0)


def test_resnets_rows_agree_on_the_step_time():
    """SelSync's and FedAvg's rows, each solved alone: 66 to 74 ms; 16 workers, 5 Gbit/s."""
    model = MODEL["ResNet-101"]
    mean = 30 * (1e-4 + 4 * model.parameters / 16 / 625e6)  # a ring's 2(N−1) messages
    flags = 30 * (1e-4 + 56 / 16 / 625e6)
    row = model.selsync[0]
    assert table_one.step_of(row.per_step, mean, 0.829, flags) == pytest.approx(0.066, abs=5e-4)
    assert model.fedavg is not None
    pair = table_one.step_of_pair(*(row.per_step for row in model.fedavg), mean)
    assert pair == pytest.approx((0.074, 24.4), rel=5e-3)


def test_the_simulator_gives_the_speed_up_that_was_solved_for():
    """At that step time SelSync trains 2.03 times faster to convergence, as the paper says."""
    model = MODEL["ResNet-101"]
    mean, flags = CLUSTER.mean_seconds(4 * model.parameters), CLUSTER.tally_seconds
    step = table_one.step_of(model.selsync[0].per_step, mean, 0.829, flags)
    assert step is not None
    found = _simulated(model, step, 100)
    assert found["overall"] == pytest.approx(2.03, rel=0.01)
    bsp, ours = (
        CLUSTER.step_seconds(one, model.parameters, step, 0.829)
        for one in (BSP(), SelSync(delta=0.3))
    )
    assert bsp / ours / 1.85 == pytest.approx(2.03, rel=1e-6)
