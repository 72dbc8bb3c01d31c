"""The race on real processes: its grid, its command line, and how it runs a cell."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.harness import RESULTS
from benchmarks.race import command, curves, methods, plots, real, settings
from benchmarks.race.simulated_results import CellTimes

from offbeat import Compute, Network
from offbeat.lab.job import Job
from offbeat.lab.launch.runners import VirtualCluster
from offbeat.lab.methods.peer import Peer
from offbeat.lab.results import read_results

ROOT = Path(__file__).parents[2]


def test_every_cell_and_method_is_a_job_that_could_run() -> None:
    """Each method by its text, packages and data apart; names are unique, files too."""
    names = [one.name for one in (*settings.CELLS, settings.TINY)]
    assert len(set(names)) == len(names) == 22
    for cell in settings.CELLS:
        job = cell.job(Path("data"))
        assert job.data in (None, f"data/{cell.workload.data}")
        assert job.recipe in ("mnist", "stdlib-lm", "benchmarks/models/cifar_wide.py")
        assert cell.runner is not None
    for text in settings.METHODS:
        one = Job("digits", "bsp", 4).under(text)
        assert one.strategy
    assert (
        len(
            {
                str(settings.path_of(one, track))
                for one in settings.CELLS
                for track in settings.TRACKS
            }
        )
        == 42
    )


def test_every_peer_and_our_diloco_are_raced() -> None:
    from offbeat.lab.methods.registry import BASELINES, parse_method

    raced = {type(parse_method(text.split()[0])) for text in settings.METHODS}
    assert {kind for kind in BASELINES.values() if issubclass(kind, Peer)} <= raced
    assert "fragments=4,overlap=" in methods.DILOCO
    assert methods.DILOCO.endswith("--wire int4")


def test_cells_are_chosen_by_name_or_part() -> None:
    assert [one.name for one in settings.select_cells(["lan"])] == [
        "cifar-lan",
        "mnist-lan",
        "lm-lan",
    ]
    assert settings.select_cells(["mnist-dsl", "mnist"])[0].name == "mnist-dsl"
    assert len(settings.select_cells(["mnist"])) == 7
    assert settings.select_cells([]) == list(settings.CELLS)
    with pytest.raises(ValueError, match=r"there is no cell 'wifi'; there are cifar-lan, .*"):
        settings.select_cells(["wifi"])


def test_methods_are_chosen_by_their_beginning() -> None:
    cell = settings.CELLS[0]
    assert settings.select_methods(cell, ["ideal", "diloco:period=16"]) == ["ideal", methods.DILOCO]
    assert settings.select_methods(cell, []) == list(settings.METHODS)
    assert len(settings.select_methods(cell, ["torch:ddp"])) == 3
    with pytest.raises(ValueError, match="no method of cifar-lan begins with 'easgd'"):
        settings.select_methods(cell, ["ideal", "easgd"])


def test_a_method_without_its_package_is_left_out_with_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real.importlib.util, "find_spec", lambda name: name == "torch" or None)
    kept = real.installed(settings.METHODS)
    assert kept == [
        one for one in settings.METHODS if not one.startswith(("torchft", "accelerate"))
    ]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3
    assert "torchft is not installed" in said[0]


def test_a_tiny_cell_is_run_once(tmp_path: Path) -> None:
    """With both tracks. Runs in the file are not repeated, and have the command to repeat them."""
    short = settings.Workload("digits", None, 0.1, 0.02)
    cell = replace(settings.TINY, workload=short, methods=("ideal", "bsp"), seeds=2)
    runner = VirtualCluster(Network("100Mbit/s"), Compute("10ms"))
    first = real.run(cell, "defaults", folder=tmp_path, runner=runner)
    path = settings.path_of(cell, "defaults", tmp_path)
    told = path.read_bytes()
    assert [(one.strategy, one.job.seed) for one in first] == [
        *(("ideal", 0), ("bsp", 0), ("ideal", 1), ("bsp", 1))
    ]
    assert real.run(cell, "defaults", folder=tmp_path, runner=runner) == first
    assert path.read_bytes() == told
    assert {one.command for one in first} == {
        "python -m benchmarks race --track defaults --cells tiny"
    }
    assert curves.read(tmp_path, "defaults") == {}, "it is in no table"
    tuned = real.run(cell, "tuned", methods=["bsp"], seeds=1, folder=tmp_path, runner=runner)
    assert [(one.job.lr_scale, one.lr_scales) for one in tuned] == [
        (scale, (0.3, 1.0, 3.0)) for scale in (1.0, 0.3, 3.0)
    ]
    usual, *others = tuned
    assert usual == replace(first[1], lr_scales=usual.lr_scales, command=usual.command), (
        "taken over"
    )
    assert usual.command == "python -m benchmarks race --track tuned --cells tiny"
    assert all(one.points != usual.points for one in others)
    told = settings.path_of(cell, "tuned", tmp_path).read_bytes()
    assert (
        real.run(cell, "tuned", methods=["bsp"], seeds=1, folder=tmp_path, runner=runner) == tuned
    )
    assert settings.path_of(cell, "tuned", tmp_path).read_bytes() == told


ONE = CellTimes("one", {"ideal": 2, "streaming": 4, "bsp": 8, "ddp": math.inf}, 1.0)
TWO = CellTimes("two", {"ideal": 2, "streaming": 8, "ddp": 4}, 1.0)


def test_times_are_compared_with_the_ideal_and_the_best() -> None:
    assert (ONE.best, TWO.best) == (4, 4)
    assert (ONE.share("streaming"), ONE.share("ddp")) == (0.5, 0)
    assert (ONE.regret("bsp"), TWO.regret("streaming")) == (2, 2)


def test_the_profile_counts_the_cells_a_method_was_run_in() -> None:
    """Streaming is best in one cell, twice as slow in the other; DDP arrives in one of two."""
    found = plots.profile([ONE, TWO], (1.0, 1.9, 2.0, 100.0))
    assert found["streaming"] == [0.5, 0.5, 1.0, 1.0]
    assert found["ddp"] == [0.5, 0.5, 0.5, 0.5]
    assert found["bsp"] == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--late", "10,50"], "does the ideal network have evaluations from 10 to 50 s"),
        (["--against", "bsp"], "--against goes with --slowdown"),
        (["--late", "10", "--against", "bsp", "--seeds", "1"], "no --steady, --seeds or --cells"),
        (["--late", "10", "--against", "bsp"], "three runs of the default and of 'bsp'"),
        (["--steady"], "--steady goes with --slowdown"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["--output", str(tmp_path), *more])
    assert said in capsys.readouterr().err


def test_results_of_the_race_hold_no_paths_of_a_machine() -> None:
    for path in RESULTS.glob("race-*.jsonl"):
        assert read_results(path)
        for line in path.read_text(encoding="utf-8").splitlines():
            told = json.loads(line)["job"]
            assert not str(told["data"]).startswith("/")
