"""Heartbeat connections: how they are accepted and closed."""

import gc
import os
import time
from collections.abc import Iterator

import pytest

from offbeat.elastic import heartbeats
from offbeat.elastic.heartbeats import HeartbeatConnections, find_unreachable

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Keep the garbage collector from closing descriptors of other tests meanwhile."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def there() -> Iterator[HeartbeatConnections]:
    """Return the heartbeat connections of a worker to which others connect."""
    made = HeartbeatConnections()
    yield made
    made.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def await_dead(here: HeartbeatConnections) -> frozenset[int]:
    """Return the workers that ``here`` finds dead within 10 s."""
    deadline = time.monotonic() + 10
    while not (dead := here.dead()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return dead


def test_any_number_of_connections_can_be_opened_and_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel keeps only a few connections that were not accepted, even if they are closed."""
    monkeypatch.setattr(heartbeats, "_BACKLOG", 2)
    there = HeartbeatConnections()
    before = descriptors()
    for _ in range(12):
        assert find_unreachable({1: there.address}) == []
        assert there.dead() == set()
    assert there.dead() == set()
    assert descriptors() == before
    there.close()
    assert descriptors() == before - 1


@pytest.mark.parametrize("accepted", [True, False])
def test_connections_end_with_the_worker(there: HeartbeatConnections, accepted: bool) -> None:
    before, here = descriptors(), HeartbeatConnections()
    assert here.connect({1: there.address}) == []
    if accepted:
        there.dead()
        assert descriptors() == before + 3  # the listener of ``here``, and one socket at each end
    assert here.dead() == set()
    there.close()
    assert await_dead(here) == {1}
    here.close()
    assert descriptors() == before - 1


def test_the_accepting_worker_keeps_its_connection_until_the_other_one_ends(
    there: HeartbeatConnections,
) -> None:
    before, here = descriptors(), HeartbeatConnections()
    assert here.connect({1: there.address}) == []
    for _ in range(3):
        assert there.dead() == set()
    assert here.dead() == set()
    here.close()
    deadline = time.monotonic() + 10
    while descriptors() > before and time.monotonic() < deadline:
        there.dead()
    assert descriptors() == before
