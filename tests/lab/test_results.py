"""Results: reading and writing, and derived values."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat import Stats
from offbeat.lab import report
from offbeat.lab.events import Evaluation
from offbeat.lab.job import Job
from offbeat.lab.results import Result, read_results

SAVED = Path(__file__).with_name("results.jsonl")  # two real runs, one not
SAVED_TABLE = """\
digits, target test accuracy 0.985, 2 workers (real processes), loopback, \
Intel(R) Xeon(R) Processor @ 2.10GHz, 2 cores, 1 seed, --injection 0.5,0.5

| strategy | time to target | speed-up | final | training time | LSSR | sent per worker | idle |
|---|---|---|---|---|---|---|---|
| `bsp` | not reached | - | 0.2972 | 0.1 s | 0.00 | 3.6 MB | 19 % |
| `async:staleness=4` | not reached | - | 0.2139 | 0.1 s | 0.80 | 1.8 MB | 12 % |
"""


def test_a_file_is_read_and_written_the_same() -> None:
    """Values and derived values are unchanged."""
    results = read_results(SAVED)
    assert [one.strategy for one in results] == ["bsp", "async:staleness=4", "selsync:delta=inf"]
    assert [one.simulated for one in results] == [False, False, True]
    lines = SAVED.read_text(encoding="utf-8").splitlines()
    for one, line in zip(results, lines, strict=True):
        assert json.loads(json.dumps(one.to_dict())) == json.loads(line)


def test_a_file_loads_into_the_report(tmp_path: Path) -> None:
    results = read_results(SAVED)[:2]
    assert report.markdown(results) == SAVED_TABLE
    paths = report.write_report(results, tmp_path)
    assert {path.name for path in paths.values()} == {"table.md", "plot.png", "report.html"}


def test_jobs_of_other_versions_are_read() -> None:
    """Missing fields have their defaults; unknown fields are dropped."""
    values = json.loads(SAVED.read_text(encoding="utf-8").splitlines()[0])
    del values["job"]["sampler"]
    values["job"]["colour"] = "blue"
    values["stats"][0]["colour"] = "blue"
    assert Result.from_dict(values) == read_results(SAVED)[0]


def result(*curve: tuple[float, float], better: bool = True, target: float = 0.5) -> Result:
    points = (
        Evaluation(step, seconds, metric, {"m": metric})
        for step, (seconds, metric) in enumerate(curve, start=1)
    )
    stats = (
        Stats(4, 1, 100, wait_seconds=1, compute_seconds=3, details={"flags": 3}),
        Stats(4, 3, 300, wait_seconds=2, compute_seconds=2),
    )
    return Result(
        job=Job("digits", "local:period=2", 2),
        metric="m",
        higher_is_better=better,
        target=target,
        link="string",
        machine="abacus",
        versions={},
        simulated=True,
        points=tuple(points),
        stats=stats,
    )


def test_the_end_is_the_last_point() -> None:
    one = result((1.0, 0.9), (2.0, 0.25))
    assert (one.final, one.final_metrics, one.seconds) == (0.25, {"m": 0.25}, 2.0)
    assert one.strategy == "local:period=2"


@pytest.mark.parametrize(
    ("curve", "better", "seconds"),
    [
        ([(1.0, 0.4), (2.0, 0.5), (3.0, 0.9)], True, 2.0),
        ([(1.0, 0.6), (2.0, 0.4)], True, 1.0),  # falling back is no matter
        ([(1.0, 0.4999)], True, None),
        ([(1.0, 0.6), (2.0, 0.5)], False, 2.0),
        ([(1.0, 0.6)], False, None),
        ([(1.0, float("nan")), (2.0, 0.7)], True, 2.0),
    ],
)
def test_the_target_is_reached_at_the_first_point_at_it(
    curve: list[tuple[float, float]], better: bool, seconds: float | None
) -> None:
    assert result(*curve, better=better).time_to_target_seconds == seconds


def test_totals_are_means_over_the_workers() -> None:
    """LSSR is 3/4 and 1/4, the idle share 1/4 and 2/4."""
    one = result((1.0, 0.9))
    assert one.lssr == 0.5
    assert one.payload_bytes == 200
    assert one.idle == 0.375
    first = replace(one.stats[0], details={"a": 1})
    assert replace(one, stats=(first, one.stats[1])).details == {"a": 1}
