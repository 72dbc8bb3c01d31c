"""Options of the test suite."""

import logging
import os
import threading
import time
from collections import Counter

import pytest

import worlds

try:
    from hypothesis import settings
except ImportError:  # an environment for tests/frameworks alone
    pass
else:
    every = settings(deadline=None, derandomize=True, database=None)
    settings.register_profile("default", every, max_examples=30)
    settings.register_profile("nightly", every, max_examples=300)
    settings.load_profile("default")


_lasting: set[str] = set()  # ids of the threads that belong to libraries, not to Python


def _wait_for_ending_threads() -> None:
    """Wait, for at most 0.2 s, until the threads have ended that have ended for Python already.

    Such a thread may still free memory of MKL and hold a lock of it. A process forked then would
    wait for this lock in its first product of matrices, for ever.
    """
    if not os.path.isdir("/proc/self/task"):
        return
    deadline = time.monotonic() + 0.2
    while ending := (
        set(os.listdir("/proc/self/task"))
        - {str(thread.native_id) for thread in threading.enumerate()}
        - _lasting
    ):
        if time.monotonic() > deadline:
            _lasting.update(ending)
            return
        time.sleep(0.001)


os.register_at_fork(before=_wait_for_ending_threads)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--world",
        choices=["simulated", "gloo"],
        default="simulated",
        help="where tests of values run: on simulated workers, or on real processes",
    )


def pytest_configure(config: pytest.Config) -> None:
    worlds.world = config.getoption("--world")


@pytest.hookimpl(tryfirst=True)  # before the selection by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark half of each sampled grid as nightly: cells whose number has an odd number of set bits.

    The other half still has both values of every two-valued factor, wherever it stands.
    """
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("sampled"):
            name = item.nodeid.partition("[")[0]
            if seen[name].bit_count() % 2:
                item.add_marker(pytest.mark.nightly)
            seen[name] += 1


def pytest_unconfigure() -> None:
    """Silence the reports of trainings that tests leave unfinished, when Python exits."""
    logging.getLogger("offbeat").disabled = True
