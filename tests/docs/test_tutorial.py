"""The tutorial runs: the commands of its page, and the notebook that is made from it."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.commands import ENVIRONMENT
from docs.notebook import NOTEBOOK, PAGE, notebook
from pages import SHELL, blocks_of, files_of

LIMIT = 300.0  # seconds that one command may take on a busy machine
SHAPED = "sh slow.sh "
LONG = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def permitted() -> bool:
    """Whether this system lets a process create a network namespace, as slow.sh does."""
    probe = (
        "ip link set lo mtu 1500 up; tc qdisc add dev lo root tbf rate 1mbit burst 9kb limit 9kb"
    )
    try:
        argv = ["unshare", "--map-root-user", "--net", "sh", "-ec", probe]
        return subprocess.run(argv, capture_output=True, timeout=30, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def environment() -> dict[str, str]:
    """This Python and its torchrun come first, and import Offbeat from here."""
    paths = os.pathsep.join(one for one in sys.path if one)
    first = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**ENVIRONMENT, "PYTHONPATH": paths, "PATH": first}


def require_lines(expected: str, output: str) -> None:
    """Each expected line is in the output: figures may differ, and … stands for any text."""
    for line in expected.splitlines():
        pattern = re.sub(r"\d+", r"\\d+", re.escape(line)).replace("…", ".*")
        assert re.search(pattern, output), f"{line!r} is not in\n{output}"


def test_the_notebook_is_made_from_the_page() -> None:
    """Run ``PYTHONPATH=tests python tests/docs/notebook.py`` if it is not."""
    assert NOTEBOOK.read_text(encoding="utf-8") == notebook()


@pytest.mark.pages
@LONG
def test_the_commands_of_the_tutorial_run(
    tmp_path: Path, permitted: bool, environment: dict[str, str]
) -> None:
    """From top to bottom, with the files of the page; each prints what the page shows."""
    for name, code in files_of(PAGE).items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    output = ""
    for block in blocks_of(PAGE):
        if block.language == "text":
            require_lines(block.code, output)
        elif block.language in SHELL and block.way != "file":
            code = block.code if permitted else block.code.replace(SHAPED, "")
            done = subprocess.run(
                ["sh", "-ec", code],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                encoding="utf-8",
                timeout=LIMIT,
                check=False,
            )
            output = done.stdout + done.stderr
            assert (done.returncode != 0) == (block.way == "raises"), output


@pytest.mark.nightly  # the same commands again
@pytest.mark.filterwarnings("default")  # of the packages of Jupyter
@LONG
def test_the_notebook_runs(
    tmp_path: Path,
    permitted: bool,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a kernel, from top to bottom; each cell prints what is stored as its output."""
    pytest.importorskip("ipykernel", reason="the kernel of a notebook is not installed")
    nbclient: Any = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat: Any = pytest.importorskip("nbformat", reason="nbformat is not installed")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = nbformat.read(NOTEBOOK, as_version=4)
    shown = [printed(cell) for cell in made.cells]
    for cell in made.cells:
        if not permitted:
            cell.source = cell.source.replace(SHAPED, "")
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(made, timeout=LIMIT, resources=where).execute()
    for cell, expected in zip(made.cells, shown, strict=True):
        require_lines(expected, printed(cell))


def printed(cell: Any) -> str:
    """Return the text of a cell's output."""
    return "".join(one.text for one in cell.get("outputs", ()) if one.output_type == "stream")
