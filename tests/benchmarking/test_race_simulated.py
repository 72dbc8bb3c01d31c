"""The race in virtual time: its cells, its tuning, its pictures; these results are made up."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from benchmarks.harness import RESULTS
from benchmarks.race import figures, simulated, simulated_results
from benchmarks.race.simulated import Race, Simulated
from benchmarks.race.simulated_settings import (
    BANDWIDTHS,
    CORNERS,
    FINALISTS,
    GRIDS,
    LATENCIES,
    MAP,
    METHODS,
    MODELS,
    OTHERS,
    TUNED_AT,
    TUNING_SEED,
    WORKLOADS,
    Cell,
)
from benchmarks.run_cache import Row, RunCache

from lab.test_report import make
from offbeat.lab.job import Job
from offbeat.lab.recipes import find_recipe
from offbeat.lab.results import Result

MLP = str(MODELS / "digits_mlp.py")


def job(method: str) -> Job:
    return Job(MLP, "bsp", 2, epochs=0.9).under(method)


# The cells


def test_links_are_scaled_to_the_model() -> None:
    """A mean of all gradients takes the same time for both; 2·¾·8 MB over 6.25 MB/s and 6 α."""
    for cell in MAP:
        times = [
            cell.network(one).collective_seconds("reduce", one.model_bytes, range(4))
            for one in WORKLOADS.values()
        ]
        assert times[0] == pytest.approx(times[1])
        assert cell.merge_over_step == pytest.approx(times[0] / 0.08)
    by_hand = (1.5 * 8_279_592 / 6.25e6 + 6 * 0.0001) / 0.08
    assert Cell("50Mbit/s", 0.1).merge_over_step == pytest.approx(by_hand)


def test_the_bytes_are_those_of_the_models() -> None:
    model = find_recipe(MLP).build(Job(MLP, "bsp", 2).setup()).model
    assert sum(p.nbytes for p in model.parameters()) == WORKLOADS["mlp"].model_bytes


def test_more_workers_train_on_more_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the workers, four times the passes: as many steps for each."""
    asked: list[Job] = []

    def record(job: Job, *_: object) -> Result:
        asked.append(job)
        return make("bsp", [(1.0, 0.5)])

    monkeypatch.setattr(simulated, "run_and_record", record)
    for workers in (4, 16):
        simulated.run(Simulated("mlp", replace(TUNED_AT, workers=workers), "bsp", 0))
    assert [(one.workers, one.epochs) for one in asked] == [(4, 16.0), (16, 64.0)]


def test_every_method_is_a_job_that_could_run() -> None:
    settings = [*METHODS, *(one for grid in GRIDS.values() for one in grid)]
    for text in settings:
        job(text).check_method()
    assert {len(grid) for grid in GRIDS.values()} == {3}
    names = [cell.name for cell in (*MAP, *OTHERS)]
    assert len(set(names)) == len(names) == 17


# The tracks


def made_up(one: Simulated) -> Row:
    """The recipe's rate is best for all but local SGD; the middle setting is the first there.

    BSP and local SGD are the first rivals, streaming takes about twice their time.
    """
    text, _, scale = one.method.partition(" --lr-scale ")
    best = 3.0 if text.startswith("local") else 1.0
    final = 0.9 if float(scale or 1) == best else 0.8
    family = text.partition(":")[0].partition(" ")[0]
    place = GRIDS[family].index(text) if text in GRIDS.get(family, ()) else 1
    late = 1 + abs(place - 1) + (family == "streaming") + 0.1 * (one.seed % 3)
    late += 0.01 * (family not in ("bsp", "local"))
    points = [[1.0, 0.1], [10.0 * late, final]]
    if text == "ideal" and final == 0.9:
        points = [[1.0, 0.1], [5.0, 0.9]]
    return {"points": points, "steps": 9, "payload_bytes": 1e6, "idle": 0.1, "details": {}}


def rows_of(*tracks: str, cells: Sequence[Cell] = MAP) -> list[Row]:
    race = Race("mlp", RunCache(made_up, None, processes=0), cells)
    made = {
        "defaults": lambda: race.defaults([*cells, *OTHERS]),
        "tuned": race.tuned,
    }
    return [row for track in tracks for row in made[track]()]


def as_read(rows: Sequence[Row], tmp_path: Path) -> list[Row]:
    simulated.write(rows, tmp_path / simulated_results.FILE)
    return simulated_results.read(tmp_path)


