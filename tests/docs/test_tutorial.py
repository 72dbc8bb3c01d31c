"""The tutorial runs: the commands of its page, from which its notebook is made."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands import ENVIRONMENT
from docs.notebook import NOTEBOOK, PAGE, notebook
from pages import SHELL, blocks_of, files_of

LIMIT = 300.0  # seconds that one command may take on a busy machine
SHAPED = "sh slow.sh "


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
@pytest.mark.timeout(1500)
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
