"""Second stages: their order, no deadlock whenever workers wait, and no wait for busy workers."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.quantization.wire import Wire
from offbeat.transport.team import Team
from quantization.rounding import values
from quantization.wires import SIZE, every_world, gloo, simulated, start_sum
from transport.communicators import STEP_SECONDS, meet

LENGTHS = [5000, 700, 3000, 10, 9000, 2000, 4001]


def repeated_sums(wire: Wire, team: Team, *, at_random: bool) -> list[list[Tensor]]:
    """Poll and wait at random times, in random order, between other operations, or in order."""
    moments = random.Random(team.rank)
    results = []
    for repetition in range(3):
        futures = []
        for i, length in enumerate(LENGTHS):
            x = values(100 * repetition + 10 * i + team.rank, length)
            futures.append(start_sum(wire, x, f"sum {i}"))
            if not at_random:
                futures[i].wait()
                continue
            for _ in range(moments.randrange(4)):
                moments.choice(futures).done()
            if i == 4:
                assert team.communicator.sum(torch.ones(1), what="test").wait().item() == team.size
        for future in moments.sample(futures, len(futures)):
            future.wait()
        results.append([future.wait() for future in futures])
    return results


@every_world
def test_results_do_not_depend_on_when_workers_poll(world: Any) -> None:
    """Second stages start in the order of the first ones on all workers."""
    expected = simulated(partial(repeated_sums, at_random=False), "int8")
    for result in world(partial(repeated_sums, at_random=True), "int8"):
        for got, want in zip(result, expected[0], strict=True):
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b)


# -- busy workers ---------------------------------------------------------------------------------


def one_is_busy(wire: Wire, team: Team) -> bool:
    """Start two sums. The training thread of rank 0 is busy until the others have both results."""
    futures = [start_sum(wire, torch.ones(4000)) for _ in range(2)]
    if team.rank == 0:
        meet("the others have the sums", [0, 1, 2])
    totals = [future.wait() for future in futures]
    if team.rank > 0:
        meet("the others have the sums", [0, 1, 2])
    return all(bool((total == team.size).all()) for total in totals)


def test_a_sum_does_not_wait_for_a_busy_worker() -> None:
    """The chunk that rank 0 adds up reaches the others while its training thread is busy."""
    assert gloo(one_is_busy, "int8") == [True] * SIZE


def busy_in_virtual_time(wire: Wire, team: Team) -> float:
    """Start two sums. The training thread of rank 0 computes for a step."""
    futures = [start_sum(wire, torch.ones(4000)) for _ in range(2)]
    if team.rank == 0:
        team.host.computed(1)
    for future in futures:
        future.wait()
    return team.host.now()


def test_second_stages_start_while_workers_compute_in_virtual_time() -> None:
    """The second stage follows the first one at once."""
    busy, *others = simulated(busy_in_virtual_time, "int8")
    assert busy == pytest.approx(STEP_SECONDS)
    assert max(others) < 0.1 * STEP_SECONDS
