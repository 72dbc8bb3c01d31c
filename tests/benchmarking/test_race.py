"""The race's grid, and what is made of its results; these results are made up, here alone."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import evidence, paces, race
from benchmarks import race_figures as figures
from benchmarks.harness import RESULTS

from lab.test_report import make
from offbeat import Compute, Network
from offbeat.lab.events import Measured
from offbeat.lab.job import Job
from offbeat.lab.peers import Peer
from offbeat.lab.places import VirtualCluster
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
    from offbeat.lab.baselines import BASELINES, parse_method

    raced = {type(parse_method(text.split()[0])) for text in race.METHODS}
    assert {kind for kind in BASELINES.values() if issubclass(kind, Peer)} <= raced
    assert "fragments=4,overlap=" in race.OURS
    assert race.OURS.endswith("--wire int4")


def test_cells_are_chosen_by_name_or_part() -> None:
    assert [one.name for one in race.chosen(["lan"])] == ["cifar-lan", "mnist-lan", "lm-lan"]
    assert race.chosen(["mnist-dsl", "mnist"])[0].name == "mnist-dsl"
    assert len(race.chosen(["mnist"])) == 7
    assert race.chosen([]) == list(race.CELLS)
    with pytest.raises(ValueError, match=r"there is no cell 'wifi'; there are cifar-lan, .*"):
        race.chosen(["wifi"])


def test_methods_are_chosen_by_their_beginning() -> None:
    cell = race.CELLS[0]
    assert race.of_method(cell, ["ideal", "diloco:period=16"]) == ["ideal", race.OURS]
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
            told = (Measured(1e6, 0.001),) * 2
            one = replace(make(method, curve, seed=seed), links=told, model_bytes=4_000_000)
            results.append(one)
    return figures.raced("defaults", name, results)


ONE = cell(
    "made-up-1",
    {
        "ideal": FAST,
        "streaming": [(1, 0.5), (4, 0.99)],
        race.OURS: MIDDLE,
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
    assert (ONE.regret(race.OURS), TWO.regret("streaming")) == (2, 2)


def test_merges_are_compared_with_steps() -> None:
    """Two workers: 2·½·4 MB over 1 MB/s is 4 s; the ideal took two steps in two seconds."""
    assert ONE.merge_over_step == pytest.approx(4.0)


def test_the_profile_counts_the_cells_a_method_was_run_in() -> None:
    """Streaming is best in one cell, twice as slow in the other; DDP arrives in one of two."""
    found = figures.profile([ONE, TWO], (1.0, 1.9, 2.0, 100.0))
    assert found["streaming"] == [0.5, 0.5, 1.0, 1.0]
    assert found["torch:ddp"] == [0.5, 0.5, 0.5, 0.5]
    assert found[race.OURS] == [0.0, 0.0, 1.0, 1.0]


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


def written(folder: Path, cell: str, results: Sequence[Result]) -> None:
    lines = [json.dumps(one.to_dict()) for one in results]
    (folder / f"race-defaults-{cell}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def test_all_ideals_can_be_given_one_step(tmp_path: Path) -> None:
    """Steps of 10, 30 and 20 s become 20; curves of methods stay, and slow workers' cells go."""
    for cell, slowness in (("made-up", (1, 3)), ("made-other", (2,)), ("made-slow", (9,))):
        runs = [
            make(method, [(10 * pace, 0.5), (20 * pace, 0.9)], seed=seed)
            for seed, pace in enumerate(slowness)
            for method in ("ideal", "streaming")
        ]
        slow = "0=2" if cell == "made-slow" else None
        written(tmp_path, cell, [replace(one, job=replace(one.job, slow=slow)) for one in runs])
    cells = figures.curves(tmp_path)
    found = paces.read(tmp_path, "defaults", steady=True)
    assert set(found) == {"made-up", "made-other"}
    for results in found.values():
        for one in results:
            told = [(point.seconds, point.metric) for point in one.points]
            if one.is_ideal:
                assert told == [(20, 0.5), (40, 0.9)]
            else:
                name = "made-up" if results is found["made-up"] else "made-other"
                assert told == cells[name][0]["streaming"][one.job.seed]
    text = figures.late(tmp_path, [30.0], steady=True)
    assert "| made-up | `streaming` | 1.00 (0.50–1.50) | 20000 ms | 2 |" in text
    assert "| made-up | `ideal` | 1.00 (1.00–1.00) | 20000 ms | 2 |" in text
    text = figures.late(tmp_path, [30.0], steady=True, seeds=1, only=["made-up"])
    assert "made-other" not in text
    assert "| made-up | `streaming` | 0.50 | 10000 ms | 1 |" in text


