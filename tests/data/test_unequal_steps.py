"""Leased data and a slow worker: what the steps of a worker count, and evaluations.

These are the sections "Unequal numbers of steps" of docs/strategies.md and "Evaluate while the
others train" of docs/data.md.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from cells import some
from offbeat import Compute, Network, Simulation, simulate
from offbeat.data import LeasedLoader, LeasedSampler
from offbeat_lab.baselines import STRATEGIES

WORKERS, BATCHES, LR = 4, 140, 0.01
STEP_SECONDS = 0.010
OWN_SPEED = [
    "streaming:outer_gain=1",
    "async:schedule=eager",
    "downpour",
    "easgd:period=2",
]
LOCK_STEP = [
    "bsp",
    "local:period=4",
    "selsync:delta=0.1",
    "async:staleness=4",
    "streaming:schedule=cyclic,staleness=4",
    "diloco:period=4",
    "fedavg:period=4",
    "sparseloco:period=4",
    "powersgd",
]
SSP = "ssp:staleness=5"
AfterStep = Callable[[Any, LeasedSampler], None]


def train(strategy: str, after_step: AfterStep = lambda sync, sampler: None) -> Any:
    """Return this worker's steps and the final model, divided by the learning rate.

    Worker w has the constant gradient e_w, the unit vector. So element w of the model shows how
    much the steps of worker w count.
    """
    model = torch.nn.Linear(1, WORKERS, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sync = offbeat.attach(model, optimizer, offbeat.parse_strategy(strategy, STRATEGIES))
    dataset = TensorDataset(torch.zeros(BATCHES))
    sampler = LeasedSampler(dataset, 1, sync=sync)
    for _ in LeasedLoader(DataLoader(dataset, batch_sampler=sampler)):
        optimizer.zero_grad()
        model.weight[sync.rank].sum().backward()
        optimizer.step()
        after_step(sync, sampler)
    sync.finish()
    return sync.step, (model.weight.detach().flatten() / -LR).tolist()


def simulated(worker: Callable[[], Any]) -> Simulation:
    """Run ``worker`` on four workers, of which the last one has half the speed."""
    return simulate(
        worker,
        workers=WORKERS,
        network=Network("1Gbit/s", latency="100us"),
        compute=Compute(STEP_SECONDS, slowdown={3: 2.0}),
    )


def run(strategy: str) -> tuple[list[int], list[float]]:
    """Return the steps of each worker, and the final model divided by the learning rate."""
    results = simulated(lambda: train(strategy)).results
    assert sum(steps for steps, _ in results) == BATCHES
    return [steps for steps, _ in results], results[0][1]


# -- unequal numbers of steps ------------------------------------------------------------------


def test_all_strategies_have_a_line() -> None:
    assert {text.partition(":")[0] for text in (*OWN_SPEED, *LOCK_STEP, SSP)} == {*STRATEGIES}


@pytest.mark.parametrize("strategy", OWN_SPEED)
def test_a_slow_worker_takes_half_as_many_steps(strategy: str) -> None:
    """The model is the sum of all updates, divided by N. So each sample counts the same.

    The last mean of ``async`` is that of the workers with new steps, and so are the means of the
    parts that are sent after the last step. EASGD adds no updates.
    """
    steps, moved = run(strategy)
    assert steps[3] == pytest.approx(BATCHES * 0.5 / 3.5, abs=4)
    assert max(steps[:3]) - min(steps[:3]) <= 4
    if "easgd" not in strategy:
        exact = 1e-6 if "downpour" in strategy else 0.03
        assert moved == pytest.approx([one / WORKERS for one in steps], rel=exact)


@pytest.mark.parametrize("strategy", some(LOCK_STEP, 1, 3, 4))
def test_in_lock_step_the_shares_are_equal(strategy: str) -> None:
    steps, _ = run(strategy)
    assert max(steps) - min(steps) <= 5


def test_ssp_ends_in_lock_step() -> None:
    steps, moved = run(SSP)
    assert 3 <= max(steps) - min(steps) <= 5 + 4
    assert moved == pytest.approx([one / WORKERS for one in steps], rel=1e-6)


# -- evaluations -------------------------------------------------------------------------------

EVALUATIONS, EVALUATED = 3, 3  # number of evaluations, and of batches in each


def evaluating(*, in_consensus: bool) -> AfterStep:
    """Rank 0 evaluates a batch after each of its steps, or all of them in a consensus.

    A batch takes as long as a step.
    """
    begun = left = 0

    def after_step(sync: Any, sampler: LeasedSampler) -> None:
        nonlocal begun, left
        sleep = sync._team.host.sleep
        if begun < EVALUATIONS and sampler.progress > (begun + 1) / (EVALUATIONS + 2):
            begun, left = begun + 1, EVALUATED * (sync.rank == 0)
            if in_consensus:
                with sync.consensus():
                    sleep(left * STEP_SECONDS, "an evaluation")
                left = 0
        if left:
            sleep(STEP_SECONDS, "an evaluation")
            left -= 1

    return after_step


def test_an_evaluation_between_steps_makes_no_worker_wait() -> None:
    """The others take over samples. A consensus costs each worker more than a step."""
    between = simulated(lambda: train("streaming", evaluating(in_consensus=False)))
    inside = simulated(lambda: train("streaming", evaluating(in_consensus=True)))
    ideal = (BATCHES + EVALUATIONS * EVALUATED) * STEP_SECONDS / 3.5
    assert ideal * 0.99 <= between.seconds <= ideal + 4 * STEP_SECONDS
    assert inside.seconds > between.seconds + EVALUATIONS * STEP_SECONDS
    alone, *fast, slow = (steps for steps, _ in between.results)
    assert alone + EVALUATIONS * EVALUATED == pytest.approx(fast[0], abs=4)
    assert slow == pytest.approx(fast[0] / 2, abs=3)
