"""Every command in the shell blocks of the documentation exists.

A line of ``offbeat`` goes through the real command line, up to the point where something would run;
the nightly run lets it run for a few steps. Of others what they name has to exist: options, targets
of make, extras, files.
"""

import importlib.util
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from benchmarks.__main__ import NAMES
from torch.distributed.run import get_args_parser

from cli.commands import Call, ended
from offbeat import cli
from offbeat.cli import checkpoints
from offbeat.launcher import launch
from offbeat.launcher import store as launch_store
from offbeat_lab.cli import runs, workers
from offbeat_lab.launch import runners
from offbeat_lab.launch.cluster import Cluster
from pages import ROOT, SHELL, Block, blocks_in, code_on, files_of, pages

BLOCKS = [one for one in blocks_in(*SHELL) if one.way != "file"]
APP: Any = typer.main.get_command(cli.app)
STEPS = ["--max-steps", "3", "--evaluations", "1"]
SHORT = {"compare": [*STEPS, "--seeds", "1"]}
OTHER_OPTIONS = {"--cpu-bind", "--gpus-per-node", "--ntasks-per-node", "--extra-index-url"}
# Nothing can be said here about the arguments of these.
OTHERS = {"apt-get", "ip", "mypy", "codespell", "export", "cd", "git", "source", "nft"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


class ReachedError(Exception):
    """The command line has found no mistake and would start."""


def commands_of(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command, without environment variables."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.match(r"\w+=", words[0]):
            words = words[1:]
        if words:
            own = words[0].startswith("examples/")
            yield [words[0] if own else Path(words[0]).name, *words[1:]]


def offbeat_of(words: list[str]) -> list[str] | None:
    """Return the arguments of ``offbeat``, run directly or under a launcher."""
    if words[0] == "offbeat":
        return words[1:]
    if "offbeat.cli" in words and words[0] == "torchrun":
        return words[words.index("offbeat.cli") + 1 :]
    return None


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Block], None]:
    """Enter a folder with the files of a block's page and of the repository."""

    def enter(block: Block) -> None:
        for name in ("examples", "benchmarks", "constraints.txt"):
            (tmp_path / name).symlink_to(ROOT / name)
        for name, code in files_of(block.page).items():
            (tmp_path / name).write_text(code)
            monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
        own = tmp_path / "path" / "to" / "model.py"
        own.parent.mkdir(parents=True)
        own.write_text(code_on("comparing", "def spirals"))
        shutil.copy(ROOT / "examples" / "train_selsync.py", tmp_path / "train.py")
        monkeypatch.chdir(tmp_path)

    return enter


