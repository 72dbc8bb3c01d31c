"""A worker that sees others join and die keeps no thread, descriptor or memory of them."""

from pathlib import Path

import pytest
from benchmarks.launched.availability import grown

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def test_a_survivor_of_six_view_changes_leaks_nothing() -> None:
    """Four changes after the first count."""
    more = grown(6)
    assert more["threads"] <= 1
    assert more["descriptors"] <= 1
    assert more["kilobytes"] < 6000
