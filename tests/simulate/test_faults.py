"""Faults of simulated workers: what the others see, and when, by hand."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat import Compute, Network, simulate
from offbeat.errors import CommunicationError, CommunicationTimeout
from offbeat.simulate import Cut, Join, Kill, Pause
from offbeat.simulate.connections import NOTICE_SECONDS

NETWORK = Network("1Gbit/s", latency="1ms")


def attempt(steps: int = 10, timeout_seconds: float = 5.0) -> dict[str, Any]:
    """Train; what came of it, and at what virtual time."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result: dict[str, Any] = {"error": None}
    try:
        sync = offbeat.attach(model, optimizer, offbeat.BSP(), timeout_seconds=timeout_seconds)
    except CommunicationError as error:
        return {"error": type(error), "text": str(error)}
    try:
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        sync.finish()
    except CommunicationError as error:
        result.update(error=type(error), text=str(error))
        sync.detach()
    return {**result, "steps": sync.step, "seconds": sync._host.now()}


def run(*faults: Any, **options: Any) -> Any:
    return simulate(
        lambda: attempt(**options), workers=3, network=NETWORK, compute=Compute(1.0), faults=faults
    )


def test_a_killed_worker_is_noticed() -> None:
    """Killed in the fourth step; the others fail in the mean at its end."""
    found = run(Kill(worker=1, at="3.5 s"))
    assert found.results[1] is None
    for rank in (0, 2):
        one = found.results[rank]
        assert one["error"] is CommunicationError
        assert "lost the connection to rank 1" in one["text"]
        assert f"rank {rank}: mean of the gradients failed" in one["text"]
        assert one["steps"] == 3
        # set-up and three means take milliseconds; the failed sum was begun after the loss
        assert 4 + NOTICE_SECONDS <= one["seconds"] < 4 + NOTICE_SECONDS + 0.1
    assert found.stats[1].steps == 3


def test_a_loss_fails_pending_operations_when_it_is_noticed() -> None:
    """A waiting worker fails ``NOTICE_SECONDS`` after the loss."""
    found = run(Kill(worker=1, at="3.5 s"), Pause(worker=1, at="2.5 s", seconds="2 s"))
    for rank in (0, 2):
        assert found.results[rank]["seconds"] == pytest.approx(3.5 + NOTICE_SECONDS)


@pytest.mark.parametrize("kind", [Pause, Cut])
def test_a_silent_worker_is_noticed_after_the_time_out(kind: Any) -> None:
    """The first wait for it lasts ``timeout_seconds``."""
    found = run(kind(worker=1, at="3.5 s", seconds="30 s"))
    for rank in (0, 2):
        one = found.results[rank]
        assert one["error"] is CommunicationTimeout
        assert "timeout_seconds=5" in one["text"]
        assert 9 <= one["seconds"] < 9.1


@pytest.mark.parametrize("kind", [Pause, Cut])
def test_a_short_silence_only_delays(kind: Any) -> None:
    """Shorter than the time-out: no worker fails."""
    ends = [run(*faults).seconds for faults in ([], [kind(worker=1, at="3.5 s", seconds="2 s")])]
    assert 1.0 < ends[1] - ends[0] < 2.1


def test_a_newcomer_times_out_if_no_worker_regroups() -> None:
    """Without elastic training the others do not admit it."""
    found = run(Join(at="2 s"), timeout_seconds=3.0)
    assert [one["error"] for one in found.results[:3]] == [None] * 3
    assert "no worker has answered" in str(found.results[3])


def test_faults_must_name_existing_workers() -> None:
    """Workers that join exist as well."""
    with pytest.raises(ValueError, match="there are 3 workers"):
        run(Kill(worker=3, at=1.0))
    with pytest.raises(TypeError, match="Kill, Pause, Cut or Join"):
        run("kill")
    with pytest.raises(ValueError, match="seconds"):
        Pause(worker=0, at=0.0, seconds=-1.0)


def test_newcomers_get_the_next_ranks() -> None:
    """They share no process group with the others."""

    def worker() -> tuple[int, int]:
        return dist.get_rank(), dist.get_world_size()

    found = simulate(worker, workers=2, faults=[Join(at=0.5)])
    assert found.results == [(0, 2), (1, 2), (2, 3)]


def computing(reports: Sequence[float]) -> float:
    """Report progress of one step. Return its virtual seconds on rank 0."""
    model = torch.nn.Linear(2, 1)
    sync = offbeat.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), offbeat.BSP())
    start = float(sync._host.now())
    for progress in reports:
        sync._host.computed(progress)
    seconds = sync._host.now() - start
    sync.detach()
    return seconds


@pytest.mark.parametrize(
    ("faults", "reports", "seconds"),
    [
        ([], (0.5, 0.3, 0.5, 1.0), 10),  # a repeated backward pass
        ([(2, 3)], (1.0,), 13),  # within the step
        ([(9, 5)], (1.0,), 15),  # ends after the step would have
        ([(2, 3), (4, 2), (12, 1)], (0.5, 1.0), 15),  # two overlap: 2 to 6, and 12 to 13
        ([(20, 1)], (1.0,), 10),  # after the step
    ],
)
def test_a_pause_prolongs_a_step(
    faults: list[tuple[float, float]], reports: Sequence[float], seconds: float
) -> None:
    """A step of 10 s is computed once, and not in a pause."""
    pauses = [Pause(worker=0, at=at, seconds=length) for at, length in faults]
    found = simulate(
        partial(computing, reports), workers=2, compute=Compute(10.0), network=NETWORK,
        faults=pauses,
    )  # fmt: skip
    assert found.results[0] == pytest.approx(seconds)
