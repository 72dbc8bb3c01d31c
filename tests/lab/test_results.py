"""Results: reading and writing, and derived values."""

import json
from pathlib import Path

from offbeat_lab import report
from offbeat_lab.results import Result, read_results

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
