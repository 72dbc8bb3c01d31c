"""Streaming averaging: short waits in a training.

``test_decisions`` and ``averaging/test_pace`` test the rules on plain numbers,
``test_conformance`` the models and the outer gain.
"""

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from loops import attach, sgd
from offbeat import Compute, Network, simulate
from problems import make_wide, wide_step


def trained(rank: int, steps: int, text: str, lr: float = 0.05) -> Any:
    """Return the synchronizer after so many steps."""
    model = make_wide(rank)
    optimizer = sgd(model, lr)
    sync = attach(model, optimizer, text)
    for step in range(steps):
        wide_step(model, optimizer, rank, step)
    return sync


@pytest.mark.parametrize("slowest", [1.0, 2.0])
def test_short_waits_keep_equal_workers_together(slowest: float) -> None:
    """Then nearly every step sends the whole model. A slow worker waits for nobody."""

    def work(patience: float) -> tuple[float, float]:
        rank = dist.get_rank()
        steps = round(80 / (slowest if rank == 0 else 1))
        with trained(rank, steps, f"streaming:parts=2,patience={patience}") as sync:
            stats = sync.stats
            return stats.details["landings"] / (2 * stats.steps), stats.idle

    network = Network("8Mbit/s", latency="100us")
    compute = Compute("25ms", jitter=0.1, slowdown={0: slowest})
    without, patient = (
        simulate(partial(work, patience), workers=4, network=network, compute=compute).results
        for patience in (0.0, 0.05)
    )
    for (passes, idle), (more_passes, more_idle) in zip(without, patient, strict=True):
        assert idle == 0
        assert more_idle <= 0.05
        if slowest == 1:
            assert more_passes > max(passes, 0.97)
    if slowest > 1:
        assert patient[0][1] == 0
