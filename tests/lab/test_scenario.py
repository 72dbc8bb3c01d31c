"""Scenarios: reading their files, and runs in which speeds and bandwidths change."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.test_cluster import needs_namespaces
from offbeat_lab.job import Job
from offbeat_lab.launch import runners
from offbeat_lab.launch.cluster import _run
from offbeat_lab.launch.processes import Change
from offbeat_lab.launch.runners import ShapedLinks
from offbeat_lab.scenario import Process, Scenario, ScenarioEvent

MEMBERS = """
[[event]]
at = 4
join = true
speed = 0.5

[[event]]
at = 2
worker = 1
die = true

[[event]]
at = 6
worker = 1
join = true

[[event]]
at = 7
worker = 3
die = true

[[event]]
at = 1
worker = 1
bandwidth = "1Mbit/s"

[[event]]
at = 8
speed = 2
"""

FILE = """
[[event]]
at = "1min"
worker = 2
speed = 0.5
bandwidth = "10Mbit/s"

[[event]]
at = 20
speed = 2

[[event]]
at = 20.0
worker = 1
speed = 4
"""


def written(text: str, folder: Path) -> Path:
    path = folder / "scenario.toml"
    path.write_text(text, encoding="utf-8")
    return path


# -- files -----------------------------------------------------------------------------------------


def test_a_file_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    """A later event at the same time replaces the values of an earlier one."""
    scenario = Scenario.read(written(FILE, tmp_path), workers=3)
    assert scenario.events == (
        ScenarioEvent(20.0, speed=2.0),
        ScenarioEvent(20.0, worker=1, speed=4.0),
        ScenarioEvent(60.0, worker=2, speed=0.5, bandwidth=1e7),
    )
    assert scenario.slowdowns(3) == {20.0: {0: 0.5, 1: 0.25, 2: 0.5}, 60.0: {2: 2.0}}
    assert scenario.bandwidths(3) == {60.0: {2: 1e7}}
    assert Scenario.from_json(str(scenario)) == scenario
    assert Scenario.from_json(None) == Scenario()


def test_each_process_has_the_speed_and_bandwidth_of_its_worker(tmp_path: Path) -> None:
    """Worker 1 dies and comes back as rank 4. A further worker has number 3, and also rank 3."""
    scenario = Scenario.read(written(MEMBERS, tmp_path), workers=3)
    assert scenario.elastic
    assert scenario.processes(3) == [
        Process(0),
        Process(1, end=2.0),
        Process(2),
        Process(3, start=4.0, end=7.0),
        Process(1, start=6.0),
    ]
    assert scenario.bandwidths(3) == {1.0: {1: 1e6, 4: 1e6}}
    assert scenario.changes("bandwidth", 3) == {1.0: {1: 1e6}}
    assert scenario.slowdowns(3) == {4.0: {3: 2.0}, 8.0: dict.fromkeys(range(5), 0.5)}
    assert scenario.by_rank({0: 5.0, 1: 7.0}, 3) == {0: 5.0, 1: 7.0, 4: 7.0}
    assert Scenario.from_json(str(scenario)) == scenario
    assert not Scenario.read(written(FILE, tmp_path), workers=3).elastic


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[event]", "not TOML: .*line 1"),
        ("", r"it must have one or more tables \[\[event\]\]"),
        ("event = [3]", r"event 1: must be a table \[\[event\]\], got 3"),
        ("[[events]]\nat = 1", r"unknown key 'events'; it consists of tables \[\[event\]\]"),
        ("[[event]]\nspeed = 1", 'event 1: without "at", the time of the event'),
        ("[[event]]\nat = 1\nworker = 0", "event 1: changes nothing: give speed, bandwidth, die"),
        ("[[event]]\nat = 1\nspede = 2", r"unknown key 'spede' \(did you mean 'speed'\?\)"),
        ("[[event]]\nat = 'soon'\nspeed = 1", "event 1: 'soon' is not a duration"),
        ("[[event]]\nat = 1\nspeed = 0", "speed must be positive .*0.5: half as fast"),
        ("[[event]]\nat = 1\nbandwidth = '10MB'", "event 1: '10MB' is not a bandwidth"),
        (
            "[[event]]\nat = 1\nspeed = 1\nworker = 2",
            "worker 2 does not exist then: .* 0 to 1",
        ),
        ("[[event]]\nat = 1\nspeed = 1\nworker = -1", "worker must be at least 0, got -1"),
        (
            "[[event]]\nat = 1\nspeed = 1\n[[event]]\nat = 2\ndie = true",
            "event 2: die = true needs worker = RANK, and nothing else",
        ),
        ("[[event]]\nat = 1\ndie = true\nworker = 0\nspeed = 1", "and nothing else"),
        ("[[event]]\nat = 1\njoin = false", "event 1: join must be true, got False"),
        ("[[event]]\nat = 1\njoin = true\nworker = 1", "event 1: worker 1 is alive then"),
        ("[[event]]\nat = 1\njoin = true\nworker = 2", "event 1: worker 2 does not exist then"),
        (
            "[[event]]\nat = 9\njoin = true\n[[event]]\nat = 2\ndie = true\nworker = 2",
            "event 2: worker 2 does not exist then",
        ),
        (
            "[[event]]\nat = 2\ndie = true\nworker = 1\n[[event]]\nat = 1\ndie = true\nworker = 1",
            "event 1: worker 1 is dead then",
        ),
        (
            "[[event]]\nat = 2\ndie = true\nworker = 1\n[[event]]\nat = 1\ndie = true\nworker = 0",
            "event 1: no worker is left",
        ),
    ],
)
def test_malformed_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    """The error names the file, the event and what is allowed."""
    path = written(text, tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        Scenario.read(path, workers=2)
    assert str(caught.value).startswith(f"scenario {path}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"scenario .*nowhere\.toml: No such file or directory"):
        Scenario.read(tmp_path / "nowhere.toml", workers=2)


# -- real processes --------------------------------------------------------------------------------


@needs_namespaces
def test_single_links_are_reshaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of the link of worker 1 change, and change back after the run."""

    def rates(links: ShapedLinks) -> list[int]:
        ends = [(links.node(rank), links.interface) for rank in range(2)]
        ends += [(links._switch, f"port{rank}") for rank in range(2)]
        shown = (_run("tc", "-n", one, "-j", "qdisc", "show", "dev", dev) for one, dev in ends)
        return [json.loads(text)[0]["options"]["rate"] for text in shown]

    def train(job: Job, on_event: object, links: ShapedLinks, changes: Sequence[Change]) -> None:
        for seconds, change in changes:
            assert seconds == 3.0
            change()
        seen.append(rates(links))

    seen: list[list[int]] = []
    monkeypatch.setattr(runners, "run_job", train)
    with ShapedLinks(2, 8e6, changes={3.0: {1: 4e6}}) as links:
        assert rates(links) == [1_000_000] * 4  # bytes
        links.run(Job("digits", "bsp", 2), lambda event: None)
        assert rates(links) == [1_000_000] * 4
    assert seen == [[1_000_000, 500_000] * 2]


def test_rates_of_changed_links_are_checked() -> None:
    with pytest.raises(ValueError, match="links can be shaped to between 1 kbit/s and 1 Tbit/s"):
        ShapedLinks(2, 1e9, changes={1.0: {0: 1.0}})
