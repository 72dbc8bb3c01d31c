"""What a new user sees first says what is there: versions, the list of what is public, figures."""

import difflib
import importlib
import inspect
import pickle
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import offbeat
import offbeat.extend
from offbeat_lab import baselines
from pages import DOCS
from public_api import PAGE, SNAPSHOT, public_api

ROOT = Path(__file__).parent.parent


def section(page: str, heading: str) -> str:
    """The text below ``## heading``, up to the next one."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def names_in_table(text: str) -> list[str]:
    """What is set as code in the last column of the first table."""
    rows = [line.rsplit("|", 2)[1] for line in text.splitlines() if line.startswith("|")]
    return [name for row in rows[2:] for name in re.findall(r"`(\w+)`", row)]


@cache
def shown_in_api() -> dict[str, Any]:
    """Each thing that the API describes, by its path; not what needs another framework."""
    found = {}
    pattern = r"^::: (?!offbeat.integrations)([\w.]+)$"
    for path in re.findall(pattern, PAGE.read_text("utf-8"), re.MULTILINE):
        home, _, name = path.rpartition(".")
        try:
            found[path] = getattr(importlib.import_module(home), name)
        except AttributeError:
            found[path] = importlib.import_module(path)
    return found


def test_the_version_is_the_same_everywhere() -> None:
    """In the package, in what pip reads, and in what is cited."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert [project["version"]] == [offbeat.__version__] == cited


def test_the_package_can_be_sent_to_another_process() -> None:
    """Launchers pickle a training function with the modules that it uses; Ray does."""
    assert pickle.loads(pickle.dumps(offbeat)) is offbeat


@pytest.mark.parametrize("name", sorted({*offbeat.__all__, *offbeat.data.__all__} - {"data"}))
def test_what_is_public_is_described(name: str) -> None:
    """With its docstring, on a page of the API."""
    thing = getattr(offbeat, name, None) or getattr(offbeat.data, name)
    shown = shown_in_api()
    errors = vars(shown["offbeat.errors"]).values()
    assert any(thing is one for one in [*shown.values(), *errors])


def test_a_short_path_is_a_public_name() -> None:
    """`offbeat.X` on the page is what a program writes."""
    short = [path for path in shown_in_api() if re.fullmatch(r"offbeat\.\w+", path)]
    assert {path.rpartition(".")[2] for path in short} <= {*offbeat.__all__, "errors"}


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("What is public", [name for name in dir(offbeat) if not name.startswith("_")]),
        ("The names in `offbeat.extend`", offbeat.extend.__all__),
        ("Attach", [*inspect.signature(offbeat.attach).parameters]),
    ],
)
def test_a_table_of_the_page_lists_each_name_once(heading: str, names: list[str]) -> None:
    """A name more or less is a decision, made in two places."""
    assert sorted(names_in_table(section("api", heading))) == sorted(names)


def test_a_change_of_the_public_api_is_recorded() -> None:
    """An intended change needs `make api` and, if users must act, a line in CHANGELOG.md."""
    recorded = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    changes = [*difflib.unified_diff(recorded, public_api().splitlines(), lineterm="", n=16)][2:]
    if changes:
        heading = "the public API has changed; if this is intended, run `make api`:"
        pytest.fail("\n".join([heading, *changes]), pytrace=False)


@pytest.mark.parametrize("page", ["api", "choosing", "quantization", "strategies"])
def test_a_page_that_lists_the_baselines_lists_all(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    names = {kind.__name__ for kind in baselines.PUBLISHED.values()}
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_the_first_page_quotes_the_measurement() -> None:
    """Times to target, and the range of streaming averaging, are those of the README's table."""
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    (quote,) = (one for one in text.split("\n\n") if "(evidence.md#the-table-of-the-readme)" in one)
    rows = [line.split("|") for line in (ROOT / "README.md").read_text("utf-8").splitlines()]
    times = {row[1].split("`")[1]: row[2] for row in rows if len(row) == 6 and "`" in row[1]}
    expected = re.findall(r"\d+\.\d", times["streaming"])
    expected += [times[name].split()[0] for name in ("bsp", "ideal")]
    assert re.findall(r"\b\d+\.\d\b", quote) == expected
