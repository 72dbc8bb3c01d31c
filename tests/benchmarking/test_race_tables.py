"""Slowdowns of the race on real processes, from results that are made up here."""

import json
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness import RESULTS
from benchmarks.race import curves, earlier_clock, evidence, figures, tables
from benchmarks.race.earlier_clock import CalibratedResult

from lab.test_report import make
from offbeat.lab.results import Result

ROOT = Path(__file__).parents[2]


def turns_of(one: Result) -> dict[str, Any]:
    """Return the field "turns" of an old file."""
    if not isinstance(one, CalibratedResult):
        return {}
    return {"turns": [{"step": step, "step_seconds": seconds} for step, seconds in one.turns]}


def calibrated(run: Result, *step_seconds: float) -> CalibratedResult:
    values = {field.name: getattr(run, field.name) for field in fields(Result)}
    steps = [0, *(point.step for point in run.points)]
    return CalibratedResult(**values, turns=tuple(zip(steps, step_seconds, strict=True)))


def written(folder: Path, cell: str, results: Sequence[Result]) -> None:
    lines = [json.dumps(one.to_dict() | turns_of(one)) for one in results]
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
    cells = curves.curves(tmp_path)
    found = curves.read(tmp_path, "defaults", steady=True)
    assert set(found) == {"made-up", "made-other"}
    for results in found.values():
        for one in results:
            told = [(point.seconds, point.metric) for point in one.points]
            if one.is_ideal:
                assert told == [(20, 0.5), (40, 0.9)]
            else:
                name = "made-up" if results is found["made-up"] else "made-other"
                assert told == cells[name][0]["streaming"][one.job.seed]
    text = tables.every_method(tmp_path, [30.0], steady=True)
    assert "| made-up | `streaming` | 1.00 (0.50–1.50) | 20000 ms | 2 † |" in text
    assert "| made-up | `ideal` | 1.00 (1.00–1.00) | 20000 ms | 2 |" in text
    text = tables.every_method(tmp_path, [30.0], steady=True, seeds=1, only=["made-up"])
    assert "made-other" not in text
    assert "| made-up | `streaming` | 0.50 | 10000 ms | 1 † |" in text
    assert "| made-up | `ideal` | 1.00 | 20000 ms | 1 |" in text


def test_differences_are_of_the_same_seed(tmp_path: Path) -> None:
    """The ideal is at 0.7 after 15 s; 3, 4 and 5 times as late less 2, 2 and 2: 1, 2 and 3.

    With the 1 and 2 of the other cell the interval is that of all 5⁵ resamples, [1.2, 2.4].
    """
    runs = [
        make(method, [(10 * late, 0.5), (20 * late, 0.9)], seed=seed)
        for method, of in (("ideal", (1, 1, 1)), ("streaming", (2, 2, 2)), ("bsp", (3, 4, 5)))
        for seed, late in enumerate(of)
    ]
    written(tmp_path, "made-up", runs)
    written(tmp_path, "made-few", runs[:2] + runs[3:5] + runs[6:8])
    table = tables.against(tmp_path, [15.0], "bsp").splitlines()
    assert table[2:] == [
        "| made-up | 2.00 [1.00, 3.00] | 3 |",
        "| all of made | 1.80 [1.20, 2.40] | 5 |",
    ]
    assert tables.against(tmp_path, [15.0], "easgd") == ""
    never = [make("bsp", [(10, 0.5)], seed=seed) for seed in range(2)]
    written(tmp_path, "made-few", [*runs[:2], *runs[3:5], *never])
    assert "all of made | 2.00 [1.00, 3.00] | 3 |" in tables.against(tmp_path, [15.0], "bsp")


def test_cells_whose_ideal_has_ended_by_then_are_left_out(tmp_path: Path) -> None:
    """Under one seed it ends after 20 s, in the other cell after 40, having begun at 20."""
    for cell, paces_of in (("made-short", (1, 2)), ("made-long", (2, 2))):
        runs = [
            make(method, [(10 * pace, 0.5), (20 * pace, 0.9)], seed=seed)
            for seed, pace in enumerate(paces_of)
            for method in ("ideal", "streaming")
        ]
        written(tmp_path, cell, runs)
    text = tables.every_method(tmp_path, [25.0, 30.0])
    assert "made-short" not in text
    assert text.count("made-long") == 2
    assert tables.every_method(tmp_path, [20.0]).count("made-short") == 2
    assert tables.every_method(tmp_path, [15.0, 20.0]) == "", "not looked at yet"
    assert tables.every_method(tmp_path, [30.0], only=["made-short"]) == ""
    assert tables.against(tmp_path, [30.0], "streaming") == ""


def test_small_models_have_a_table_of_their_own(tmp_path: Path) -> None:
    """Where the ideal ends after 8 s, its first six seconds are shown."""
    for cell, look in (("made-small", 2), ("made-up", 10)):
        curve = [(look * number, 0.2 * number) for number in (1, 2, 3, 4)]
        late = [(2 * seconds, metric) for seconds, metric in curve]
        written(tmp_path, cell, [make("ideal", curve), make("streaming", late)])
    told = evidence.tables(tmp_path)
    assert "made-small" not in told["Every method"]
    assert "| made-up | `streaming` | 2.00 | 2.00 | 2.00 |" in told["Every method"]
    assert "| made-small | 2, 4, 6 s | 2.00, 2.00, 2.00 |" in told["On real processes"]
    small = told["A small model on real processes"].splitlines()
    assert small[0] == "| cell | method | 2 s | 4 s | 6 s | a step | seeds |"
    assert small[-1].startswith("| made-small | `streaming` | 2.00 | 2.00 | 2.00 |")
    assert "With rates tuned" not in told


