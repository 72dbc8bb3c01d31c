"""The command lines of the benchmarks find their modules."""

import importlib
from collections.abc import Callable

import pytest
import torch
from benchmarks.__main__ import NAMES, main
from benchmarks.harness import ROOT
from benchmarks.papers.__main__ import NAMES as PAPERS
from benchmarks.papers.__main__ import main as papers


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_has_results(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.{NAMES[name]}").results)


@pytest.mark.parametrize("name", PAPERS)
def test_every_figure_of_the_papers_is_measured(name: str) -> None:
    study, _, variant = name.partition("-")
    module = importlib.import_module(f"benchmarks.papers.{study}")
    assert callable(module.measure)
    assert not variant or variant in module.STUDIES


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_costs_on_a_gpu_need_one() -> None:
    with pytest.raises(SystemExit, match="there is no GPU"):
        main(["gpu"])


@pytest.mark.nightly
def test_costs_on_a_gpu_are_tried_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """A small model: each method trains, and streaming averages the model."""
    main(["gpu", "--quick"])
    out = capsys.readouterr().out
    assert "streaming, 2 workers: steps a pass of the model" in out
    assert "ddp, 2 workers: longest step / median alone" in out
