"""The command lines of the benchmarks find their modules."""

import importlib
from collections.abc import Callable

import pytest
from benchmarks.__main__ import NAMES, main
from benchmarks.harness import ROOT
from benchmarks.papers.__main__ import main as papers


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_has_results(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.{NAMES[name]}").results)


def test_every_cost_has_a_name() -> None:
    costs = {f"costs.{path.stem}" for path in (ROOT / "benchmarks" / "costs").glob("[!_]*.py")}
    assert costs <= {*NAMES.values()}


@pytest.mark.parametrize(("command", "known"), [(main, "trigger"), (papers, "speedup")])
def test_an_unknown_name_is_refused(
    command: Callable[[list[str]], None], known: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command([known, "nonsense"])
    assert f"unknown: nonsense; there are {known}, " in capsys.readouterr().err
