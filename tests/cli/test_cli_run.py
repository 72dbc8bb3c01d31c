"""The commands ``run`` and ``store``, with real launchers and workers."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cells import nightly
from cli.commands import COMMAND, LIMIT, alive, ended, started, until

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc"),
    pytest.mark.skipif(sys.platform == "win32", reason="needs Linux or macOS"),
]

# A worker writes its state to a file, then waits for the file "end" or "end-HOST".
SCRIPT = """
import json, os, sys, time
rank, starts = os.environ["LOCAL_RANK"], os.environ["OFFBEAT_RESTARTS"]
state = {"pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv[1:]}
state |= {"torch": "torch" in sys.modules, "environment": dict(os.environ)}
host = os.environ.get("HOST", "one")
name = f"{host}-{rank}-{starts}"
with open(f"{name}.part", "w") as file:
    json.dump(state, file)
os.replace(f"{name}.part", f"{name}.json")
print(name)
while not (os.path.exists("end") or os.path.exists(f"end-{host}")):
    time.sleep(0.02)
"""
CHILD = """
import os, subprocess
with open(f"child-{os.environ['LOCAL_RANK']}", "w") as file:
    print(subprocess.Popen(["sleep", "300"]).pid, file=file)
"""
WARM = pytest.param(False, marks=pytest.mark.skipif(sys.platform != "linux", reason="forks"))


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


def children(parent: int) -> list[int]:
    """Return the processes that a process has started, such as its fork server."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in found.split()]


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
def test_no_process_outlives_a_killed_launcher(fresh: bool, folder: Path) -> None:
    """No worker, no process that one has started, no store and no fork server."""
    (folder / "train.py").write_text(f"{CHILD}{SCRIPT}")
    with started(*COMMAND, "run", "-n", "2", *["--fresh"] * fresh, "train.py") as process:
        pids = [state(f"one-{rank}-0", process)["pid"] for rank in range(2)]
        pids += [int(Path(f"child-{rank}").read_text()) for rank in range(2)]
        pids += (servers := children(process.pid))
        pids += [pid for server in servers for pid in children(server)]
        with killed(*pids):
            process.kill()
            until(lambda: not any(map(alive, pids)), "the end of every process", 30)


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forks on Linux")
def test_ctrl_c_ends_a_launcher_that_starts(folder: Path) -> None:
    """A terminal sends it to the launcher and the fork server, whose import of torch hangs here."""
    (folder / "torch").mkdir()
    hang = "import pathlib, time\npathlib.Path('importing').touch()\ntime.sleep(600)\n"
    (folder / "torch" / "__init__.py").write_text(hang)
    with started(*COMMAND, "run", "-n", "2", "train.py") as process:
        until((folder / "importing").exists, "the start of the fork server")
        pids = children(process.pid)
        with killed(*pids):
            for pid in (*pids, process.pid):
                os.kill(pid, signal.SIGINT)
            code, _, err = end(process)
            assert (code, "Traceback" in err) == (130, False), err
            until(lambda: not any(map(alive, pids)), "the end of every process")


INTERRUPTED = """
import os, signal
from offbeat.launcher import launch
def interrupt(fresh):
    os.kill(os.getpid(), signal.SIGINT)
    print("held")
launch._context = interrupt
try:
    launch.run("os", None, module=True, workers="1", here=1, store=None, fresh=False,
               max_restarts=0, grace="0s")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forks on Linux")
def test_ctrl_c_is_not_lost_while_the_fork_server_starts() -> None:
    assert ended(sys.executable, "-c", INTERRUPTED) == (0, "held\ninterrupted\n", "")


@pytest.mark.parametrize("fresh", [WARM, True])
def test_ctrl_c_reaches_the_workers(fresh: bool, folder: Path) -> None:
    """A worker ends by it, before the launcher kills it. A fork has imported torch already."""
    argv = ["run", *["--fresh"] * fresh, "-n", "1", "--grace", "60s", "train.py"]
    with started(*COMMAND, *argv) as process:
        assert state("one-0-0", process)["torch"] is not fresh
        process.send_signal(signal.SIGINT)
        code, _, err = end(process)
        assert (code, "worker 0 ended with exit code 130" in err) == (130, True), err


def test_the_launcher_does_not_import_torch() -> None:
    """It starts while the fork server imports torch."""
    line = "import offbeat.launcher.launch, sys; sys.exit('torch' in sys.modules)"
    assert ended(sys.executable, "-c", line) == (0, "", "")


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forks on Linux")
def test_workers_continue_without_their_fork_server(folder: Path) -> None:
    """The exit codes are known nevertheless, and a lost worker is a fork of a new server.

    The variables are those of torchrun with one worker each, and the address of the store.
    """
    with started(*COMMAND, "run", "-n", "2", "train.py", "--lr", "1", "-n") as process:
        first = [state(f"one-{rank}-0", process) for rank in range(2)]
        server = first[0]["parent"]
        os.kill(server, signal.SIGKILL)
        until(lambda: not alive(server), "the end of the server", 10)
        os.kill(first[1]["pid"], signal.SIGKILL)
        again = state("one-1-1", process)
        assert again["parent"] not in (server, process.pid)
        assert alive(first[0]["pid"])
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
    addresses = {found["environment"]["OFFBEAT_STORE"] for found in (*first, again)}
    assert len(addresses) == 1
    assert re.fullmatch(r"127\.0\.0\.1:\d+", addresses.pop())
    assert sorted(out.splitlines()) == ["[0] one-0-0", "[1] one-1-0", "[1] one-1-1"]
    assert "offbeat: worker 1 was ended by SIGKILL; again in 0.1 s (1 of 3)\n" in err
    assert err.count(" started") == 3
    assert "offbeat: worker 0 ended\n" in err


def test_a_script_that_fails_is_given_up(folder: Path) -> None:
    """Its exit code is the launcher's. A module is found in the current folder."""
    (folder / "failing.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(5)\n")
    code, out, err = ended(*COMMAND, "run", "-n", "1", "--fresh", "-m", "failing", "-m", "x")
    assert code == 5, err
    assert out == "[0] ['-m', 'x']\n"
    assert err.endswith(
        "ended with exit code 5; not again: the script fails before training begins\n"
    )


@pytest.mark.nightly
def test_launchers_share_a_store_that_outlives_them(folder: Path) -> None:
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
        assert lines[1].startswith(f"offbeat: on each machine: offbeat run --store {address} ")
        for host in ("first", "second"):
            argv = ["run", "--store", address, "-n", "2:3", "--here", "1", "--fresh", "train.py"]
            code, _, err = ended(*COMMAND, *argv, HOST=host)
            assert code == 0, err
            variables = json.loads(Path(f"{host}-0-0.json").read_text())["environment"]
            assert variables["OFFBEAT_WORKERS"] == "2:3"
            assert variables["OFFBEAT_STORE"] == address
        process.send_signal(signal.SIGTERM)
        assert end(process)[0] == 0
