"""The race's grid, and what is made of its results; these results are made up, here alone."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import race, race_names
from benchmarks import race_figures as figures
from benchmarks.harness import RESULTS

from lab.test_report import make
from offbeat import Compute, Network
from offbeat.lab.events import LinkSpeed
from offbeat.lab.job import Job
from offbeat.lab.launch.runners import VirtualCluster
from offbeat.lab.methods.peer import Peer
from offbeat.lab.results import Result, read_results

ROOT = Path(__file__).parents[2]


# The grid


def test_every_cell_and_method_is_a_job_that_could_run() -> None:
    """Each method by its text, packages and data apart; names are unique, files too."""
    names = [one.name for one in (*race.CELLS, race.TINY)]
    assert len(set(names)) == len(names) == 22
    for cell in race.CELLS:
        job = cell.job(Path("data"))
        assert job.data in (None, f"data/{cell.workload.data}")
        assert job.recipe in ("mnist", "stdlib-lm", "benchmarks/models/cifar_wide.py")
        assert cell.place is not None
    for text in race.METHODS:
        one = Job("digits", "bsp", 4).under(text)
        assert one.strategy
    assert len({str(race.path_of(one, track)) for one in race.CELLS for track in race.TRACKS}) == 42


def test_every_peer_is_raced_and_our_own() -> None:
    from offbeat.lab.methods.registry import BASELINES, parse_method

    raced = {type(parse_method(text.split()[0])) for text in race.METHODS}
    assert {kind for kind in BASELINES.values() if issubclass(kind, Peer)} <= raced
    assert "fragments=4,overlap=" in race_names.OURS
    assert race_names.OURS.endswith("--wire int4")


def test_cells_are_chosen_by_name_or_part() -> None:
    assert [one.name for one in race.chosen(["lan"])] == ["cifar-lan", "mnist-lan", "lm-lan"]
    assert race.chosen(["mnist-dsl", "mnist"])[0].name == "mnist-dsl"
    assert len(race.chosen(["mnist"])) == 7
    assert race.chosen([]) == list(race.CELLS)
    with pytest.raises(ValueError, match=r"there is no cell 'wifi'; there are cifar-lan, .*"):
        race.chosen(["wifi"])


def test_methods_are_chosen_by_their_beginning() -> None:
    cell = race.CELLS[0]
    assert race.of_method(cell, ["ideal", "diloco:period=16"]) == ["ideal", race_names.OURS]
    assert race.of_method(cell, []) == list(race.METHODS)
    assert len(race.of_method(cell, ["torch:ddp"])) == 3
    with pytest.raises(ValueError, match="no method of cifar-lan begins with 'easgd'"):
        race.of_method(cell, ["ideal", "easgd"])


def test_a_method_without_its_package_is_left_out_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(race.importlib.util, "find_spec", lambda name: name == "torch" or None)
    kept = race.installed(race.METHODS)
    assert kept == [one for one in race.METHODS if not one.startswith(("torchft", "accelerate"))]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3
    assert "torchft is not installed" in said[0]


def test_a_tiny_cell_is_run_once(tmp_path: Path) -> None:
    """With both tracks; what is in its file is not run again, and its runs say how to repeat it."""
    short = race.Workload("digits", None, 0.1)
    cell = replace(race.TINY, workload=short, methods=("ideal", "bsp"), seeds=2)
    place = VirtualCluster(Network("100Mbit/s"), Compute("10ms"))
    first = race.run(cell, "defaults", folder=tmp_path, place=place)
    path = race.path_of(cell, "defaults", tmp_path)
    told = path.read_bytes()
    assert [(one.strategy, one.job.seed) for one in first] == [
        *(("ideal", 0), ("bsp", 0), ("ideal", 1), ("bsp", 1))
    ]
    assert race.run(cell, "defaults", folder=tmp_path, place=place) == first
    assert path.read_bytes() == told
    assert {one.command for one in first} == {
        "python -m benchmarks race --track defaults --cells tiny"
    }
    assert figures.read(tmp_path) == [], "it is in no table"
    tuned = race.run(cell, "tuned", methods=["bsp"], seeds=1, folder=tmp_path, place=place)
    assert [(one.job.lr_scale, one.lr_scales) for one in tuned] == [
        (scale, (0.3, 1.0, 3.0)) for scale in (1.0, 0.3, 3.0)
    ]
    usual, *others = tuned
    assert usual == replace(first[1], lr_scales=usual.lr_scales, command=usual.command), (
        "taken over"
    )
    assert usual.command == "python -m benchmarks race --track tuned --cells tiny"
    assert all(one.points != usual.points for one in others)
    told = race.path_of(cell, "tuned", tmp_path).read_bytes()
    assert race.run(cell, "tuned", methods=["bsp"], seeds=1, folder=tmp_path, place=place) == tuned
    assert race.path_of(cell, "tuned", tmp_path).read_bytes() == told


# Its figures

FAST, MIDDLE, NEVER = [(1, 0.5), (2, 0.99)], [(1, 0.5), (8, 0.99)], [(9, 0.5)]


def cell(name: str, of: dict[str, Sequence[tuple[float, float]]]) -> figures.Raced:
    results: list[Result] = []
    for seed in range(3):
        for method, curve in of.items():
            told = (LinkSpeed(1e6, 0.001),) * 2
            one = replace(make(method, curve, seed=seed), links=told, model_bytes=4_000_000)
            results.append(one)
    return figures.raced("defaults", name, results)


ONE = cell(
    "made-up-1",
    {
        "ideal": FAST,
        "streaming": [(1, 0.5), (4, 0.99)],
        race_names.OURS: MIDDLE,
        "torch:ddp": NEVER,
        "torch:accumulate,steps=4": MIDDLE,
    },
)
TWO = cell("made-up-2", {"ideal": FAST, "streaming": MIDDLE, "torch:ddp": [(1, 0.5), (4, 0.99)]})


def test_times_are_to_a_share_of_the_ideal() -> None:
    assert ONE.times["ideal"] == 2
    assert ONE.times["torch:ddp"] == math.inf
    assert (ONE.best, TWO.best) == (4, 4)
    assert (ONE.share("streaming"), ONE.share("torch:ddp")) == (0.5, 0)
    assert (ONE.regret(race_names.OURS), TWO.regret("streaming")) == (2, 2)


def test_merges_are_compared_with_steps() -> None:
    """Two workers: 2·½·4 MB over 1 MB/s is 4 s; the ideal took two steps in two seconds."""
    assert ONE.merge_over_step == pytest.approx(4.0)


def test_the_profile_counts_the_cells_a_method_was_run_in() -> None:
    """Streaming is best in one cell, twice as slow in the other; DDP arrives in one of two."""
    found = figures.profile([ONE, TWO], (1.0, 1.9, 2.0, 100.0))
    assert found["streaming"] == [0.5, 0.5, 1.0, 1.0]
    assert found["torch:ddp"] == [0.5, 0.5, 0.5, 0.5]
    assert found[race_names.OURS] == [0.0, 0.0, 1.0, 1.0]


def test_the_table_names_the_best_peer() -> None:
    lines = figures.table([ONE, TWO]).splitlines()
    assert lines[2] == (
        "| defaults | made-up-1 | 2.0 s | 4.0 s (50 %) | 8.0 s (25 %) | 8.0 s (25 %) | "
        "`torch:accumulate,steps=4` |"
    )
    assert lines[3] == (
        "| defaults | made-up-2 | 2.0 s | 8.0 s (25 %) | - | 4.0 s (50 %) | `torch:ddp` |"
    )
    assert figures.table([]) == figures.NONE_YET


def test_pictures_are_drawn(tmp_path: Path) -> None:
    paths = figures.draw([ONE, TWO], tmp_path)
    assert [path.name for path in paths] == [
        f"race-defaults-{name}.png" for name in ("profile", "share", "regret")
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--late", "10,50"], "none of these cells was trained and looked at from 10 to 50 s"),
        (["--against", "bsp"], "--against goes with --late"),
        (["--late", "10", "--against", "bsp", "--seeds", "1"], "no --steady, --seeds or --cells"),
        (["--late", "10", "--against", "bsp"], "three runs of the default and of 'bsp'"),
        (["--steady"], "--steady goes with --late"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        race.main(["--output", str(tmp_path), *more])
    assert said in capsys.readouterr().err


def test_the_sooner_of_two_settings_is_shown() -> None:
    eight = race_names.DILOCO.format(8)
    two = cell("made-up-3", {"ideal": FAST, race_names.OURS: MIDDLE, eight: [(1, 0.5), (4, 0.99)]})
    assert "| 2.0 s | - | 4.0 s (50 %) | - | - |" in figures.table([two])


# What is said of it

PAGES = ("README.md", "benchmarks/README.md", "docs/comparing.md")


@pytest.mark.parametrize("page", PAGES)
def test_pages_quote_the_race_as_it_was(page: str) -> None:
    """Between the marks stands the table of the results that are there, to the letter."""
    quoted = figures.quoted((ROOT / page).read_text(encoding="utf-8"))
    if page == "benchmarks/README.md":
        assert quoted is not None
    if quoted is not None:
        assert quoted == figures.table(figures.read(RESULTS))


def test_a_wrong_quote_is_found() -> None:
    """The comparison above can fail."""
    text = f"a\n{figures.MARKS[0]}\n| ideal | 1 s |\n{figures.MARKS[1]}\nb"
    assert figures.quoted(text) == "| ideal | 1 s |"
    assert figures.quoted("no marks") is None


def test_results_of_the_race_hold_no_paths_of_a_machine() -> None:
    for path in RESULTS.glob("race-*.jsonl"):
        assert read_results(path)
        for line in path.read_text(encoding="utf-8").splitlines():
            told = json.loads(line)["job"]
            assert not str(told["data"]).startswith("/")
