"""When a worker is started again."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from offbeat.launcher import worker
from offbeat.launcher.worker import Worker

PIPES: Any = (None, None)


class Ended:
    """A process that has ended with this status."""

    pid = 1 << 30  # larger than every process id

    def __init__(self, status: int | None) -> None:
        self.exitcode = status


class Scripted:
    """Starts nothing. The processes end with the given statuses, in turn."""

    def __init__(self, *statuses: int | None) -> None:
        self.statuses = [*statuses]
        self.variables: list[Mapping[str, str]] = []

    def __call__(self, variables: Mapping[str, str], out: Any, errors: Any) -> Ended:
        self.variables.append(variables)
        return Ended(self.statuses.pop(0))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that a test sets."""
    now = [1000.0]
    monkeypatch.setattr(worker.time, "monotonic", lambda: now[0])
    return now


def test_pauses_increase_up_to_half_a_minute(clock: list[float]) -> None:
    starter = Scripted(*[1] * 9)
    one = Worker(2, most_restarts=8)
    pauses = []
    while one.due is not None:
        clock[0] = one.due
        one.start(starter, {"SHARED": "x"}, *PIPES)
        assert one.pid == Ended.pid
        assert one.poll() == "ended with exit code 1"
        assert one.pid is None
        told = one.plan_restart()
        if one.due is not None:
            pauses.append(one.due - clock[0])
            assert told == f"again in {pauses[-1]:g} s ({len(pauses)} of 8)"
    assert pauses == pytest.approx([0.1, 0.5, 2, 8, 30, 30, 30, 30])
    assert told == "not again (--max-restarts 8)"
    assert not one.is_active
    own = [(v["SHARED"], v["LOCAL_RANK"], v["OFFBEAT_RESTARTS"]) for v in starter.variables]
    assert own == [("x", "2", str(count)) for count in range(9)]


def test_a_minute_of_life_forgets_the_restarts(clock: list[float]) -> None:
    one, starter = Worker(0, most_restarts=1), Scripted(-9, -9, -9, -9)
    told = []
    for life in (0.0, 59.9):
        one.start(starter, {}, *PIPES)
        clock[0] += life
        assert one.poll() == "was ended by SIGKILL"
        assert one.code == 128 + 9
        told.append(one.plan_restart())
    assert told == ["again in 0.1 s (1 of 1)", "not again (--max-restarts 1)"]
    for _ in range(2):
        one.start(starter, {}, *PIPES)
        clock[0] += 60
        one.poll()
        assert one.plan_restart() == "again in 0.1 s (1 of 1)"


@pytest.mark.parametrize(
    ("status", "restarts", "told"),
    [
        (78, 3, "not again: a restart would not mend this error"),
        (1, 0, "not again (--max-restarts 0)"),
    ],
)
def test_some_failures_are_final(status: int, restarts: int, told: str) -> None:
    one = Worker(0, most_restarts=restarts)
    one.start(Scripted(status), {}, *PIPES)
    one.poll()
    assert (one.plan_restart(), one.due, one.code) == (told, None, status)


def test_a_running_process_has_not_ended() -> None:
    one = Worker(0, most_restarts=3)
    assert one.is_active, "its first start is due"
    one.start(Scripted(None), {}, *PIPES)
    assert one.poll() is None
    assert one.is_active


@pytest.mark.skipif(sys.platform == "win32", reason="needs waitpid")
@pytest.mark.parametrize(
    ("ending", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 128 + 9), ("pass", 0)]
)
def test_a_worker_continues_without_its_fork_server(ending: str, code: int) -> None:
    """This process inherits it. Multiprocessing then gives 255 in place of its exit code."""
    script = f"import os, sys\nsys.stdin.read()\n{ending}"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as child:
        orphan = Ended(255)
        orphan.pid = child.pid
        one = Worker(0, most_restarts=3)
        one.start(lambda *_: orphan, {}, *PIPES)
        assert one.poll() is None
        assert child.stdin is not None
        child.stdin.close()
        one.wait()
        assert (one.process, one.code) == (None, code)


def test_255_may_be_the_exit_code_of_a_script() -> None:
    one = Worker(0, most_restarts=3)
    one.start(Scripted(255), {}, *PIPES)
    assert one.poll() == "ended with exit code 255"


def test_the_signals_of_a_system_have_names_or_numbers() -> None:
    names = []
    for status in (-15, -63):
        one = Worker(0, most_restarts=3)
        one.start(Scripted(status), {}, *PIPES)
        names.append(one.poll())
    assert names == ["was ended by SIGTERM", "was ended by signal 63"]
