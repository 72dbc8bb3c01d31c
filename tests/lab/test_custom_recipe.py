"""The custom recipe of the documentation, in every place where a recipe can be used."""

import os
import re
import sys
from pathlib import Path

import pytest

from offbeat import Compute, Network
from offbeat_lab.compare import run_and_record
from offbeat_lab.job import Job
from offbeat_lab.launch.runners import Loopback, VirtualCluster
from offbeat_lab.recipes import find_recipe
from offbeat_lab.timing.step_time import measure_recipe
from pages import code_on

CODE = code_on("comparing", "def spirals")


@pytest.fixture
def spirals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the documented file, in the current directory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spirals.py").write_text(CODE)
    return tmp_path / "spirals.py"


def place() -> VirtualCluster:
    return VirtualCluster(Network("100Mbit/s"), Compute("5ms"))


def ignore(event: object) -> None:
    """Ignore an event."""


def test_it_is_found(spirals: Path) -> None:
    """The path may be relative or absolute, with or without the name."""
    for name in ("spirals.py", "spirals.py:spirals", str(spirals), f"./{spirals.name}:spirals"):
        found = find_recipe(name)
        assert (found.metric, found.target, found.epochs) == ("accuracy", 0.95, 10)
        assert found.description == "Three arms of a spiral, two layers of 64."


def test_processes_and_simulator_agree(spirals: Path) -> None:
    """Worker processes load the file, get ``--data``, clip gradients, and have the same metrics."""
    code = CODE.replace(
        "    arm, t =", '    assert (setup.data / "spirals.py").exists()\n    arm, t ='
    )
    spirals.write_text(code.replace("scheduler=", "clip_norm=0.5, scheduler="))
    job = Job("spirals.py", "local:period=4", 2, epochs=1, evaluations=2, data=str(spirals.parent))
    real, virtual = (run_and_record(job, ignore, where) for where in (Loopback(), place()))
    assert [point.step for point in real.points] == [point.step for point in virtual.points]
    for one, other in zip(real.points, virtual.points, strict=True):
        assert one.metric == one.metrics["accuracy"] == pytest.approx(other.metric, abs=2 / 1000)


def test_a_changed_file_is_executed_again(spirals: Path) -> None:
    assert find_recipe("spirals.py").target == 0.95
    spirals.write_text(CODE.replace("target=0.95", "target=0.5"))
    os.utime(spirals, ns=(1, 1))
    assert find_recipe("spirals.py").target == 0.5


def test_it_can_import_neighbouring_files(spirals: Path) -> None:
    (spirals.parent / "beside_spirals.py").write_text("LR = 0.1\n")
    spirals.write_text(
        CODE.replace("import torch\n", "import torch\nfrom beside_spirals import LR\n", 1)
    )
    assert find_recipe("spirals.py").target == 0.95


# Mistakes


def with_end(body: str) -> str:
    """Return the documented file with another end of its function."""
    return f"{CODE[: CODE.index('    return Task(')]}{body}\n"


MISTAKES = [
    ("x = (", r"{file}, line 1: it cannot be run: SyntaxError: .*"),
    ("import no_such_module", r"{file}, line 1: .*: No module named 'no_such_module'"),
    ("x = 1", r"spirals.py has no recipe: mark a function f\(setup\) with @offbeat_lab.recipe.*"),
    (CODE.replace("nn.Linear(2, 64)", "nn.Linear(3, 64)"), r"{file}, line \d+: loss: Runtime.*"),
    (CODE.replace('"accuracy": 1', '"top-1": 1'), r"{file}: evaluate gives top-1, but .*accuracy'"),
    (CODE.replace("batch[1])", "batch[1]).item()", 1), r"{file}: loss: TypeError: it must be .*"),
    (
        with_end("    return model"),
        r"{file}: spirals: TypeError: it must return an offbeat.*Task.*",
    ),
    (
        with_end("    return 1 / 0"),
        r"{file}, line \d+: spirals: ZeroDivisionError: division by zero",
    ),
    (CODE.replace("epochs=10", "epochs=0"), r"{file}, line \d+: .*: epochs must be positive.*"),
    (CODE.replace("batch_size=32", "batch_size=0"), r"{file}, line \d+: spirals: Value.* got 0"),
    (CODE.replace("accuracy(T", "print or (T"), r"{file}, line \d+: .*: evaluate must be a Held.*"),
    (CODE.replace("accuracy(Tensor", "accuracy(5 or Tensor"), r"{file}: evaluate: TypeError: .*"),
    (
        f"{CODE}\n\n@recipe(metric='m', target=1, epochs=1)\ndef other(setup):\n    pass\n",
        r"spirals.py has spirals, other: name one, as in spirals.py:spirals",
    ),
]


@pytest.mark.parametrize(("code", "message"), MISTAKES)
def test_errors_are_one_line(spirals: Path, code: str, message: str) -> None:
    """They name the file and, if there is one, the line, before any worker starts."""
    spirals.write_text(code)
    with pytest.raises(ValueError, match=r".") as caught:
        Job("spirals.py", "bsp", 2).check()
    text = str(caught.value)
    assert "\n" not in text
    with pytest.raises(ValueError, match=re.escape(text)):
        measure_recipe("spirals.py")
    assert re.fullmatch(message.format(file=re.escape(str(spirals))), text), text


def test_missing_files_and_names_are_errors(spirals: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"looked for the recipe no\.py:x in no\.py, which"):
        find_recipe("no.py:x")
    with pytest.raises(ValueError, match=r"spirals\.py has no recipe 'x'; it has spirals"):
        find_recipe("spirals.py:x")
