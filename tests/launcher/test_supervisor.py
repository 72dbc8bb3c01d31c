"""Workers that are kept running: restarts, ends, signals. The scripts are small, without torch."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.commands import alive, until
from offbeat.launcher import supervisor as supervising
from offbeat.launcher.signals import Interruption
from offbeat.launcher.supervisor import Supervisor
from offbeat.launcher.worker import Program, Starter, Worker

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


class Training:
    """A training whose end a test chooses, and which processes have finished it."""

    def __init__(self, ended: Callable[[], bool], finished: bool) -> None:
        self.training_has_ended = ended
        self._finished = finished

    def rank_of(self, process: str) -> int | None:
        return 7

    def has_finished(self, process: str) -> bool:
        assert process
        return self._finished


class Launcher:
    """Runs a script on workers, and tells the exit code and what was reported."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capfd = folder, capfd
        self.out = self.err = ""

    def run(
        self,
        script: str,
        workers: int = 1,
        *arguments: str,
        most_restarts: int = 3,
        ended: Callable[[], bool] = lambda: False,
        finished: bool = False,
        interruption: Interruption | None = None,
        grace_seconds: float = 20.0,
    ) -> int:
        path = self.folder / "train.py"
        path.write_text(f"import os, signal, sys, time\nrank = os.environ['LOCAL_RANK']\n{script}")
        starter = Starter(Program(str(path), arguments), os.environ, fresh=True)
        code = Supervisor(
            [Worker(number, most_restarts) for number in range(workers)],
            starter,
            {"OFFBEAT_WORKERS": str(workers)},
            Training(ended, finished),
            Interruption() if interruption is None else interruption,
            grace_seconds,
        ).run()
        self.out, self.err = self._capfd.readouterr()
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
    """For example if nobody reads its output any more."""
    pid = tmp_path / "pid"

    def fail() -> bool:
        raise BrokenPipeError

    script = (
        "if rank == '0':\n"
        f"    open({f'{pid}.part'!r}, 'w').write(str(os.getpid()))\n"
        f"    os.replace({f'{pid}.part'!r}, {str(pid)!r})\n"
        "    time.sleep(60)\n"
        f"while not os.path.exists({str(pid)!r}): time.sleep(0.01)\n"
        "sys.exit(1)\n"
    )
    with pytest.raises(BrokenPipeError):
        launcher.run(script, 2, ended=fail)
    assert not alive(int(pid.read_text()))
