"""Options of the test suite."""

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