@pytest.fixture
def begin(call: Call, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Run a line of ``offbeat`` up to the point where it would measure, connect or train."""

    def reached(*args: Any, **kwargs: Any) -> Any:
        raise ReachedError

    def main(words: list[str]) -> None:
        if words[0] != "offbeat":
            monkeypatch.setenv("RANK", "0")
            monkeypatch.setenv("WORLD_SIZE", "2")
        argv = offbeat_of(words)
        assert argv is not None
        try:
            code, _, err = call(*argv)
        except ReachedError:
            return
        assert (code, err) == (0, "")

    monkeypatch.setattr(runs.comparison, "run_and_record", reached)
    monkeypatch.setattr(runs.comparison, "compare", reached)
    monkeypatch.setattr(workers, "ShapedLinks", reached)
    monkeypatch.setattr(runs, "measure_recipe", reached)
    monkeypatch.setattr(runners.dist, "init_process_group", reached)
    monkeypatch.setattr(launch, "await_store", reached)
    monkeypatch.setattr(launch, "_context", reached)
    monkeypatch.setattr(checkpoints.conversion, "to_dcp", reached)
    monkeypatch.setattr(launch_store, "listen", reached)
    return main


def parse(words: list[str]) -> None:
    """Parse a line of ``offbeat`` that cannot run here."""
    command, *rest = offbeat_of(words) or [""]
    if command.startswith("-"):
        assert command in {one for option in APP.params for one in option.opts}
        return
    APP.commands[command].make_context(command, rest)


def check(words: list[str]) -> None:
    """Check the files, options and targets that another line names."""
    name, *rest = words
    named = [one for one in words if one.startswith("examples/")]
    assert all(Path(one).exists() for one in named), named
    if name == "torchrun":
        told = get_args_parser().parse_args(rest)
        assert told.module or Path(told.training_script).exists(), told.training_script
    elif name == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in (one for one in rest if "=" not in one):
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
    elif name == "pip":
        for extra in re.findall(r"\.\[([\w,]+)\]", " ".join(rest)):
            assert set(extra.split(",")) <= PROJECT["optional-dependencies"].keys()
        if "-c" in rest:
            assert Path(rest[rest.index("-c") + 1]).exists()
    elif name.startswith("python"):
        module = rest[1] if rest[0] == "-m" else None
        if module == "benchmarks":
            for one in (one for one in rest[2:3] if one[0] != "-"):
                assert one in (*NAMES, "evidence"), one
        elif module and module.startswith("benchmarks."):  # not on the path of ``call``
            path = ROOT.joinpath(*module.split("."))
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
        else:
            assert importlib.util.find_spec(module) if module else Path(rest[0]).exists(), rest
    elif name in ("sbatch", "kubectl"):
        assert named
    elif name in ("ruff", "mkdocs", "srun"):
        assert rest
    elif name == "sh":  # a script that runs another command
        assert Path(rest[0]).exists(), rest[0]
        check(rest[1:])
    else:
        assert name in named or name in OTHERS, f"nothing is known of {name}"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_command_on_a_page_is_accepted(
    block: Block, reader: Callable[[Block], None], begin: Callable[[list[str]], None]
) -> None:
    """Options exist, strategies and units parse, files and targets are there."""
    reader(block)
    for words in commands_of(block):
        if offbeat_of(words) is None or words[0] == "torchrun":
            check(words)
        if offbeat_of(words) is not None:
            parse(words)
            if block.way is None:
                begin(words)


@pytest.mark.parametrize("page", pages())
def test_an_option_in_the_text_of_a_page_exists(page: str) -> None:
    """Text in backquotes that begins with an option names one of offbeat, torchrun, Slurm, pip."""
    options = {one for command in APP.commands.values() for p in command.params for one in p.opts}
    options |= set(get_args_parser()._option_string_actions) | OTHER_OPTIONS
    found = re.findall(r"(?<!`)`(--[a-z-]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert set(found) <= options


def runnable() -> list[Block]:
    """Return the blocks that call only this project."""
    found = [one for one in BLOCKS if one.way is None]
    return [b for b in found if any(offbeat_of(one) or is_script(one) for one in commands_of(b))]


def is_script(words: list[str]) -> bool:
    """A program under torchrun, on one machine."""
    return words[0] == "torchrun" and "--nnodes" not in words


@pytest.mark.nightly
@pytest.mark.timeout(300)  # five strategies on four processes each
@pytest.mark.parametrize("block", runnable(), ids=str)
def test_a_command_on_a_page_runs(
    block: Block, reader: Callable[[Block], None], call: Call
) -> None:
    """Commands that train run for three steps and one seed."""
    reader(block)
    for words in commands_of(block):
        argv = offbeat_of(words)
        shaped = "--bandwidth" in words and "--simulate" not in words
        if shaped and argv and argv[0] == "compare" and Cluster.why_not() is not None:
            continue
        short = SHORT.get(argv[0], []) if argv else []
        for flag in short[::2]:  # an option can be given only once
            if flag in words:
                start = words.index(flag)
                del words[start : start + 2]
        if words[0] == "offbeat":
            code, _, err = call(*words[1:], *short)
        elif words[0] == "torchrun":
            run = ("-m", "torch.distributed.run", *words[1:], *short)
            code, _, err = ended(sys.executable, *run)
        else:
            continue
        assert code == 0, err
