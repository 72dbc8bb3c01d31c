"""Options of the test suite."""

from collections import Counter

import pytest

import worlds


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
    """Of a grid that is sampled, half is nightly: by the parity of the bits of a cell's number.

    So a factor with two values has both in what is left, wherever it stands.
    """
    seen: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("sampled"):
            name = item.nodeid.partition("[")[0]
            if seen[name].bit_count() % 2:
                item.add_marker(pytest.mark.nightly)
            seen[name] += 1
