"""Workers that are kept running: restarts, ends, signals. The scripts are small, without torch."""

import contextlib
import errno
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.commands import alive, until
from offbeat.launcher import supervisor as supervising
from offbeat.launcher.script import Program
from offbeat.launcher.signals import Interruption
from offbeat.launcher.supervisor import Supervisor
from offbeat.launcher.worker import Worker, starter

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


class Training:
    """A training whose end a test chooses, and which processes have begun and finished it."""

    def __init__(self, ended: Callable[[], bool], begun: bool, finished: bool) -> None:
        self.training_has_ended = ended
        self._begun, self._finished = begun, finished
        self.deaths: list[str] = []

    def report_death(self, process: str) -> None:
        self.deaths.append(process)

    def rank_of(self, process: str) -> int | None:
        return 7 if self._begun else None

    def has_finished(self, process: str) -> bool:
        assert process
        return self._finished


class Launcher:
    """Runs a script on workers, and tells the exit code and what was reported."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capfd = folder, capfd
        self.out = self.err = ""
        self.deaths: list[str] = []

    def run(
        self,
        script: str,
        workers: int = 1,
        *arguments: str,
        most_restarts: int = 3,
        ended: Callable[[], bool] = lambda: False,
        begun: bool = True,
        finished: bool = False,
        start: Callable[..., Any] | None = None,
        interruption: Interruption | None = None,
        grace_seconds: float = 20.0,
    ) -> int:
        path = self.folder / "train.py"
        path.write_text(f"import os, signal, sys, time\nrank = os.environ['LOCAL_RANK']\n{script}")
        spawn = multiprocessing.get_context("spawn")
        training = Training(ended, begun, finished)
        code = Supervisor(
            [Worker(number, most_restarts) for number in range(workers)],
            start or starter(spawn, Program(str(path), arguments)),
            {"OFFBEAT_WORKERS": str(workers)},
            training,
            Interruption() if interruption is None else interruption,
            grace_seconds,
        ).run()
        self.out, self.err = self._capfd.readouterr()
        self.deaths = training.deaths
        return code

    @property
    def events(self) -> list[str]:
        """Lines of the launcher itself, without process ids.

        A short-lived worker may end before the launcher asks whether it trains.
        """
        lines = [
            line
            for line in self.err.splitlines()
            if line.startswith("offbeat: ") and "trains" not in line
        ]
        return [re.sub(r" \(process \d+\)", "", line)[9:] for line in lines]


@pytest.fixture
def launcher(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Launcher:
    return Launcher(tmp_path, capfd)


def test_workers_that_succeed_are_not_restarted(launcher: Launcher) -> None:
    script = "print(rank, os.environ['OFFBEAT_WORKERS'], sys.argv[1:], file=sys.stderr)\nprint('x')"
    assert launcher.run(script, 2, "--lr", "0.1") == 0
    assert sorted(launcher.out.splitlines()) == ["[0] x", "[1] x"]
    for rank in range(2):
        assert f"[{rank}] {rank} 2 ['--lr', '0.1']\n" in launcher.err
        assert f"worker {rank} started" in launcher.events
        assert f"worker {rank} ended" in launcher.events
    assert len(launcher.events) == 4


def test_a_killed_worker_is_started_again(launcher: Launcher) -> None:
    """Alone, with the next count; the output before and after has its number."""
    script = (
        "print(f'start {os.environ[\"OFFBEAT_RESTARTS\"]}')\n"
        "if rank == '1' and os.environ['OFFBEAT_RESTARTS'] == '0':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert launcher.run(script, 2) == 0
    assert len(launcher.deaths) == 1
    assert sorted(launcher.out.splitlines()) == ["[0] start 0", "[1] start 0", "[1] start 1"]
    told = [line for line in launcher.events if "worker 1" in line]
    assert told == [
        "worker 1 started",
        "worker 1 was ended by SIGKILL; again in 0.1 s (1 of 3)",
        "worker 1 started again",
        "worker 1 ended, restarted 1 time",
    ]


def test_a_script_that_always_fails_is_given_up(launcher: Launcher) -> None:
    """Its exit code becomes the launcher's, once no other worker runs."""
    assert launcher.run("if rank == '1': sys.exit(3)", 2, most_restarts=1) == 3
    told = [line for line in launcher.events if "worker 1" in line]
    assert told == [
        "worker 1 started",
        "worker 1 ended with exit code 3; again in 0.1 s (1 of 1)",
        "worker 1 started again",
        "worker 1 ended with exit code 3; not again (--max-restarts 1)",
    ]
    assert "worker 0 ended" in launcher.events


