"""The commands ``run`` and ``store``, with real launchers and workers."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cells import nightly, some
from cli.commands import COMMAND, LIMIT, alive, ended, started, until

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc"),
    pytest.mark.skipif(sys.platform == "win32", reason="needs Linux or macOS"),
]

# A worker writes its state to a file, then waits for the file "end" or "end-HOST".
SCRIPT = """
import json, os, sys, time
rank, starts = os.environ["LOCAL_RANK"], os.environ["OFFBEAT_RESTARTS"]
state = {"pid": os.getpid(), "argv": sys.argv[1:], "torch": "torch" in sys.modules}
state["environment"] = dict(os.environ)
host = os.environ.get("HOST", "one")
name = f"{host}-{rank}-{starts}"
with open(f"{name}.part", "w") as file:
    json.dump(state, file)
os.replace(f"{name}.part", f"{name}.json")
print(name)
while not (os.path.exists("end") or os.path.exists(f"end-{host}")):
    time.sleep(0.02)
"""
WARM = pytest.param(False, marks=pytest.mark.skipif(sys.platform != "linux", reason="forks"))
ONE_ADDRESS = re.compile(r"offbeat: on another machine: (offbeat run --join \S+ --here 1 .*)")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def state(name: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the state of a worker, once it has written it."""
    path = Path(f"{name}.json")

    def there() -> bool:
        assert path.exists() or process.poll() is None, process.communicate()
        return path.exists()

    until(there, f"the state of worker {name}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


@contextlib.contextmanager
def killed(*pids: int) -> Iterator[None]:
    """Kill these processes after a failed test."""
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("fresh", [WARM, *nightly([True])], ids=["warm", "fresh"])
def test_a_killed_worker_is_started_again(fresh: bool, folder: Path) -> None:
    """The variables are those of torchrun with one worker each, and the address of the store."""
    options = ["--fresh"] * fresh
    with started(*COMMAND, "run", "-n", "2", *options, "train.py", "--lr", "1", "-n") as process:
        first = [state(f"one-{rank}-0", process) for rank in range(2)]
        os.kill(first[1]["pid"], signal.SIGKILL)
        again = state("one-1-1", process)
        (folder / "end").touch()
        code, out, err = end(process)
    assert code == 0, err
    for rank, restarts, found in ((0, 0, first[0]), (1, 0, first[1]), (1, 1, again)):
        expected = {
            **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OFFBEAT_WORKERS": "2"},
            "OFFBEAT_RESTARTS": str(restarts),
        }
        assert found["environment"].items() >= expected.items()
        assert found["argv"] == ["--lr", "1", "-n"]
        assert found["torch"] is not fresh
    addresses = {found["environment"]["OFFBEAT_STORE"] for found in (*first, again)}
    assert len(addresses) == 1
    assert re.fullmatch(r"127\.0\.0\.1:\d+", addresses.pop())
    assert sorted(out.splitlines()) == ["[0] one-0-0", "[1] one-1-0", "[1] one-1-1"]
    assert "offbeat: worker 1 was ended by SIGKILL; again in 0.1 s (1 of 3)\n" in err


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
@pytest.mark.parametrize("fresh", some([False, True], 0), ids=["warm", "fresh"])
def test_no_worker_outlives_a_killed_launcher(fresh: bool, folder: Path) -> None:
    with started(*COMMAND, "run", "-n", "2", *["--fresh"] * fresh, "train.py") as process:
        pids = [state(f"one-{rank}-0", process)["pid"] for rank in range(2)]
        with killed(*pids):
            process.kill()
            until(lambda: not any(map(alive, pids)), "the end of every worker", 10)


def test_a_script_that_fails_is_given_up(folder: Path) -> None:
    """Its exit code is the launcher's. A module is found in the current folder."""
    (folder / "failing.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(5)\n")
    argv = ["run", "-n", "1", "--max-restarts", "1", "--fresh", "-m", "failing", "-m", "x"]
    code, out, err = ended(*COMMAND, *argv)
    assert code == 5, err
    assert out == "[0] ['-m', 'x']\n" * 2
    assert err.endswith("worker 0 ended with exit code 5; not again (--max-restarts 1)\n")


@pytest.mark.nightly
def test_two_launchers_share_a_training(folder: Path) -> None:
    """The first prints the command for the second, and keeps the store until that has ended."""
    argv = ["run", "-n", "2", "--here", "1", "--store", "127.0.0.1:0", "--fresh"]
    with started(*COMMAND, *argv, "train.py", "--lr", "a b", HOST="first") as first:
        found = [state("first-0-0", first)]
        assert first.stderr is not None
        lines = iter(first.stderr.readline, "")
        command = next(match[1] for line in lines if (match := ONE_ADDRESS.match(line)))
        words = shlex.split(command)
        assert words[-3:] == ["train.py", "--lr", "a b"]
        words.insert(2, "--fresh")
        with started(*COMMAND, *words[1:], HOST="second") as second:
            found.append(state("second-0-0", second))
            (folder / "end-first").touch()
            assert any(line.startswith("offbeat: keeping the store for") for line in lines)
            assert (first.poll(), second.poll()) == (None, None)
            (folder / "end").touch()
            assert end(second)[0] == 0
        code, _, err = end(first)
        assert code == 0, err
    for one in found:
        assert one["environment"]["OFFBEAT_WORKERS"] == "2"
        assert one["environment"]["OFFBEAT_STORE"] == words[words.index("--join") + 1]
        assert one["environment"]["LOCAL_WORLD_SIZE"] == "1"


@pytest.mark.nightly
def test_a_store_of_its_own_outlives_launchers(folder: Path) -> None:
    """SIGTERM ends it with exit code 0."""
    (folder / "end").touch()
    with started(*COMMAND, "store", "--port", "0", "--host", "127.0.0.1") as process:
        assert process.stderr is not None
        lines: list[str] = []
        while len(lines) < 2:
            line = process.stderr.readline()
            assert line
            if line.startswith("offbeat: "):  # torch may warn that this machine's name is unknown
                lines.append(line)
        address = lines[0].split()[-1]
        assert lines[0] == f"offbeat: the store is at {address}\n"
        assert lines[1].startswith(f"offbeat: on each machine: offbeat run --join {address} ")
        for host, workers in (("first", ["-n", "2:3"]), ("second", [])):
            argv = ["run", "--join", address, *workers, "--fresh", "train.py"]
            code, _, err = ended(*COMMAND, *argv, HOST=host)
            assert code == 0, err
            variables = json.loads(Path(f"{host}-0-0.json").read_text())["environment"]
            assert variables["OFFBEAT_WORKERS"] == "2:3"
            assert variables["OFFBEAT_STORE"] == address
        process.send_signal(signal.SIGTERM)
        assert end(process)[0] == 0
