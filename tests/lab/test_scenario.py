"""Scenarios: reading their files, and runs in which speeds and bandwidths change."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import offbeat
from lab.test_cluster import needs_namespaces
from offbeat import Compute, Network, simulate
from offbeat.errors import OffbeatError
from offbeat_lab.events import Event, Start, to_json
from offbeat_lab.job import Job
from offbeat_lab.launch import runners
from offbeat_lab.launch.cluster import _run
from offbeat_lab.launch.processes import Change, _Run
from offbeat_lab.launch.runners import ShapedLinks
from offbeat_lab.scenario import Process, Scenario, ScenarioEvent, value_at

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
        ("event = 3", r"it must have one or more tables \[\[event\]\]"),
        ("event = [3]", r"event 1: must be a table \[\[event\]\], got 3"),
        ("[[events]]\nat = 1", r"unknown key 'events'; it consists of tables \[\[event\]\]"),
        ("[[event]]\nspeed = 1", 'event 1: without "at", the time of the event'),
        ("[[event]]\nat = 1\nworker = 0", "event 1: changes nothing: give speed, bandwidth, die"),
        ("[[event]]\nat = 1\nspede = 2", r"unknown key 'spede' \(did you mean 'speed'\?\)"),
        ("[[event]]\nat = 'soon'\nspeed = 1", "event 1: 'soon' is not a duration"),
        ("[[event]]\nat = -1\nspeed = 1", "event 1: -1 is not a duration"),
        ("[[event]]\nat = 1\nspeed = 0", "speed must be positive .*0.5: half as fast"),
        ("[[event]]\nat = 1\nspeed = '2'", "speed must be a number, got '2'"),
        ("[[event]]\nat = 1\nspeed = nan", "speed must be positive"),
        ("[[event]]\nat = 1\nbandwidth = '10MB'", "event 1: '10MB' is not a bandwidth"),
        (
            "[[event]]\nat = 1\nspeed = 1\nworker = 2",
            "worker 2 does not exist then: .* 0 to 1",
        ),
        ("[[event]]\nat = 1\nspeed = 1\nworker = -1", "worker must be at least 0, got -1"),
        ("[[event]]\nat = 1\nspeed = 1\nworker = 0.5", "worker must be an integer"),
        (
            "[[event]]\nat = 1\nspeed = 1\n[[event]]\nat = 2\ndie = true",
            "event 2: die = true needs worker = RANK, and nothing else",
        ),
        ("[[event]]\nat = 1\ndie = true\nworker = 0\nspeed = 1", "and nothing else"),
        ("[[event]]\nat = 1\ndie = true\nworker = 0\njoin = true", "and nothing else"),
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


# -- virtual time ----------------------------------------------------------------------------------


def steps_alone(steps: int) -> list[float]:
    """Train without communication; return the virtual times of the ends of the steps."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = offbeat.attach(model, optimizer, offbeat.LocalSGD(period=1000))
    times, start = [], sync._host.now()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        times.append(sync._host.now() - start)
    return times


def test_speeds_change_in_virtual_time() -> None:
    """Steps of 1 s: worker 1 takes 2 s from 2.5 s, and 0.5 s from 8 s. What has started goes on.

    The forward pass and the backward pass are computed one after the other. The step from 2 to 3 s
    is in its backward pass at 2.5 s, and the step from 7 to 9 s at 8 s.
    """
    changes = {2.5: {1: 2.0}, 8.0: {1: 0.5}}
    compute = Compute("1s", slowdown=lambda rank, _, now: value_at(changes, rank, now, 1.0))
    usual, changed = simulate(
        lambda: steps_alone(8), workers=2, network=Network(1e12, latency=0), compute=compute
    ).results
    assert usual == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8], abs=1e-6)
    assert changed == pytest.approx([1, 2, 3, 5, 7, 9, 9.5, 10], abs=1e-6)


def message_times() -> list[float]:
    """Send 4 kB three times to each of two workers; return the times of arrival."""
    communicator: Any = dist.group.WORLD.make_communicator(60.0)  # type: ignore[union-attr]
    times = []
    for _ in range(3):
        if communicator.rank == 0:
            for rank in (1, 2):
                communicator.send(torch.zeros(1_000), destination=rank, what="part").wait()
        else:
            communicator.receive(torch.zeros(1_000), source=0, what="part").wait()
        times.append(communicator.host.now())
    return times


def test_bandwidths_of_single_links_change_in_virtual_time() -> None:
    """4 kB take 4 ms at 8 Mbit/s, and 8 ms to worker 2 from 10 ms on, at 4 Mbit/s.

    Worker 0 sends the next message when the last one has arrived.
    """
    network = Network(lambda rank, now: value_at({0.010: {2: 4e6}}, rank, now, 8e6), latency=0.0)
    _, one, two = simulate(message_times, workers=3, network=network).results
    assert one == pytest.approx([0.004, 0.012, 0.024])
    assert two == pytest.approx([0.008, 0.020, 0.032])


# -- real processes --------------------------------------------------------------------------------


class Sleeper:
    """A worker process that takes 0.3 s."""

    def __init__(self) -> None:
        self._end = time.monotonic() + 0.3

    @property
    def exitcode(self) -> int | None:
        return None if time.monotonic() < self._end else 0


def wait(changes: Sequence[Change], folder: Path) -> list[tuple[Event, float]]:
    """Wait for a worker that takes 0.3 s and has written the event ``Start``.

    Return the events and the times of their arrival.
    """
    seen: list[tuple[Event, float]] = []
    read, write = multiprocessing.Pipe(duplex=False)
    with read, write:
        os.write(write.fileno(), f"{to_json(Start(2, 4))}\n".encode())
        job = Job("digits", "bsp", 1)
        run = _Run(job, read, lambda one: seen.append((one, time.monotonic())), str(folder), None)
        run._workers.append(cast(Any, Sleeper()))
        run.wait(changes)
    return seen


def test_changes_are_made_at_their_times(tmp_path: Path) -> None:
    """Times count from the event Start. Changes that are not due at the end are dropped."""
    done: list[tuple[str, float]] = []

    def change(name: str) -> Callable[[], None]:
        return lambda: done.append((name, time.monotonic()))

    changes = [(60.0, change("never")), (0.1, change("soon")), (0.0, change("now"))]
    ((event, start),) = wait(changes, tmp_path)
    assert event == Start(2, 4)
    assert [name for name, _ in done] == ["now", "soon"]
    assert done[1][1] - start >= 0.1


def test_the_error_of_a_change_ends_the_run(tmp_path: Path) -> None:
    def fail() -> None:
        raise OffbeatError("tc failed")

    with pytest.raises(OffbeatError, match="tc failed"):
        wait([(0.0, fail)], tmp_path)


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
