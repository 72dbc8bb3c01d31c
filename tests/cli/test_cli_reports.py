"""Tuned and continued comparisons, and pages made from their results."""

import json
import re
from pathlib import Path

import pytest

from cli.commands import Call

SAVED = Path(__file__).parents[1] / "lab" / "results.jsonl"
TRIAL = json.loads(SAVED.read_text(encoding="utf-8").splitlines()[0])
TRIAL["trial"] = {"method": "bsp", "budget": 3}
INCOMPLETE = {name: value for name, value in TRIAL.items() if name != "target"}
SHORT = ("--workers", "2", "--max-steps", "2", "--evaluations", "2")
VIRTUAL = ("--simulate", "--step-time", "20ms", "--bandwidth", "200mbit", "--slow", "1=2")


def test_a_comparison_continues_where_it_was(call: Call, tmp_path: Path) -> None:
    """The second call runs nothing."""
    argv = ("compare", "digits", "-s", "bsp", "-s", "local:period=2 --lr-scale 2", *SHORT, *VIRTUAL)
    argv = (*argv, "--lr-scale", "0.5", "--output", str(tmp_path))
    code, out, err = call(*argv)
    assert (code, err) == (0, "")
    path = tmp_path / "results.jsonl"
    told = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(one["strategy"], one["job"]["lr_scale"]) for one in told] == [
        *(("bsp", 0.5), ("local:period=2", 2.0))
    ]
    assert {one["points"][-1]["step"] for one in told} == {2}
    assert {one["job"]["slow"] for one in told} == {"1=2"}
    assert told[0]["command"].startswith("offbeat compare digits -s bsp -s 'local:period=2 --lr")
    assert "worker 1 2 times slower" in re.sub(r"\s+", " ", out)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    code, out, err = call(*argv)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "runs in the results already: 2 of 2"
    assert "test accuracy 0." not in out.partition("digits, target")[0]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2
    (tmp_path / "report.html").unlink()
    assert call("report", str(path))[0] == 0
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page


def test_tuning_from_the_command_line(call: Call, tmp_path: Path) -> None:
    """The ideal is tuned, too. The page has no trials."""
    argv = ("compare", "digits", "-s", "local", "--tune", "3", "--seed", "1", *SHORT, *VIRTUAL)
    argv = (*argv, "--output", str(tmp_path))
    code, out, err = call(*argv)
    assert (code, err) == (0, "")
    assert re.search(r"^local +local:period=2.* 3 ", out, re.MULTILINE)
    path = tmp_path / "results.jsonl"
    told = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [(one["trial"]["method"], one["job"]["seed"]) for one in told[:6]] == [
        *[("ideal", 0)] * 3,
        *[("local", 0)] * 3,
    ]
    assert {(one["trial"], one["job"]["seed"]) for one in told[6:]} == {(None, 1)}
    assert {"ideal", "local:period=2 --wire int4"} <= {one["label"] for one in told[6:]}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "at most 3 trials per method and the seed 0" in page


def test_a_page_is_made_of_older_results(call: Call, tmp_path: Path) -> None:
    """The page is in a new folder."""
    page = tmp_path / "a" / "page.html"
    code, out, err = call("report", str(SAVED), "-o", str(page))
    assert (code, err) == (0, "")
    assert str(page) in out
    assert "async:staleness=4" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "results.jsonl holds no result of a comparison"),
        (json.dumps(TRIAL), "results.jsonl holds no result of a comparison"),
        (json.dumps(INCOMPLETE), "results.jsonl, line 1, is not a result: KeyError: 'target'"),
        (None, "results.jsonl, which does not exist"),
    ],
)
def test_an_invalid_result_is_one_line(
    text: str | None, message: str, call: Call, tmp_path: Path
) -> None:
    path = tmp_path / "results.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    code, out, err = call("report", str(path))
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"error: .*{message}\n", err)
    assert not (tmp_path / "report.html").exists()
