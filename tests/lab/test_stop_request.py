"""All workers save after one step, which none of them has passed."""

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import CommunicationTimeout
from offbeat_lab.launch.stop_request import StopRequest

SOON: Any = {"last": 9, "seconds": 0.1}


def test_all_workers_stop_at_the_furthest_step_that_one_has_begun(tmp_path: Path) -> None:
    """Workers may be far apart; the one behind continues until it is there."""
    ahead, behind, asking = (StopRequest(tmp_path / "stop", 2) for _ in range(3))
    assert [ahead.may_continue(0, step, **SOON) for step in range(4)] == [True] * 4  # at step 4 now
    assert behind.may_continue(1, 0, **SOON)
    assert asking.request(1) == 4
    assert not ahead.may_continue(0, 4, **SOON)
    assert [behind.may_continue(1, step, **SOON) for step in (1, 2, 3, 4)] == [
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("ended", [False, True])
def test_a_request_before_the_start_or_after_the_end_is_declined(
    ended: bool, tmp_path: Path
) -> None:
    """A worker that is finishing would not save."""
    worker, asking = (StopRequest(tmp_path / "stop", 2) for _ in range(2))
    if ended:
        assert worker.may_continue(0, 9, **SOON)
    assert asking.request(1) is None
    assert worker.may_continue(1, 3, **SOON)


def test_a_held_lock_times_out(tmp_path: Path) -> None:
    """Another worker may be suspended while it holds the lock."""
    path = tmp_path / "stop"
    asking = StopRequest(path, 1)
    assert asking.may_continue(0, 3, **SOON)
    held = os.open(path, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert asking.request(0.1) is None
    with pytest.raises(CommunicationTimeout, match=r"rank 0: another .* step 4 .*--timeout"):
        asking.may_continue(0, 4, **SOON)
    os.close(held)
    assert asking.request(0.1) == 4
