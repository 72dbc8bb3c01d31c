"""Runners: their descriptions, and results made of their events."""

import pytest

from offbeat import Compute, Network
from offbeat_lab.launch.runners import (
    Loopback,
    Runner,
    ShapedLinks,
    VirtualCluster,
    describe_machine,
)


@pytest.mark.parametrize(
    ("runner", "text", "machine", "simulated"),
    [
        (Loopback(), "loopback", describe_machine(), False),
        (ShapedLinks(2, 1e8), "100 Mbit/s shaped links", describe_machine(), False),
        (
            VirtualCluster(Network("1Gbit/s", latency="50us"), Compute("5ms")),
            "1 Gbit/s, 50 us latency, 5 ms a step",
            "virtual time",
            True,
        ),
    ],
)
def test_a_result_describes_its_runner(
    runner: Runner, text: str, machine: str, simulated: bool
) -> None:
    """Link, machine and simulated are those of the runner."""
    assert (str(runner), runner.machine, runner.simulated) == (text, machine, simulated)
    assert machine.endswith(" cores") or simulated
