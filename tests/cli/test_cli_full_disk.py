"""The command line on a disk that is really full: one line names the file or the reason."""

import errno
from pathlib import Path

import pytest

from cells import some
from cli.commands import Call
from cli.test_cli_reports import SAVED
from disks import fill, small_disk
from offbeat.simulate import Simulation
from offbeat_lab import report
from offbeat_lab.cli import runs
from offbeat_lab.launch.runners import VirtualCluster
from offbeat_lab.results import Result, read_results

VIRTUAL = ("--step-time", "20ms", "-n", "2")
RUN = Simulation(1.0, [], [], 0.0, [], [], {})


def test_results_that_do_not_fit_are_one_line(call: Call, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        argv = ("compare", "digits", "-s", "bsp", "--simulate", "--step-time", "20ms")
        out = disk / "out"
        out.mkdir()
        fill(disk)
        code, _, err = call(*argv, "-n", "2", "--epochs", "0.05", "--output", str(out))
    assert (code, err) == (2, f"error: {out}/results.jsonl: No space left on device\n")


FILES = ["table.md", "plot.png", "report.html", "page.html", "simulation.json"]


@pytest.mark.parametrize("name", some(FILES, 0, 4))
def test_a_file_that_does_not_fit_is_named(
    name: str, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Writing fails without a name, as on a full disk. The run itself is not needed."""
    result = read_results(SAVED)

    def compare(*_: object, runner: VirtualCluster, **__: object) -> list[Result]:
        runner.last = RUN
        return result

    monkeypatch.setattr(runs.comparison, "compare", compare)
    monkeypatch.setattr(Simulation, "plot", lambda *_: None)

    def full(path: Path, *_: object, **__: object) -> None:
        if Path(path).name == name:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    monkeypatch.setattr(report, "plot", lambda results, path: full(path))
    argv = {
        "page.html": ("report", str(SAVED), "-o", str(tmp_path / name)),
    }.get(name, ("compare", "digits", "-s", "bsp", "--simulate", *VIRTUAL, "-o", str(tmp_path)))
    code, _, err = call(*argv)
    assert (code, err) == (2, f"error: {tmp_path / name}: No space left on device\n")