@pytest.mark.parametrize("workers", [1, 2])
def test_a_script_that_fails_before_it_trains_is_not_restarted(
    workers: int, launcher: Launcher
) -> None:
    """On none of the workers. A worker that fails first may have been started again meanwhile."""
    code = launcher.run(
        "if rank == '1': time.sleep(0.3)\nimport no_such_module", workers, begun=False
    )
    assert code == 1
    how = "ended with exit code 1; not again: the script fails before training begins"
    assert launcher.events[-1] == f"worker {workers - 1} {how}"
    assert launcher.err.count("No module named 'no_such_module'") in range(workers, 4)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "ending",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "import offbeat; raise offbeat.CommunicationError('the store is lost')",
        "if rank == '1': sys.exit(1)",
    ],
    ids=["killed", "communication", "one worker"],
)
def test_other_failures_before_training_are_restarted(ending: str, launcher: Launcher) -> None:
    assert launcher.run(ending, 2, most_restarts=1, begun=False) > 0
    assert "worker 1 started again" in launcher.events
    assert launcher.events[-1].endswith("not again (--max-restarts 1)")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EAGAIN, "Resource unavailable"), "[Errno 11] Resource unavailable"),
        (EOFError(), "the fork server has ended"),
    ],
)
def test_a_process_that_cannot_be_started_is_a_failure_of_its_worker(
    error: Exception, reason: str, launcher: Launcher, tmp_path: Path
) -> None:
    """It is tried again after a pause, and the other worker does not notice."""
    real = starter(multiprocessing.get_context("spawn"), Program(str(tmp_path / "train.py")))
    failures = [error, error]

    def start(variables: Any, *pipes: Any) -> Any:
        if variables["LOCAL_RANK"] == "1" and failures:
            raise failures.pop()
        return real(variables, *pipes)

    assert launcher.run("print('ran')", 2, start=start) == 0
    assert sorted(launcher.out.splitlines()) == ["[0] ran", "[1] ran"]
    assert [line for line in launcher.events if "worker 1" in line] == [
        f"worker 1 could not be started ({reason}); again in 0.1 s (1 of 3)",
        f"worker 1 could not be started ({reason}); again in 0.5 s (2 of 3)",
        "worker 1 started",
        "worker 1 ended",
    ]


def test_a_signal_of_a_worker_is_an_exit_code_above_128(launcher: Launcher) -> None:
    assert launcher.run("os.kill(os.getpid(), signal.SIGSEGV)", most_restarts=0) == 128 + 11
    assert launcher.events[-1] == "worker 0 was ended by SIGSEGV; not again (--max-restarts 0)"


def test_different_models_are_not_tried_again(launcher: Launcher) -> None:
    assert launcher.run("import offbeat\nraise offbeat.MismatchError('other model')") == 78
    assert "[0] offbeat.errors.MismatchError: other model\n" in launcher.err
    assert launcher.events[-1] == (
        "worker 0 ended with exit code 78; not again: a restart would not mend this error"
    )


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "lost before"])
@pytest.mark.parametrize(
    ("ending", "code", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "was ended by SIGKILL"),
        ("import offbeat; raise offbeat.CommunicationError('x')", 75, "ended with exit code 75"),
        ("raise OSError('no space for the model')", 1, "ended with exit code 1"),
    ],
)
def test_after_the_training_nothing_is_restarted(
    ending: str, code: int, how: str, finished: bool, launcher: Launcher
) -> None:
    """A worker lost near the end is a success. One that may not have saved the model is none."""
    assert launcher.run(ending, ended=lambda: True, finished=finished) == code * finished
    assert launcher.events[1:] == [
        f"worker 0 {how}, after the end of the training",
        "the training has ended",
    ]


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "lost before"])
def test_the_end_may_become_known_before_the_restart(finished: bool, launcher: Launcher) -> None:
    """The others have finished in the pause, or the store did not answer before."""
    answers = iter([False, True, True])
    code = launcher.run("sys.exit(1)", ended=lambda: next(answers), finished=finished)
    assert code == finished
    assert launcher.events[1:] == [
        "worker 0 ended with exit code 1; again in 0.1 s (1 of 3)",
        "worker 0 is not started again: the training has ended",
        "the training has ended",
    ]


