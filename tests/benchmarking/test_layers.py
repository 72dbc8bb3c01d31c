"""Imports between the benchmarks: downwards only, so that there is no cycle."""

import ast
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import ROOT

FOLDER = ROOT / "benchmarks"
# From the bottom up. A module imports only from levels below. A folder stands for all its modules.
LEVELS = [
    {"benchmarks.harness", "benchmarks.models"},
    {"benchmarks.processes", "benchmarks.run_cache", "benchmarks.lanes"},
    {"benchmarks.race"},
    {"benchmarks.costs", "benchmarks.timeline"},
    {"benchmarks.papers", "benchmarks.soak"},
    {"benchmarks.launched"},
    {"benchmarks.__main__"},
]
RACE = [
    {"slowdown", "studies"},
    {"tables", "run"},
    {"figures"},
    {"evidence"},
]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(FOLDER.rglob("*.py"))}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each module of the benchmarks that a file imports, with the line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found = f"{node.module}"
            names = [
                f"{found}.{one.name}" for one in node.names if f"{found}.{one.name}" in MODULES
            ]
            names = names or [found]
        else:
            continue
        yield from ((one, node.lineno) for one in names if one in MODULES)


def level(name: str, levels: list[set[str]]) -> int | None:
    for number, units in enumerate(levels):
        if any(name == one or name.startswith(f"{one}.") for one in units):
            return number
    return None


def unit(name: str) -> str:
    return ".".join(name.split(".")[:2])


def violations(modules: dict[str, Path]) -> list[str]:
    """Return all imports that do not point downwards, and all modules without a level."""
    race = [{f"benchmarks.race.{one}" for one in units} for units in RACE]
    found = []
    for name, path in modules.items():
        if name in ("benchmarks", "benchmarks.race"):
            continue
        own = level(name, LEVELS)
        if own is None or (unit(name) == "benchmarks.race" and level(name, race) is None):
            found.append(f"{name} has no level")
            continue
        for other, line in imports(path):
            if unit(other) != unit(name):
                wrong = (level(other, LEVELS) or 0) >= own
            else:
                upper, lower = level(name, race), level(other, race)
                wrong = upper is not None and lower is not None and lower >= upper
            if wrong:
                found.append(f"{path.relative_to(ROOT)}:{line} imports {other}")
    return found


def test_imports_point_downwards() -> None:
    assert violations(MODULES) == []


def test_no_module_imports_itself_over_others() -> None:
    """A cycle inside of a folder, which the levels above do not order, is found by its order."""
    graph = {name: {other for other, _ in imports(path)} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' → '.join((*path[path.index(name) :], name))}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_an_upward_import_is_found(tmp_path: Path) -> None:
    """The test above can fail."""
    upward = FOLDER / "race" / "upward.py"
    assert violations({"benchmarks.race.upward": upward}) == ["benchmarks.race.upward has no level"]
    wrong = FOLDER / "race" / "evidence.py"
    found = violations({"benchmarks.race.studies": wrong})
    assert any(one.endswith("imports benchmarks.race.figures") for one in found)
