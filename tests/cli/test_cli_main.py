"""The command itself: entry point, exit codes, help."""

import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

import offbeat
from cli.commands import Call, ended
from offbeat import cli
from offbeat_lab.cli import runs
from offbeat_lab.job import Job
from offbeat_lab.recipes import RECIPES

COMMANDS = (
    *("compare", "report", "recipes"),
    *("run", "store", "plan", "strategies", "to-dcp"),
)
APP: Any = typer.main.get_command(cli.app)


def test_the_installed_command_is_this_one() -> None:
    """The script that pip makes calls ``main``."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    entry = tomllib.loads(project.read_text())["project"]["scripts"]["offbeat"]
    module, name = entry.split(":")
    assert getattr(importlib.import_module(module), name) is cli.main


def test_version(call: Call) -> None:
    assert call("--version") == (0, f"offbeat {offbeat.__version__}\n", "")


def test_without_a_command_the_commands_are_shown(call: Call) -> None:
    """`offbeat` alone names every command."""
    code, out, err = call()
    assert (code, err) == (2, "")
    assert tuple(APP.commands) == COMMANDS
    for command in COMMANDS:
        assert re.search(rf"\b{command} {{2,}}\w", out + err)


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_of_the_help_are_accepted(command: str, call: Call) -> None:
    """The help of each command has examples; they parse, and name what there is."""
    code, out, err = call(command, "--help")
    assert (code, err) == (0, "")
    start = re.compile(rf"(torchrun .* -m offbeat\.cli|offbeat) {command}\b")
    examples = [line.strip() for line in out.splitlines() if start.match(line.strip())]
    assert examples
    for example in examples:
        words = shlex.split(example)
        argv = words[words.index(command) + 1 :]
        told = APP.commands[command].make_context(command, argv).params
        recipe = told.get("recipe") or told.get("model")
        assert recipe in {None, "path/to/file.py", *RECIPES}
        if recipe in RECIPES and "data" in told:
            assert (told["data"] is not None) == (RECIPES[recipe].needs_data is not None)
        texts = told.get("strategy") or ()
        for text in [texts] if isinstance(texts, str) else texts:
            Job("digits").under(text).check_method()
    if command == "compare":
        assert any("--simulate" in example for example in examples)


def test_a_programming_error_is_not_swallowed(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only errors that a user can act on become one line."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(runs.comparison, "run_and_record", fail)
    monkeypatch.setattr("sys.argv", ["offbeat", "compare", "digits"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_the_package_runs_as_a_module() -> None:
    """``python -m`` with the short flag of the help. Other tests run ``offbeat.cli``."""
    code, out, err = ended(sys.executable, "-m", "offbeat", "recipes", "-h")
    assert (code, err) == (0, "")
    assert "List the recipes" in out


WITHOUT = """
import importlib.util, sys

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "jinja2" else find(name, *more)
from offbeat import cli

assert not any(name.startswith("offbeat_lab") for name in sys.modules)
cli.main()
"""


def test_without_its_extra_the_laboratory_is_named() -> None:
    """Its commands are not in the help. One that is given says in a line how to install them."""
    code, out, err = ended(sys.executable, "-c", WITHOUT, "--help")
    assert (code, err) == (0, "")
    assert "plan" in out
    assert "compare" not in out
    for command in ("compare", "report", "recipes"):
        line = f"error: `offbeat {command}` needs the extra lab: pip install 'offbeat[lab]'\n"
        assert ended(sys.executable, "-c", WITHOUT, command, "digits") == (2, "", line)
