"""Streaming averaging: use of link and processor, and waits.

``test_decisions`` and ``averaging/test_pace`` test the rules on plain numbers,
``test_conformance`` the models and the outer gain.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from loops import attach, sgd
from offbeat import Compute, Network, simulate
from offbeat.averaging.averager import Averager
from offbeat.averaging.flight import Flight
from offbeat.simulate.host import SimulatedHost
from problems import make_wide, wide_step


def trained(rank: int, steps: int, text: str, lr: float = 0.05) -> Any:
    """Return the synchronizer after so many steps."""
    model = make_wide(rank)
    optimizer = sgd(model, lr)
    sync = attach(model, optimizer, text)
    for step in range(steps):
        wide_step(model, optimizer, rank, step)
    return sync


def costly(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the packing of a message take so much virtual time, which counts as processor time."""
    real = Averager.begin

    def begin(self: Averager, *args: Any) -> Flight:
        flight = real(self, *args)
        flight.work = packing(self, flight.work)
        return flight

    def packing(self: Averager, work: Iterator[None]) -> Iterator[None]:
        self.worker.team.host.sleep(seconds, "a test")
        yield from work

    monkeypatch.setattr(Averager, "begin", begin)
    monkeypatch.setattr(SimulatedHost, "processor_seconds", SimulatedHost.now)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        *[("streaming:staleness=64", 64), ("streaming:staleness=8", 8)],
        *[("async:staleness=8,schedule=eager", 8)],
    ],
)
def test_the_bound_is_kept_by_workers_without_processor_time(
    text: str, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 2 and 18 ms; a message costs 10 ms, so 5 % of the time pay one in 100 or 11 steps.

    All workers choose the same number of parts, although their steps differ.
    """
    costly(monkeypatch, 0.01)

    def work() -> tuple[dict[str, Any], float, Any]:
        sync = trained(dist.get_rank(), (300, 40)[dist.get_rank()], text, lr=0.01)
        found = dict(sync.stats.details), sync.stats.idle
        sync.finish()
        return *found, sync._iteration.flow.state.sizer

    network, compute = Network("1Gbit/s", latency="100us"), Compute("2ms", slowdown={1: 9})
    results = simulate(work, workers=2, network=network, compute=compute).results
    for rank, (details, _, sizer) in enumerate(results):
        oldest = max(details["staleness_histogram"])
        assert oldest == bound if rank == 0 else oldest <= bound
        assert details["landings"] >= 3
        assert sizer == results[0][2]
        assert sizer.time.known
    assert results[1][1] <= 0.05, "the slow worker does not wait"


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
