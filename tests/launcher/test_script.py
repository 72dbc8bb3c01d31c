"""A script in a worker process: as under ``python``, except for the exit codes of our errors."""

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from offbeat.launcher.launch import start_process
from offbeat.launcher.script import run_worker

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="workers need Linux or macOS")

METHODS = ["spawn", *["forkserver"] * (sys.platform == "linux")]
STATE = """
import json, multiprocessing, os, sys
state = [sys.argv, sys.path[0], __name__, "torch" in sys.modules, os.path.realpath("/dev/stdin")]
state += [multiprocessing.current_process().name, multiprocessing.get_start_method()]
print(json.dumps(state))
"""


class Ended(NamedTuple):
    returncode: int | None
    stdout: str
    stderr: str


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Run a program in a worker process to its end."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str, is_module: bool = False, method: str = "spawn", **variables: str) -> Ended:
        context = multiprocessing.get_context(method)
        pipes = [context.Pipe(duplex=False) for _ in range(3)]
        ends = [write for _, write in pipes]
        process = start_process(context, run_worker, argv, is_module, variables, *ends)
        for _, write in pipes:
            write.close()
        process.join(60)
        texts = []
        for read, _ in pipes[:2]:
            with read, open(read.fileno(), closefd=False) as file:
                texts.append(file.read())
        return Ended(process.exitcode, *texts)

    return run


@pytest.mark.parametrize("method", METHODS)
def test_a_script_is_run_as_by_python(
    method: str, run: Callable[..., Ended], tmp_path: Path
) -> None:
    """Arguments, path of imports and name are the same; torch is not imported before."""
    folder = tmp_path / "below"
    folder.mkdir()
    (folder / "state.py").write_text(STATE)
    argv = ["below/state.py", "--lr", "0.1", "-m"]
    ours = run(*argv, method=method)
    plain = subprocess.run(
        [sys.executable, *argv],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ours.returncode, ours.stderr) == (0, "")
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    assert json.loads(ours.stdout)[:4] == [argv, str(folder), "__main__", False]


def test_a_module_is_run_as_by_python(run: Callable[..., Ended], tmp_path: Path) -> None:
    """It is found in the current directory; its own path is the first argument."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(STATE)
    ours = run("package.train", "--lr", "0.1", is_module=True)
    assert (ours.returncode, ours.stderr) == (0, "")
    argv = [str(tmp_path / "package" / "train.py"), "--lr", "0.1"]
    assert json.loads(ours.stdout)[:4] == [argv, str(tmp_path), "__main__", False]


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('wrong')", 1, "wrong\n"),
        ("raise errors.EndedError('the training has ended')", 0, "the training has ended\n"),
        ("raise errors.MismatchError('other model')", 78, "MismatchError: other model\n"),
        ("raise errors.CommunicationTimeout('late')", 75, "CommunicationTimeout: late\n"),
        ("raise errors.AttachError('no')", 1, "AttachError: no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n"),
        ("import no_such_module", 1, "ModuleNotFoundError: No module named 'no_such_module'\n"),
        ("(", 1, "SyntaxError: '(' was never closed\n"),
    ],
)
def test_exit_codes(
    line: str, code: int, message: str, run: Callable[..., Ended], tmp_path: Path
) -> None:
    """The traceback begins in the script."""
    (tmp_path / "train.py").write_text(f"from offbeat import errors\n{line}\n")
    done = run("train.py")
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.endswith(message)
    if code in (1, 75, 78) and "Traceback" in done.stderr:
        assert done.stderr.splitlines()[1].strip() == 'File "train.py", line 2, in <module>'


def test_exit_functions_know_the_error(run: Callable[..., Ended], tmp_path: Path) -> None:
    """Then no warning follows that the training has not called ``finish``."""
    (tmp_path / "train.py").write_text(
        "import atexit, sys\natexit.register(lambda: print(repr(sys.last_value)))\n1 / 0\n"
    )
    assert run("train.py").stdout == "ZeroDivisionError('division by zero')\n"


@pytest.mark.parametrize("method", METHODS)
def test_lines_are_written_at_once_and_exit_functions_run(
    method: str, run: Callable[..., Ended], tmp_path: Path
) -> None:
    """Output goes to a pipe, which would delay it until the end or lose it by a kill."""
    (tmp_path / "train.py").write_text(
        "import atexit, os, signal\n"
        "atexit.register(print, 'at exit')\n"
        "print('line')\n"
        "if os.environ.get('KILL'): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert run("train.py", method=method) == (0, "line\nat exit\n", "")
    assert run("train.py", method=method, KILL="1") == (-9, "line\n", "")
