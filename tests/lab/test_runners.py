"""Runners: their descriptions, and results made of their events."""

import pytest

from offbeat import Compute, Network, Stats
from offbeat_lab.compare import run_and_record
from offbeat_lab.events import End, Evaluation, Event, Start
from offbeat_lab.job import Job
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


def test_a_result_is_made_of_the_events_of_any_runner() -> None:
    """A runner only has to run a job and pass on its events."""

    class Nowhere:
        simulated = False
        machine = "abacus"

        def __str__(self) -> str:
            return "nowhere"

        def run(self, job: Job, on_event: object) -> None:
            for event in told:
                on_event(event)  # type: ignore[operator]

    point = Evaluation(1, 0.5, 0.75, {"test accuracy": 0.75})
    told: list[Event] = [Start(1, 4), point, End((Stats(steps=1),))]
    heard: list[Event] = []
    result = run_and_record(Job("digits", "bsp", 1), heard.append, Nowhere())
    assert heard == told
    assert result.points == (point,)
    assert result.stats == (Stats(steps=1),)
    assert (result.link, result.machine, result.simulated) == ("nowhere", "abacus", False)
    assert (result.metric, result.target) == ("test accuracy", 0.985)
