"""Comparing strategies: the same seeds for all, files that agree, numbers that come again."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import OffbeatError
from offbeat.lab import compare as lab
from offbeat.lab import report
from offbeat.lab.train import Event, Job

STRATEGIES = ("bsp", "local:period=4")
STEPS = 23  # 1437 images once, by 2 workers with batches of 32
LIMIT = 90.0


@dataclass
class Compared:
    """What ``offbeat compare`` left behind."""

    out: str
    folder: Path
    results: list[dict[str, Any]]


def offbeat_compare(folder: Path, *strategies: str) -> Compared:
    argv = [sys.executable, "-m", "offbeat.cli", "compare", "digits", "-n", "2", "--epochs", "1"]
    for strategy in strategies:
        argv += ["-s", strategy]
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
        **{"COLUMNS": "200", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
    }
    done = subprocess.run(  # kills the process at the limit, and its workers go with it
        [*argv, "--seed", "5", "--output", str(folder)],
        capture_output=True,
        encoding="utf-8",
        env=environment,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return Compared(done.stdout, folder, [json.loads(line) for line in lines])


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """A real comparison of two strategies."""
    return offbeat_compare(tmp_path_factory.mktemp("compared") / "a" / "b", *STRATEGIES)


def test_files_are_written_and_named(compared: Compared) -> None:
    """Results, table, plot and report exist, and the last lines printed say where."""
    names = {path.name for path in compared.folder.iterdir()}
    assert names == {"results.jsonl", "table.md", "plot.png", "report.html"}
    told = [line.split() for line in compared.out.splitlines()[-3:]]
    assert told == [
        ["table", str(compared.folder / "table.md")],
        ["plot", str(compared.folder / "plot.png")],
        ["report", str(compared.folder / "report.html")],
    ]


def test_plot_is_an_image(compared: Compared) -> None:
    """The PNG decodes to pixels, and they are not all alike."""
    from matplotlib import image

    pixels = image.imread(compared.folder / "plot.png")
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > 600
    assert pixels.std() > 0


def test_results_hold_the_whole_curve(compared: Compared) -> None:
    """Each strategy once, in the order asked for; points rise in step and time up to the end."""
    assert [one["strategy"] for one in compared.results] == list(STRATEGIES)
    for one in compared.results:
        points = one["points"]
        assert [point["step"] for point in points] == list(range(1, STEPS + 1))
        seconds = [point["seconds"] for point in points]
        assert seconds == sorted(seconds)
        assert seconds[0] > 0
        assert one["final"] == points[-1]["metric"]
        assert one["seconds"] == points[-1]["seconds"]
        assert one["simulated"] is False
        assert one["link"] == "loopback"


def test_results_hold_the_mean_of_the_workers(compared: Compared) -> None:
    """LSSR, bytes and idle share are means over both workers; BSP never skips, local mostly."""
    for one in compared.results:
        assert len(one["stats"]) == 2
        for key in ("lssr", "payload_bytes", "idle"):
            assert one[key] == pytest.approx(sum(worker[key] for worker in one["stats"]) / 2)
        assert {worker["steps"] for worker in one["stats"]} == {STEPS}
        assert 0 <= one["idle"] <= 1
    bsp, local = compared.results
    assert bsp["lssr"] == 0
    assert 0.7 < local["lssr"] < 0.8  # 3 of 4 steps
    assert local["payload_bytes"] < 0.5 * bsp["payload_bytes"]


def test_table_and_results_agree(compared: Compared) -> None:
    """Every cell of table.md is that of the JSON lines, and so is every cell printed."""
    lines = (compared.folder / "table.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert lines[0] == report.caption(compared.results)
    assert tuple(cells[0]) == report.HEADINGS
    assert len(cells) == 2 + len(compared.results)
    for row, one in zip(cells[2:], compared.results, strict=True):
        told = dict(zip(report.HEADINGS, row, strict=True))
        assert told["strategy"] == f"`{one['strategy']}`"
        assert told["final"] == f"{one['final']:.4f}"
        assert told["training time"] == f"{one['seconds']:.1f} s"
        assert told["LSSR"] == f"{one['lssr']:.2f}"
        assert told["idle"] == f"{100 * one['idle']:.0f} %"
        assert told["sent per worker"] == f"{one['payload_bytes'] / 1e6:.1f} MB"
        assert told["time to target"] == "not reached"  # one epoch is too short for 0.985
        printed = [line.split() for line in compared.out.splitlines()]
        assert " ".join([one["strategy"], *row[1:]]).split() in printed


def test_strategies_share_seed_model_and_data_order(compared: Compared) -> None:
    """After one step the mean model is the same under both strategies, so the metric is too."""
    bsp, local = compared.results
    assert bsp["job"] == {**local["job"], "strategy": "bsp"}
    assert bsp["job"]["seed"] == 5
    # The mean of the models after one step each is the step of the mean gradient, up to rounding
    # and BatchNorm's statistics: at most a few of the 360 test images fall differently.
    assert abs(bsp["points"][0]["metric"] - local["points"][0]["metric"]) <= 3 / 360


def test_results_come_again(compared: Compared, tmp_path: Path) -> None:
    """The same run twice: the same metric at every point and the same bytes; only times differ."""
    again = offbeat_compare(tmp_path, "bsp").results[0]
    once = compared.results[0]
    for one in (once, again):
        one["curve"] = [(point["step"], point["metric"]) for point in one["points"]]
    for key in ("job", "curve", "final", "lssr", "payload_bytes", "flag_rate", "metric", "target"):
        assert once[key] == again[key], key


# Without processes: events written by hand


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs run from here on; each ends after one evaluation, the fourth fails."""
    seen: list[Job] = []

    def run_job(job: Job, on_event: Callable[[Event], None], cluster: object = None) -> None:
        seen.append(job)
        if len(seen) == 4:
            raise OffbeatError("worker 1 was ended by SIGKILL")
        on_event({"event": "start", "steps": 1, "model_bytes": 4})
        on_event({"event": "evaluation", "step": 1, "seconds": 0.5, "metric": 0.5, "metrics": {}})
        keys = ("lssr", "payload_bytes", "idle", "flags", "steps")
        on_event({"event": "end", "stats": [{**dict.fromkeys(keys, 0), "details": {}}]})

    monkeypatch.setattr(lab, "run_job", run_job)
    return seen


