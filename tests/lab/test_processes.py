"""The processes of workers on this machine: their environment, and their end."""

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.commands import alive, until
from offbeat_lab.job import Job
from offbeat_lab.launch import processes
from offbeat_lab.launch.processes import WorkerError, run_job
from offbeat_lab.launch.worker import WorkerProcess

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")

# The recipe of a worker is a file, which it runs.
STATE = """
import json, multiprocessing, os, signal, sys, time
state = json.dumps({
    "folder": os.getcwd(), "environment": dict(os.environ), "group": os.getpgid(0),
    "pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv,
    "files": [os.path.realpath(f"/proc/self/fd/{one}") for one in range(3)],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "method": multiprocessing.get_start_method(),
})
with open(os.environ["STATE"] + ".part", "w") as out:
    print(state, file=out)
os.rename(os.environ["STATE"] + ".part", os.environ["STATE"])
print("printed", flush=True)
print("to errors", file=sys.stderr, flush=True)
"""
SLEEP = "time.sleep(60)"
DIGITS = """
from offbeat_lab import recipe
from offbeat_lab.recipes import find_recipe
digits = recipe(metric="test accuracy", target=1, epochs=1)(find_recipe("digits").build)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., processes._Worker]:
    """Start a worker that writes its state to a file and runs ``ending``."""
    monkeypatch.chdir(tmp_path)

    def fork(ending: str, rank: int = 0) -> processes._Worker:
        recipe = tmp_path / f"recipe{rank}.py"
        recipe.write_text(STATE + ending)
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "STATE": f"{tmp_path}/state{rank}"}
        job = Job(str(recipe), "bsp", 1)
        worker = WorkerProcess(job, rank, str(tmp_path), True, None, environment)
        return processes._start(worker)

    return fork


def state(folder: Path, rank: int = 0) -> dict[str, Any]:
    path = folder / f"state{rank}"
    until(path.exists, "a worker's state")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_worker_has_the_environment_of_this_process(
    start: Callable[..., processes._Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Environment, folder, files and signals are those of now, next to another worker."""
    beside = start(SLEEP, 1)
    monkeypatch.setenv("ONLY_NOW", "yes")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a script
    try:
        worker = start("os._exit(7)")
        worker.process.join(60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert worker.status == 7
    found = state(tmp_path)
    assert found["pid"] == found["group"] == worker.process.pid
    assert found["folder"] == str(tmp_path)
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    assert found["environment"].items() >= own.items()
    assert found["files"] == [os.devnull] * 3
    assert found["interrupt"]
    assert found["method"] == multiprocessing.get_context().get_start_method()
    assert found["parent"] == state(tmp_path, 1)["parent"]
    assert beside.status is None
    beside.kill()
    beside.process.join(10)
    assert beside.status == -signal.SIGKILL


def test_an_error_of_any_type_is_sent_and_ends_the_worker(
    start: Callable[..., processes._Worker],
) -> None:
    worker = start("raise SystemExit('what now')")
    worker.process.join(60)
    assert worker.status == 1
    assert not [*worker.read()]
    assert worker.error.endswith("SystemExit: what now")


def test_the_first_error_is_that_of_the_run(tmp_path: Path) -> None:
    """Worker 0 fails later, because worker 1 is gone."""
    ends = "import multiprocessing\nif multiprocessing.current_process().name == 'rank1':\n"
    recipe = tmp_path / "recipe.py"
    recipe.write_text(f"{ends}    raise RuntimeError('broken')\n{DIGITS}")
    with pytest.raises(
        WorkerError, match=r"^worker 1 failed: .*, line 3: .* RuntimeError: broken$"
    ):
        run_job(Job(str(recipe), "bsp", 2), lambda event: None)


@pytest.mark.nightly  # two servers are started
@pytest.mark.skipif(sys.platform != "linux", reason="workers are forks on Linux")
def test_a_killed_fork_server_fails_the_run_and_is_replaced(
    start: Callable[..., processes._Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker is left."""
    (tmp_path / "recipe.py").write_text(f"{STATE}\n{SLEEP}")
    monkeypatch.setenv("STATE", str(tmp_path / "state5"))
    killed = threading.Thread(target=lambda: os.kill(state(tmp_path, 5)["parent"], signal.SIGKILL))
    killed.start()
    with pytest.raises(WorkerError, match="worker 0 failed: "):
        run_job(Job(str(tmp_path / "recipe.py"), "bsp", 1), lambda event: None)
    killed.join(60)
    found = state(tmp_path, 5)
    until(lambda: not alive(found["pid"]), "the end of the worker", 10)
    worker = start("os._exit(0)")
    worker.process.join(60)
    assert worker.status == 0
    assert state(tmp_path)["parent"] != found["parent"]
