"""Workers that are kept running: restarts, ends, signals. The scripts are small, without torch."""

import asyncio
import errno
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.commands import alive, until
from offbeat.launcher import supervisor as supervising
from offbeat.launcher.launch import start_process
from offbeat.launcher.script import run_worker
from offbeat.launcher.supervisor import Supervisor

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="workers need Linux or macOS")

BEGIN = """
import os, signal, sys, time
from offbeat import errors
from offbeat.elastic import reports
rank, again = os.environ['LOCAL_RANK'], os.environ['OFFBEAT_RESTARTS'] != '0'
"""
TRAIN = "reports.tell('trains with identity 7')\n"
FINISH = "reports.tell(reports.FINISHED)\n"


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
        max_restarts: int = 3,
        grace_seconds: float = 20.0,
        failures: dict[str, list[Exception | None]] | None = None,
    ) -> int:
        """Run ``script``. ``failures`` are errors of the starts of each worker, from the first."""
        path = self.folder / "train.py"
        path.write_text(BEGIN + script)
        context = multiprocessing.get_context("spawn")

        def start(own: Any, pipes: Any) -> Any:
            errors = (failures or {}).get(own["LOCAL_RANK"])
            if errors and (error := errors.pop(0)):
                raise error
            return start_process(context, run_worker, [str(path), *arguments], False, own, *pipes)

        try:
            return asyncio.run(Supervisor(start, workers, max_restarts, grace_seconds).run())
        finally:
            self.out, self.err = self._capfd.readouterr()

    @property
    def events(self) -> list[str]:
        """Lines of the launcher itself, without process ids."""
        lines = [line[9:] for line in self.err.splitlines() if line.startswith("offbeat: ")]
        return [re.sub(r" \(process \d+\)", "", line) for line in lines]

    def of(self, number: int) -> list[str]:
        """Events of one worker, without its name."""
        name = f"worker {number} "
        return [line.removeprefix(name) for line in self.events if line.startswith(name)]


@pytest.fixture
def launcher(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Launcher]:
    # The tests may run in the background of a shell script, where SIGINT is ignored.
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield Launcher(tmp_path, capfd)
    signal.signal(signal.SIGTERM, before[0])
    signal.signal(signal.SIGINT, before[1])


def test_workers_that_succeed_are_not_restarted(launcher: Launcher) -> None:
    script = "print(rank, sys.argv[1:], file=sys.stderr)\nprint('x')"
    assert launcher.run(script, 2, "--lr", "0.1") == 0
    assert sorted(launcher.out.splitlines()) == ["[0] x", "[1] x"]
    for rank in range(2):
        assert f"[{rank}] {rank} ['--lr', '0.1']\n" in launcher.err
        assert launcher.of(rank) == ["started", "ended"]


def test_a_worker_that_always_fails_is_given_up(launcher: Launcher) -> None:
    """Its exit code becomes the launcher's, once no other worker runs."""
    script = f"{TRAIN}if rank == '1': sys.exit(3)\ntime.sleep(1)"
    assert launcher.run(script, 2, max_restarts=1) == 3
    assert launcher.of(1) == [
        *("started", "trains with identity 7", "ended with exit code 3; again in 0.1 s (1 of 1)"),
        *("started again", "trains with identity 7"),
        "ended with exit code 3; not again: --max-restarts 1",
    ]
    assert launcher.of(0)[-1] == "ended"


def test_pauses_increase_until_a_worker_has_trained_for_long(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "_PAUSES_SECONDS", (0.01, 0.02))
    script = "os.kill(os.getpid(), signal.SIGKILL)"
    assert launcher.run(script, max_restarts=3) == 137
    told = [line.partition("; ")[2] for line in launcher.of(0) if "; " in line]
    assert told == [
        *("again in 0.01 s (1 of 3)", "again in 0.02 s (2 of 3)", "again in 0.02 s (3 of 3)"),
        "not again: --max-restarts 3",
    ]
    monkeypatch.setattr(supervising, "_FORGET_SECONDS", 0.0)
    assert launcher.run(script, max_restarts=1) == 137
    script = "if os.environ['OFFBEAT_RESTARTS'] == '3': sys.exit()\n" + TRAIN + script
    assert launcher.run(script, max_restarts=1) == 0
    assert [line.partition("; ")[2] for line in launcher.of(0) if "; " in line] == [
        told[0][:-2] + "1)"
    ] * 3


