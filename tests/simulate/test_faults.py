"""Faults of simulated workers: what the others see, and when, by hand."""

from typing import Any

import pytest
import torch

import offbeat
from offbeat import Compute, Network, simulate
from offbeat.errors import CommunicationError, CommunicationTimeout
from offbeat.simulate import Join, Kill
from offbeat.simulate.connections import NOTICE_SECONDS

NETWORK = Network("1Gbit/s", latency="1ms")
EVEN = Compute(1.0)


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


def run(*faults: Any, compute: Compute = EVEN, **options: Any) -> Any:
    return simulate(
        lambda: attempt(**options), workers=3, network=NETWORK, compute=compute, faults=faults
    )


def test_a_killed_worker_is_noticed() -> None:
    """Killed in the fourth step; the others fail in the mean at its end."""
    found = run(Kill(worker=1, at="3.5 s"))
    assert found.results[1] is None
    for rank in (0, 2):
        one = found.results[rank]
        assert one["error"] is CommunicationError
        assert "lost the connection to rank 1" in one["text"]
        assert f"rank {rank}: agreement on the mean of the gradients failed" in one["text"]
        assert one["steps"] == 3
        # set-up and three means take milliseconds; the failed sum was begun after the loss
        assert 4 + NOTICE_SECONDS <= one["seconds"] < 4 + NOTICE_SECONDS + 0.1
    assert found.stats[1].steps == 3


SLOW = Compute(1.0, slowdown=lambda rank, step, _: 30.0 if (rank, step) == (1, 3) else 1.0)


@pytest.mark.parametrize(
    ("at", "error", "text", "seconds"),
    [
        (
            "4.5 s",
            CommunicationError,
            "lost the connection to rank 1",
            pytest.approx(4.5 + NOTICE_SECONDS),
        ),
        ("20 s", CommunicationTimeout, "timeout_seconds=5", pytest.approx(9.05, abs=0.05)),
    ],
)
def test_waiting_workers_notice_a_lost_or_silent_one(
    at: str, error: type[Exception], text: str, seconds: Any
) -> None:
    """``NOTICE_SECONDS`` after the loss, or when the first wait has lasted ``timeout_seconds``."""
    found = run(Kill(worker=1, at=at), compute=SLOW)
    for rank in (0, 2):
        one = found.results[rank]
        assert one["error"] is error
        assert text in one["text"]
        assert one["seconds"] == seconds


def test_a_newcomer_times_out_if_no_worker_regroups() -> None:
    """Without elastic training the others do not admit it."""
    found = run(Join(at="2 s"), timeout_seconds=3.0)
    assert [one["error"] for one in found.results[:3]] == [None] * 3
    text = found.results[3]["text"]
    assert "worker 3: joining the training failed: no answer" in text
    assert "timeout_seconds=3" in text


def test_faults_must_name_existing_workers() -> None:
    """Workers that join exist as well."""
    with pytest.raises(ValueError, match="there are 3 workers"):
        run(Kill(worker=3, at=1.0))
    with pytest.raises(TypeError, match="Kill or Join"):
        run("kill")