def test_a_worker_that_trains_is_reported_once(launcher: Launcher) -> None:
    assert launcher.run("time.sleep(1.5)") == 0
    lines = [line for line in launcher.err.splitlines() if "trains" in line]
    assert lines == ["offbeat: worker 0 trains as rank 7"]


@contextlib.contextmanager
def signal_once(number: int, ready: Path) -> Iterator[Interruption]:
    """Send this process a signal once a worker has created the file ``ready``."""
    # The tests may run in the background of a shell script, where SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interruption() as interruption:
        real = supervising.Outputs.copy

        def copy(outputs: supervising.Outputs, seconds: float) -> None:
            real(outputs, seconds)
            if ready.exists() and not interruption:
                os.kill(os.getpid(), number)

        supervising.Outputs.copy = copy  # type: ignore[method-assign]
        try:
            yield interruption
        finally:
            supervising.Outputs.copy = real  # type: ignore[method-assign]
            signal.signal(signal.SIGINT, before)


HANDLES = """
def handle(number, frame):
    print('saving after', number)
    sys.exit(0)
signal.signal(int(sys.argv[1]), handle)
open(sys.argv[2], 'w').close()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_forwarded(number: signal.Signals, launcher: Launcher, tmp_path: Path) -> None:
    """The workers may save something. The exit code is that of the signal."""
    ready = tmp_path / "ready"
    with signal_once(number, ready) as interruption:
        code = launcher.run(HANDLES, 1, str(number.value), str(ready), interruption=interruption)
    assert code == 128 + number
    assert f"[0] saving after {number.value}\n" in launcher.out
    assert launcher.events[1:] == [
        f"{number.name}: forwarded to the workers; those that still run after 20 s are killed",
        "worker 0 ended",
    ]


IGNORES = """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(['sleep', '60'])
with open(sys.argv[1] + '.pid', 'w') as file:
    file.write(str(child.pid))
open(sys.argv[1], 'w').close()
time.sleep(60)
"""


def test_a_worker_that_does_not_end_is_killed(launcher: Launcher, tmp_path: Path) -> None:
    """With the processes that it has started."""
    ready = tmp_path / "ready"
    began = time.monotonic()
    with signal_once(signal.SIGTERM, ready) as interruption:
        code = launcher.run(
            IGNORES, 1, str(ready), interruption=interruption, grace_seconds=0.3, most_restarts=3
        )
    assert code == 128 + signal.SIGTERM
    assert launcher.events[-1] == "worker 0 was ended by SIGKILL"
    assert time.monotonic() - began < 30
    child = int(ready.with_suffix(".pid").read_text())
    until(lambda: not alive(child), "the end of the worker's own process", 10)


def test_an_error_of_the_launcher_ends_all_workers(launcher: Launcher, tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def fail() -> bool:
        raise MemoryError

    script = (
        "if rank == '0':\n"
        f"    open({f'{pid}.part'!r}, 'w').write(str(os.getpid()))\n"
        f"    os.replace({f'{pid}.part'!r}, {str(pid)!r})\n"
        "    time.sleep(60)\n"
        f"while not os.path.exists({str(pid)!r}): time.sleep(0.01)\n"
        "sys.exit(1)\n"
    )
    with pytest.raises(MemoryError):
        launcher.run(script, 2, ended=fail)
    assert not alive(int(pid.read_text()))