def compare(output: Path, strategies: tuple[str, ...], seeds: int) -> list[dict[str, Any]]:
    return lab.compare(
        Job("digits", strategies[0], 2, seed=7),
        strategies,
        seeds=seeds,
        output=output,
        on_start=lambda job: None,
        on_event=lambda event: None,
    )


def test_seeds_are_the_outer_loop(jobs: list[Job], tmp_path: Path) -> None:
    """All strategies run with one seed before the next seed begins, counted from --seed."""
    results = compare(tmp_path, ("bsp", "local:period=2", "async"), seeds=1)
    assert [(job.seed, job.strategy) for job in jobs] == [
        (7, "bsp"),
        (7, "local:period=2"),
        (7, "async"),
    ]
    assert [one["strategy"] for one in results] == [job.strategy for job in jobs]
    del jobs[:]
    with pytest.raises(OffbeatError):
        compare(tmp_path, ("bsp", "async"), seeds=2)
    assert [(job.seed, job.strategy) for job in jobs] == [
        (7, "bsp"),
        (7, "async"),
        (8, "bsp"),
        (8, "async"),
    ]


def test_a_failed_run_leaves_the_earlier_results(jobs: list[Job], tmp_path: Path) -> None:
    """When a run fails, the results before it are on disk, whole."""
    with pytest.raises(OffbeatError, match="worker 1 was ended by SIGKILL"):
        compare(tmp_path, ("bsp", "async"), seeds=3)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    assert [(one["job"]["seed"], one["strategy"]) for one in told] == [
        (7, "bsp"),
        (7, "async"),
        (8, "bsp"),
    ]