@pytest.mark.parametrize("line", ["import no_such_module", "("])
def test_a_script_that_fails_before_training_ends_the_launcher(
    line: str, launcher: Launcher, tmp_path: Path
) -> None:
    """It would fail again. The other workers may wait for this one."""
    path = tmp_path / "broken.py"
    path.write_text(line)
    script = f"""
import subprocess, runpy
os.chdir({str(tmp_path)!r})
with open('writing ' + rank, 'w') as file:
    file.write(str(subprocess.Popen(['sleep', '60']).pid))
os.rename('writing ' + rank, 'pid ' + rank)
while rank == '0' or not os.path.exists('pid 0'):
    time.sleep(0.01)
runpy.run_path({str(path)!r})
"""
    assert launcher.run(script, 2) == 1
    how = "ended with exit code 1; not again: the script fails before training begins"
    assert launcher.of(1) == ["started", how]
    assert launcher.of(0) == ["started", "was ended by SIGKILL"]
    for pid in (int((tmp_path / f"pid {rank}").read_text()) for rank in range(2)):
        until(lambda pid=pid: not alive(pid), "the end of its process", 10)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "ending",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "raise errors.CommunicationError('the store is lost')",
    ],
    ids=["killed", "communication"],
)
def test_other_failures_before_training_are_restarted(ending: str, launcher: Launcher) -> None:
    assert launcher.run(ending, max_restarts=1) > 0
    assert "started again" in launcher.of(0)
    assert launcher.of(0)[-1].endswith("not again: --max-restarts 1")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EAGAIN, "Resource unavailable"), "[Errno 11] Resource unavailable"),
        (EOFError("unexpected EOF"), "the fork server has ended"),
    ],
)
def test_a_process_that_cannot_be_started_is_a_failure_of_its_worker(
    error: Exception, reason: str, launcher: Launcher
) -> None:
    """It is tried again after a pause, and the other worker does not notice."""
    assert launcher.run("print('ran')", 2, failures={"1": [error, error]}) == 0
    assert sorted(launcher.out.splitlines()) == ["[0] ran", "[1] ran"]
    assert launcher.of(0) == ["started", "ended"]
    assert launcher.of(1) == [
        f"could not be started ({reason}); again in 0.1 s (1 of 3)",
        f"could not be started ({reason}); again in 0.5 s (2 of 3)",
        *("started again", "ended"),
    ]
    assert launcher.run("", failures={"0": [error]}, max_restarts=0) == 75


@pytest.mark.parametrize(("number", "name"), [(11, "SIGSEGV"), (63, "signal 63")])
def test_a_signal_of_a_worker_is_an_exit_code_above_128(
    number: int, name: str, launcher: Launcher
) -> None:
    assert launcher.run(f"os.kill(os.getpid(), {number})", max_restarts=0) == 128 + number
    assert launcher.of(0)[-1] == f"was ended by {name}; not again: --max-restarts 0"


def test_different_models_are_not_tried_again(launcher: Launcher) -> None:
    assert launcher.run("raise errors.MismatchError('other model')") == 78
    assert "[0] offbeat.errors.MismatchError: other model\n" in launcher.err
    how = "ended with exit code 78; not again: a restart would not mend this error"
    assert launcher.of(0)[-1] == how


@pytest.mark.parametrize(
    ("ending", "code", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "was ended by SIGKILL"),
        (
            "from offbeat import errors; raise errors.CommunicationError('x')",
            75,
            "ended with exit code 75",
        ),
        ("raise OSError('no space for the model')", 1, "ended with exit code 1"),
    ],
)
def test_a_failure_after_the_training_is_the_result(
    ending: str, code: int, how: str, launcher: Launcher
) -> None:
    """The worker may not have saved its model."""
    script = f"{TRAIN}{FINISH}if rank == '1':\n    time.sleep(0.5)\n    {ending}"
    assert launcher.run(script, 2) == code
    assert launcher.of(1) == [
        *("started", "trains with identity 7", "finished the training"),
        f"{how}; not again: it had finished the training",
    ]
    assert launcher.of(0)[-1] == "ended"