@pytest.mark.pages
@pytest.mark.parametrize(("page", "seconds", "workload"), [("evidence", (2, 4, 6), "mnist")])
def test_pages_quote_the_differences_of_a_workload(
    page: str, seconds: Sequence[float], workload: str
) -> None:
    """In the order of the seconds; the page has a negative difference as one of the other sign."""
    table = tables.against(RESULTS, seconds, evidence.RIVAL)
    (line,) = (one for one in table.splitlines() if one.startswith(f"| all of {workload} |"))
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split())
    _, _, *values, _, _ = map(str.strip, line.split("|"))
    for number, value in enumerate(values):
        mean, low, high = map(float, re.findall(r"-?\d+\.\d+", value))
        if mean < 0:
            values[number] = f"{-mean:.2f} [{-high:.2f}, {-low:.2f}]"
    assert re.search(r"\D{1,60}".join(map(re.escape, values)), re.sub(r"after \d+ s", "", text))


def test_the_picture_has_means_and_intervals(tmp_path: Path) -> None:
    """3, 4 and 5 times as late have their range; two seeds have no interval. Never is left out."""
    curve = [(5 * number, 0.1 * number) for number in range(1, 10)]

    def late(times: float) -> list[tuple[float, float]]:
        return [(times * seconds, metric) for seconds, metric in curve]

    runs = [make("ideal", curve, seed=seed) for seed in range(3)]
    runs += [make("streaming", late(3 + seed), seed=seed) for seed in range(3)]
    runs += [make("bsp", late(2 + seed), seed=seed) for seed in range(2)]
    runs += [make("local:period=8", late(2)[:3], seed=seed) for seed in range(2)]
    written(tmp_path, "made-up", runs)
    cells = curves.curves(tmp_path)
    found = curves.final_slowdowns(cells, "streaming")["made-up"]
    assert (found.mean, found.low, found.high) == pytest.approx((4, 3, 5))
    alone = curves.final_slowdowns(cells, "bsp")["made-up"]
    assert (alone.mean, alone.low, alone.high) == pytest.approx((2.5, 2.5, 2.5))
    assert curves.final_slowdowns(cells, "local:period=8") == {}
    figures.draw_slowdowns(cells, tmp_path / "late.png")
    assert (tmp_path / "late.png").stat().st_size > 5_000


def test_the_overview_has_the_nearest_peer_and_marks_uncorrected_rows(tmp_path: Path) -> None:
    """DDP is nearer after 10 s, post-local SGD after 30; our own methods are no peers."""
    curve = [(5 * number, 0.1 * number) for number in range(1, 10)]

    def late(early: float, later: float) -> list[tuple[float, float]]:
        return [(seconds * (early if seconds < 15 else later), metric) for seconds, metric in curve]

    runs = [make("ideal", curve), make("streaming", late(1, 1.1)), make("bsp", late(1, 1))]
    runs += [make("torch:ddp", late(1, 3)), make("torch:postlocal,period=16", late(2, 2))]
    pace = runs[0].seconds / runs[0].points[-1].step
    runs[1] = calibrated(runs[1], *[pace] * (1 + len(curve)))
    written(tmp_path, "cifar-lan", runs)
    written(tmp_path, "as-made-up", runs[:2])
    lines = tables.overview(figures.cells_in_order(tmp_path)).splitlines()
    assert lines[2] == (
        "| cifar-lan | 10, 20, 30 s | 1.00, 1.10, 1.10 | - | 2.00, 2.00, 2.00 "
        "| `torch:postlocal,period=16` | 1, 1 |"
    )
    assert lines[3].endswith("| - | - | - | 1 |")
    second = [make("ideal", curve, seed=1), make("streaming", late(1, 1.1), seed=1)]
    written(tmp_path, "as-made-up", runs[:2] + second)
    table = tables.every_method(tmp_path, [30.0])
    assert table.splitlines()[3].endswith(" 2 † |")
    assert [line.split("|")[-2] for line in table.splitlines()[4:9]] == [
        *(" 1 ", " 1 ", " 1 † ", " 1 † ", " 1 † "),
    ]


def test_old_times_are_converted_to_one_machine_speed(tmp_path: Path) -> None:
    """8 s at 2 s a step and 6 s at a mean of 3 s become 4 s and 2 s at the ideal's 1 s a step."""
    ideal = make("ideal", [(10.0, 0.5), (20.0, 0.9)])
    ideal = replace(ideal, points=tuple(replace(p, step=int(p.seconds)) for p in ideal.points))
    run = calibrated(make("streaming", [(8, 0.5), (14, 0.9)]), 2.0, 2.0, 4.0)
    plain = make("bsp", [(8, 0.5), (14, 0.9)])
    written(tmp_path, "made-up", [ideal, run, plain])
    _, *found = curves.read(tmp_path, "defaults")["made-up"]
    assert [point.seconds for point in found[0].points] == [4.0, 6.0]
    assert found[1] == plain
    padded = replace(plain, job=replace(plain.job, step_seconds=0.05))
    known = [earlier_clock.has_known_speed(one) for one in (ideal, run, plain, padded)]
    assert known == [True, True, False, True]
