"""Help and shell completion are fast, because they do not import torch."""

import json
import sys
from typing import Any

import typer

from cli.commands import ended
from offbeat import cli
from offbeat_lab.cli.commands import Panel

HELP = """
import contextlib, io, json, sys
from offbeat import cli

def shown(*argv):
    sys.argv = ["offbeat", *argv]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        cli.main()
    return out.getvalue()

pages = [shown("--help"), shown("--version")]
pages += [shown(one.__name__.replace("_", "-"), "--help") for one in cli.commands]
print(json.dumps([[len(page) for page in pages], sorted({"torch", "numpy"} & {*sys.modules})]))
"""


def test_help_and_version_do_not_import_torch() -> None:
    """This holds for the help of every command, and also for numpy."""
    code, out, err = ended(sys.executable, "-c", HELP)
    assert (code, err) == (0, "")
    lengths, imported = json.loads(out)
    assert imported == []
    assert lengths[1] == len("offbeat 0.1.0\n")
    assert min(lengths[:1] + lengths[2:]) > 300, "each is a page"


COMPLETE = """
import contextlib, io, json, os, sys
from offbeat import cli

answers = []
for typed in json.loads(sys.argv[1]):
    word = str(len(typed.split()) - 1)
    os.environ.update(_OFFBEAT_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=word)
    sys.argv = ["offbeat"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        cli.main()
    answers.append(out.getvalue().split())
print(json.dumps([answers, "torch" in sys.modules]))
"""


def test_the_shell_completes_without_torch() -> None:
    """Commands, options, and the values of options that have few."""
    offered: dict[str, list[str]] = {
        "offbeat s": ["store", "strategies"],
        "offbeat compare digits --wi": ["--wire"],
        "offbeat compare digits --wire int": ["int8", "int4", "int2"],
        "offbeat compare digits -s s": ["selsync", "streaming"],
        "offbeat plan --strategy b": ["bsp"],
    }
    program = COMPLETE.replace("sys.argv[1]", repr(json.dumps([*offered])))
    code, out, err = ended(sys.executable, "-c", program)
    assert (code, err) == (0, "")
    assert json.loads(out) == [[*offered.values()], False]


def test_compare_has_at_most_30_options() -> None:
    """Without ``--help``. Each is in one of the groups."""
    app: Any = typer.main.get_command(cli.app)
    options = [one for one in app.commands["compare"].params if one.param_type_name == "option"]
    assert len(options) <= 30
    assert {one.rich_help_panel for one in options} == {*Panel}
