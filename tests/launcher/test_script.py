"""A script in a worker process: as under ``python``, except for the exit codes of our errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = (sys.executable, "-m", "offbeat.launcher.script")
STATE = """
import json, os, sys
print(json.dumps([sys.argv, sys.path[0], __name__, "torch" in sys.modules]))
"""


def run(*argv: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SCRIPT, *argv], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_script_is_run_as_by_python(tmp_path: Path) -> None:
    """Arguments, path of imports and name are the same; torch is not imported before."""
    folder = tmp_path / "below"
    folder.mkdir()
    (folder / "state.py").write_text(STATE)
    argv = ["below/state.py", "--lr", "0.1", "-m"]
    ours = run("script", *argv, folder=tmp_path)
    plain = subprocess.run([sys.executable, *argv], cwd=tmp_path, capture_output=True, text=True)
    assert (ours.returncode, ours.stderr) == (0, "")
    assert json.loads(ours.stdout) == json.loads(plain.stdout)
    assert json.loads(ours.stdout) == [argv, str(folder), "__main__", False]


def test_a_module_is_run_as_by_python(tmp_path: Path) -> None:
    """It is found in the current directory; its own path is the first argument."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(STATE)
    ours = run("module", "package.train", "--lr", "0.1", folder=tmp_path)
    assert (ours.returncode, ours.stderr) == (0, "")
    argv = [str(tmp_path / "package" / "train.py"), "--lr", "0.1"]
    assert json.loads(ours.stdout) == [argv, str(tmp_path), "__main__", False]


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
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt\n"),
        ("import no_such_module", 1, "ModuleNotFoundError: No module named 'no_such_module'\n"),
        ("(", 1, "SyntaxError: '(' was never closed\n"),
    ],
)
def test_exit_codes(line: str, code: int, message: str, tmp_path: Path) -> None:
    """The traceback begins in the script."""
    (tmp_path / "train.py").write_text(f"from offbeat import errors\n{line}\n")
    done = run("script", "train.py", folder=tmp_path)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.endswith(message)
    if code in (1, 75, 78) and "Traceback" in done.stderr:
        assert done.stderr.splitlines()[1].strip() == 'File "train.py", line 2, in <module>'


def test_lines_are_written_at_once_and_exit_functions_run(tmp_path: Path) -> None:
    """Output goes to a pipe, which would delay it until the end or lose it by a kill."""
    (tmp_path / "train.py").write_text(
        "import atexit, os, signal\n"
        "atexit.register(print, 'at exit')\n"
        "print('line')\n"
        "if os.environ.get('KILL'): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = run("script", "train.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "line\nat exit\n")
    killed = subprocess.run(
        ["env", "KILL=1", *SCRIPT, "script", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (killed.returncode, killed.stdout) == (-9, "line\n")