def test_differences_are_of_the_same_seed(tmp_path: Path) -> None:
    """The ideal is at 0.7 after 15 s; 3, 4 and 5 times as late less 2, 2 and 2: 2 ± 2.48."""
    runs = [
        make(method, [(10 * late, 0.5), (20 * late, 0.9)], seed=seed)
        for method, of in (("ideal", (1, 1, 1)), ("streaming", (2, 2, 2)), ("bsp", (3, 4, 5)))
        for seed, late in enumerate(of)
    ]
    written(tmp_path, "made-up", runs)
    written(tmp_path, "made-few", runs[:2] + runs[3:5] + runs[6:8])
    table = figures.against(tmp_path, [15.0], "bsp").splitlines()
    assert table[2:] == ["| made-up | 2.00 ± 2.48 | 3 |", "| all | 2.00 ± 2.48 | 3 |"]
    assert figures.against(tmp_path, [15.0], "easgd") == ""


def test_cells_whose_ideal_has_ended_by_then_are_left_out(tmp_path: Path) -> None:
    """Under one seed it ends after 20 s, in the other cell after 40, having begun at 20."""
    for cell, paces_of in (("made-short", (1, 2)), ("made-long", (2, 2))):
        runs = [
            make(method, [(10 * pace, 0.5), (20 * pace, 0.9)], seed=seed)
            for seed, pace in enumerate(paces_of)
            for method in ("ideal", "streaming")
        ]
        written(tmp_path, cell, runs)
    text = figures.late(tmp_path, [25.0, 30.0])
    assert "made-short" not in text
    assert text.count("made-long") == 2
    assert figures.late(tmp_path, [20.0]).count("made-short") == 2
    assert figures.late(tmp_path, [15.0, 20.0]) == "", "not looked at yet"
    assert figures.late(tmp_path, [30.0], only=["made-short"]) == ""
    assert figures.against(tmp_path, [30.0], "streaming") == ""


def test_small_models_have_a_table_of_their_own(tmp_path: Path) -> None:
    """Where the ideal ends after 8 s, its first six seconds are shown, and told of first."""
    for cell, look in (("made-small", 2), ("made-up", 10)):
        curve = [(look * number, 0.2 * number) for number in (1, 2, 3, 4)]
        late = [(2 * seconds, metric) for seconds, metric in curve]
        written(tmp_path, cell, [make("ideal", curve), make("streaming", late)])
    told = evidence.tables(tmp_path)
    assert "made-small" not in told["On real processes"]
    assert "| made-up | `streaming` | 2.00 | 2.00 | 2.00 |" in told["On real processes"]
    small = told["A small model on real processes"].splitlines()
    assert small[0] == "| cell | method | 2 s | 4 s | 6 s | a step | seeds |"
    assert small[-1].startswith("| made-small | `streaming` | 2.00 | 2.00 | 2.00 |")
    assert "With rates tuned" not in told
    assert "made-small 2.00, made-up 2.00; no rival" in " ".join(evidence.lead(tmp_path).split())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--late", "10,50"], "none of these cells was trained and looked at from 10 to 50 s"),
        (["--against", "bsp"], "--against goes with --late"),
        (["--late", "10", "--against", "bsp", "--seeds", "1"], "no --steady, --seeds or --cells"),
        (["--late", "10", "--against", "bsp"], "three seeds of the default and of 'bsp'"),
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
    eight = race.DILOCO.format(8)
    two = cell("made-up-3", {"ideal": FAST, race.OURS: MIDDLE, eight: [(1, 0.5), (4, 0.99)]})
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


def test_the_page_of_streaming_quotes_how_late_all_are() -> None:
    page = (ROOT / "docs" / "streaming.md").read_text(encoding="utf-8")
    assert figures.late(RESULTS, [10, 20, 30]) in page


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