def test_a_worker_lost_before_the_end_is_not_needed_after_it(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The others have finished before it is started again."""
    path = str(tmp_path / "finished")
    script = (
        f"{TRAIN}if rank == '1':\n"
        f"    while not os.path.exists({path!r}): time.sleep(0.01)\n"
        "    sys.exit(1)\n"
        f"{FINISH}open({path!r}, 'w').close()\n"
    )
    assert launcher.run(script, 2) == 0
    assert launcher.of(1)[-2:] == [
        "ended with exit code 1; again in 0.1 s (1 of 3)",
        "is not started again: the training has ended",
    ]


def test_a_stuck_worker_is_killed_after_the_training(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has finished may take longer, for example to save the model."""
    monkeypatch.setattr(supervising, "_STUCK_SECONDS", 0.5)
    script = (
        f"{TRAIN}if rank == '1':\n    time.sleep(1000)\n{FINISH}time.sleep(1)\nprint('has saved')\n"
    )
    assert launcher.run(script, 2) == 0
    assert launcher.out == "[0] has saved\n"
    assert launcher.of(1)[-3:] == [
        "still runs 0.5 s after the end of the training, and is killed",
        "was ended by SIGKILL; again in 0.1 s (1 of 3)",
        "is not started again: the training has ended",
    ]


@pytest.fixture
def signal_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Send a signal to this process once a worker has written its number to this file."""
    path = tmp_path / "signal"
    real = supervising.report

    def report(text: str) -> None:
        real(text)
        if "trains" in text:
            os.kill(os.getpid(), int(path.read_text()))

    monkeypatch.setattr(supervising, "report", report)
    return path


HANDLES = """
def handle(number, frame):
    print('saving after', number)
    sys.exit(0)
signal.signal(int(sys.argv[1]), handle)
reports.tell('trains')
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_forwarded(
    number: signal.Signals, launcher: Launcher, signal_once: Path
) -> None:
    """The workers may save something. The exit code is that of the signal."""
    signal_once.write_text(str(number.value))
    assert launcher.run(HANDLES, 1, str(number.value)) == 128 + number
    assert f"[0] saving after {number.value}\n" in launcher.out
    assert launcher.events[2:] == [
        f"{number.name}: forwarded to the workers; those that still run after 20 s are killed",
        "worker 0 ended",
    ]


IGNORES = """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(['sleep', '60'])
with open(sys.argv[1], 'w') as file:
    file.write(str(child.pid))
reports.tell('trains')
time.sleep(60)
"""


def test_a_worker_that_does_not_end_is_killed(
    launcher: Launcher, signal_once: Path, tmp_path: Path
) -> None:
    """With the processes that it has started."""
    signal_once.write_text(str(signal.SIGTERM.value))
    pid = tmp_path / "pid"
    assert launcher.run(IGNORES, 1, str(pid), grace_seconds=0.3) == 128 + signal.SIGTERM
    assert launcher.of(0)[-1] == "was ended by SIGKILL"
    until(lambda: not alive(int(pid.read_text())), "the end of the worker's own process", 10)


def test_an_error_of_the_launcher_ends_all_workers(launcher: Launcher, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = (
        "if rank == '0':\n"
        f"    open({f'{pid}.part'!r}, 'w').write(str(os.getpid()))\n"
        f"    os.replace({f'{pid}.part'!r}, {str(pid)!r})\n"
        "    time.sleep(60)\n"
        f"while not os.path.exists({str(pid)!r}): time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with pytest.raises(MemoryError):
        launcher.run(script, 2, failures={"1": [None, MemoryError()]})
    assert not alive(int(pid.read_text()))
