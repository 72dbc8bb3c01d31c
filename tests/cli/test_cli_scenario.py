"""Scenarios on the command line, in virtual time and on real processes."""

import json
from pathlib import Path

import pytest

from cli.commands import Call, one_line

SHORT = ("--workers", "2", "--max-steps", "6", "--evaluations", "1", "--seed", "3")
SLOWER = '[[event]]\nat = "50ms"\nworker = 1\nspeed = 0.25\n'
MEMBERS = """
[[event]]
at = "50ms"
worker = 1
die = true

[[event]]
at = "100ms"
join = true
"""
LINK = '[[event]]\nat = 0\nworker = 1\nbandwidth = "1Mbit/s"\n'


def written(text: str, folder: Path) -> Path:
    path = folder / "scenario.toml"
    path.write_text(text, encoding="utf-8")
    return path


def seconds_of(folder: Path) -> float:
    (line,) = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return float(json.loads(line)["points"][-1]["seconds"])


def test_compare_with_a_scenario_in_virtual_time(call: Call, tmp_path: Path) -> None:
    """Six steps of 20 ms: from the fourth step on, worker 1 needs 80 ms, and all wait for it."""
    usual = ("compare", "digits", "-s", "bsp", *SHORT, "--simulate", "--step-time", "20ms")
    usual = (*usual, "--bandwidth", "1Tbit/s", "--latency", "0s")
    path = written(SLOWER, tmp_path)
    argv = (*usual, "--scenario", str(path), "--output", str(tmp_path / "a"))
    code, out, err = call(*argv)
    assert (code, err) == (0, "")
    assert "scenario of 1 event" in one_line(out)
    assert seconds_of(tmp_path / "a") == pytest.approx(3 * 0.02 + 3 * 0.08, rel=0.01)
    code, out, _ = call(*argv)
    assert code == 0
    assert "runs in the results already: 1 of 1" in out
    written(SLOWER.replace("0.25", "0.5"), tmp_path)
    code, _, err = call(*argv)
    assert code != 0
    assert "is of another comparison, with scenario=" in one_line(err)


def test_a_scenario_changes_a_link(call: Call, tmp_path: Path) -> None:
    """The link of one of two workers has 1 Mbit/s: an all-reduce of 0.6 MB then takes 4.85 s.

    There are six of gradients, and the final mean of the models.
    """
    path, folder = written(LINK, tmp_path), tmp_path / "a"
    argv = ("compare", "digits", "-s", "bsp", "--simulate", "--step-time", "1ms", *SHORT)
    assert call(*argv, "--scenario", str(path), "--output", str(folder))[0] == 0
    found = json.loads((folder / "simulation.json").read_text(encoding="utf-8"))
    assert found["stats"][0]["wait_seconds"] == pytest.approx(7 * 4 * 151_498 * 8 / 1e6, rel=0.02)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (MEMBERS, ("--partition", "leased", "-s", "ideal"), "ideal needs --step-time, as in 50ms"),
        (SLOWER, (), "speeds in a --scenario change the step time: give --step-time"),
        (LINK, ("--step-time", "20ms"), "changes bandwidths: give --bandwidth, the one at the"),
        (LINK, ("--simulate", "--workers-per-node", "2"), "the workers of a node share its link"),
        (SLOWER.replace("1", "7"), ("--simulate",), "event 1: worker 7 does not exist"),
    ],
)
def test_mistakes_on_the_command_line(
    text: str, options: tuple[str, ...], message: str, call: Call, tmp_path: Path
) -> None:
    path = written(text, tmp_path)
    code, _, err = call("compare", "digits", "-s", "bsp", *SHORT, "--scenario", str(path), *options)
    assert code != 0
    assert message in one_line(err)


def test_deaths_and_joins_are_refused_under_a_launcher(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    argv = ("compare", "digits", "-s", "bsp", *SHORT, "--partition", "leased")
    code, _, err = call(*argv, "--scenario", str(written(MEMBERS, tmp_path)))
    assert code != 0
    assert "--scenario with deaths or joins: start offbeat without a launcher" in one_line(err)