def test_rates_are_tuned_by_the_end_and_settings_by_the_time() -> None:
    rows = rows_of("tuned", cells=[TUNED_AT, MAP[0]])
    shown = [row for row in rows if row["track"] == "tuned"]
    chosen = {row["family"]: row["method"] for row in shown}
    assert chosen["local"] == "local:period=16 --lr-scale 3"
    assert chosen["bsp"] == "bsp --wire bfloat16 --lr-scale 1"
    assert chosen["streaming"] == "streaming:outer_gain=1 --lr-scale 1"
    assert len(chosen) == 1 + FINALISTS
    assert {row["seed"] for row in shown} == {0, 1, 2}
    tuning = [row for row in rows if row["track"] == "tuning"]
    assert {row["seed"] for row in tuning} == {TUNING_SEED}
    # twelve where rates are tuned, and three in the other cell
    assert simulated_results.tuning_runs(rows) == {"ideal": 4, **dict.fromkeys(GRIDS, 15)}


def test_defaults_have_their_own_rates() -> None:
    """Local SGD's best one is thrice the recipe's; a workload of one rate has nothing to find."""
    rows = rows_of("defaults", cells=[MAP[0]])
    chosen = {row["family"]: row["method"] for row in rows if row["track"] == "defaults"}
    assert set(chosen) == set(METHODS)
    scales = {family: method.rpartition(" --lr-scale ")[2] for family, method in chosen.items()}
    assert scales == {**dict.fromkeys(METHODS, "1"), "local:period=16": "3"}
    race = Race("cnn", RunCache(made_up, None, processes=0))
    rows = list(race.defaults(CORNERS))
    assert {row["track"] for row in rows} == {"defaults"}
    methods = WORKLOADS["cnn"].methods
    assert {row["method"] for row in rows} == {f"{one} --lr-scale 1" for one in methods}
    assert set(methods) < set(METHODS)


def test_an_ideal_is_run_once_for_all_links() -> None:
    asked: list[Simulated] = []

    def run(one: Simulated) -> Row:
        asked.append(one)
        return made_up(one)

    list(Race("mlp", RunCache(run, None, processes=0)).defaults(MAP))
    assert len(asked) == len(set(asked)) == 4 * (1 + 6 * 3) + 3 * (12 * 7 + 1)


def test_times_are_to_the_share_of_the_ideal(tmp_path: Path) -> None:
    """On the line from 0.1 after 1 s to 0.9 at the end, 0.855 is there after 94.375 % of it."""
    found = simulated_results.times_of(as_read(rows_of("defaults"), tmp_path), "mlp", "defaults")
    assert len(found) == 17
    part = (0.95 * 0.9 - 0.1) / 0.8
    one = found[TUNED_AT]
    assert one.times["ideal"] == pytest.approx(1 + 4 * part)
    assert one.times["async"] == pytest.approx(1 + 10.1 * part)  # of 10.1, 11.1 and 12.1 s


def test_of_what_was_only_tried_the_end_is_kept(tmp_path: Path) -> None:
    rows = rows_of("tuned")
    kept = as_read(rows, tmp_path)
    assert len(kept) == len(rows)
    for row, before in zip(kept, rows, strict=True):
        most = 1 if row["track"] == "tuning" else 2
        assert row["points"] == before["points"][-most:]
        assert row["simulated"] is True
        assert asdict(row["cell"]) == before["cell"]


# Pictures


def test_a_method_that_never_arrives_is_infinitely_slow() -> None:
    assert simulated_results.time_ratio(math.inf, 2.0) == math.inf
    assert simulated_results.time_ratio(math.inf, math.inf) == math.inf
    assert simulated_results.time_ratio(2.0, math.inf) == 0
    assert simulated_results.time_ratio(3.0, 2.0) == 1.5


@pytest.mark.nightly
def test_all_pictures_are_drawn(tmp_path: Path) -> None:
    rows = as_read(rows_of("defaults", "tuned"), tmp_path)
    real = RESULTS / "race-defaults-cifar-wan.jsonl"
    (tmp_path / real.name).write_bytes(real.read_bytes())
    paths = figures.draw(rows, tmp_path)
    names = ["map", "map-tuned", "share", "profile", "rates", "bytes", "curves"]
    assert [path.stem for path in paths[:7]] == [f"race-simulated-{one}" for one in names]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 100_000


def test_results_hold_no_paths_of_a_machine() -> None:
    for row in simulated_results.read():
        told = json.dumps({**row, "cell": asdict(row["cell"])})
        assert "/tmp" not in told
        assert "/work" not in told
        assert row["cell"].bandwidth in BANDWIDTHS
        assert row["cell"].latency in LATENCIES
