"""Forked workers: their environment, and their end."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.commands import alive, until
from offbeat.errors import OffbeatError
from offbeat.launcher import forking
from offbeat.launcher.forking import ForkedProcess
from offbeat_lab.job import Job
from offbeat_lab.launch import fork_server
from offbeat_lab.train import encode

pytestmark = pytest.mark.skipif(not forking.AVAILABLE, reason="workers are forks on Linux")

# The recipe of a worker is a file, which it runs.
STATE = """
import json, os, signal, sys, time
def file(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""
state = json.dumps({
    "folder": os.getcwd(), "environment": dict(os.environ), "group": os.getpgid(0),
    "pid": os.getpid(), "parent": os.getppid(), "path": sys.path,
    "all": [file(one) for one in os.listdir("/proc/self/fd")],
    "wakeup": signal.set_wakeup_fd(-1), "files": [file(one) for one in range(3)],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
})
with open("../" + os.environ["ONLY_HERE"] + ".state", "w") as out:
    print(state, file=out)
print("printed", flush=True)
print("to errors", file=sys.stderr, flush=True)
"""
SLEEP = "time.sleep(60)"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ForkedProcess]:
    """Start a worker in an empty folder that writes its state to a file and runs ``ending``.

    The files ``NAME``, ``NAME.errors`` and ``NAME.state`` receive its events, standard error and
    state.
    """
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def fork(ending: str, name: str = "told") -> ForkedProcess:
        recipe = tmp_path / f"{name}.py"
        recipe.write_text(STATE + ending)
        argument = encode(Job(str(recipe), "bsp", 1), 0, f"{tmp_path}/met-{name}")
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "ONLY_HERE": name}
        with open(tmp_path / name, "wb") as out, open(tmp_path / f"{name}.errors", "wb") as errors:
            return fork_server.fork_worker(argument, environment, out.fileno(), errors.fileno())

    return fork


def state(worker: Path) -> dict[str, Any]:
    path = worker.with_suffix(".state")
    until(lambda: path.exists() and path.read_bytes().endswith(b"\n"), "a worker's state")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_fork_is_like_a_new_process(start: Callable[..., ForkedProcess], tmp_path: Path) -> None:
    """Environment, folder, files and signals are those requested, next to another worker."""
    beside = start(SLEEP, "beside")
    worker = start("os._exit(7)")
    pipes = {os.readlink(f"/proc/self/fd/{one._pipe}") for one in (beside, worker)}
    assert worker.wait() == 7
    assert worker.poll() == 7
    found = state(tmp_path / "told")
    assert found["pid"] == found["group"] == worker.pid
    assert found["parent"] != os.getpid(), "this process computes: it must not be forked"
    assert found["folder"] == str(tmp_path / "elsewhere")
    assert found["path"].count(str(tmp_path / "elsewhere")) == 1
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    assert found["environment"].items() >= own.items()
    assert found["environment"]["ONLY_HERE"] == "told"
    events, errors = str(tmp_path / "told"), str(tmp_path / "told.errors")
    assert found["files"] == [os.devnull, errors, errors]
    assert found["all"].count(events) == 1
    assert Path(events).read_text() == "", "what a recipe prints is no event"
    assert not pipes & {*found["all"]}, "held by a worker, they would not tell the server's end"
    assert found["interrupt"]
    assert found["wakeup"] == -1
    assert Path(errors).read_text().endswith("printed\nto errors\n")
    assert state(tmp_path / "beside")["parent"] == found["parent"]
    assert beside.poll() is None
    os.killpg(beside.pid, signal.SIGKILL)
    assert beside.wait() == -signal.SIGKILL
    assert not alive(beside.pid)


def test_an_unexpected_error_is_printed_and_ends_the_worker(
    start: Callable[..., ForkedProcess], tmp_path: Path
) -> None:
    """A worker must never continue in the loop of the server."""
    assert start("raise SystemExit('what now')").wait() == 1
    assert "SystemExit: what now" in (tmp_path / "told.errors").read_text()


@pytest.mark.nightly  # two servers are started
def test_a_server_that_does_not_answer_is_replaced(
    start: Callable[..., ForkedProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes in a finite time, no worker is left, and the next worker has a new server."""
    worker = start(SLEEP)
    server = state(tmp_path / "told")["parent"]
    os.kill(server, signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr(forking, "_START_SECONDS", 0.1)
        impatient.setattr(forking, "_END_SECONDS", 0.1)
        with pytest.raises(OffbeatError, match=r"did not answer in 0\.1 s"):
            start(SLEEP, "never")
    assert worker.wait() == -signal.SIGKILL
    until(lambda: not alive(worker.pid), "the end of the worker", 10)
    assert not alive(server)
    assert start("os._exit(0)", "next").wait() == 0
    assert state(tmp_path / "next")["parent"] != server
    assert (tmp_path / "never").read_text() == ""
