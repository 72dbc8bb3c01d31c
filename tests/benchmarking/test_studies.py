"""The comparisons that the pages quote continue, and use the settings that tuning chose."""

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.race import studies
from benchmarks.race.run import main, run
from benchmarks.race.studies import CELLS, Cell, Workload, select

from offbeat_lab.job import Job
from offbeat_lab.results import read_results


def test_words_choose_cells() -> None:
    names = {one.name for one in select(["headline", "cnn"])}
    assert names == {f"headline-cnn-{link}bit" for link in ("1G", "200M", "50M", "10M")}
    assert [one.name for one in select(["elsewhere", "unevenlinks", "cnn"])] == [
        "elsewhere-cnn-50Mbit-unevenlinks"
    ]
    assert select([]) == list(CELLS)
    with pytest.raises(ValueError, match="no cell has all of 'cnn adam'"):
        select(["cnn", "adam"])


def test_list_runs_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["--list", "parts", "--output", str(tmp_path)])
    assert capsys.readouterr().out.split() == [
        *("parts-cnn-50Mbit", "3", "seeds", "parts-transformer-50Mbit", "3", "seeds"),
    ]
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a cell of ``mlp`` take seconds: four steps, four methods, three trials and one seed."""
    whole = Workload.job

    def short(workload: Workload, data: Path, workers: int) -> Job:
        return replace(whole(workload, data, workers), max_steps=4)

    monkeypatch.setattr(Workload, "job", short)
    monkeypatch.setattr(studies, "EVALUATIONS", 2)
    monkeypatch.setattr(studies, "TRIALS", 3)
    monkeypatch.setattr(Cell, "seeds", 1)
    few = ("ideal", "streaming", "local", "bsp --wire float32")
    monkeypatch.setattr(studies, "HEADLINE", few)
    monkeypatch.setattr(studies, "REAL", few)
    monkeypatch.setattr(studies, "PARTS", ("streaming", "streaming:parts=1"))


@pytest.mark.usefixtures("small")
def test_faster_workers_take_more_of_an_uneven_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 20 ms, and of six times as long on the last worker. The ideal waits for no one."""
    monkeypatch.setattr(studies, "UNEVEN", ("ideal", "streaming"))
    cell = Cell("uneven", "mlp", "1Gbit/s", speeds="sixth")
    for one in run(cell, folder=tmp_path):
        steps = [stats.steps for stats in one.stats]
        if one.is_ideal:
            assert steps == [4]
            assert one.seconds == pytest.approx(4 * 0.02 * 4 / (3 + 1 / 6), rel=0.1)
        else:
            assert sum(steps) == 16
            bound = "staleness" in one.label  # then workers wait for the slow one
            assert bound or min(steps) == steps[3] < 3


@pytest.mark.usefixtures("small")
def test_other_studies_use_the_settings_that_tuning_chose(tmp_path: Path) -> None:
    """With three trials another rate may be chosen, or the precision next to the best-known one."""
    run(Cell("headline", "mlp", "50Mbit/s"), folder=tmp_path)
    real = Cell("real", "mlp", "50Mbit/s").methods(tmp_path)
    names = [one.partition(" ")[0].partition(":period")[0] for one in real]
    assert names[:4] == ["ideal", "streaming", "local", "torch:ddp"]
    assert "streaming" + real[0].removeprefix("ideal") in real  # the default, at the ideal's rate
    parts = Cell("parts", "mlp", "50Mbit/s").methods(tmp_path)
    rate = real[1].removeprefix("streaming")
    assert parts == [real[0], f"streaming{rate}", f"streaming:parts=1{rate}"]


def test_real_cells_need_tuned_settings(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="race-headline-cnn-10Mbit"):
        Cell("real", "cnn", "10Mbit/s").methods(tmp_path)


@pytest.mark.parametrize(
    "cell", [cell for cell in CELLS if cell.path().exists()], ids=lambda cell: cell.name
)
def test_the_stored_results_have_the_settings_of_the_cell(cell: Cell) -> None:
    """Results that were made with other step times or workers must run again."""
    shared = cell.job(Path("data"))
    names = ("workers", "evaluations", "max_seconds", "step_seconds")
    for result in read_results(cell.path(), trials=True):
        for name in names:
            assert getattr(result.job, name) == getattr(shared, name), (result.label, name)
