"""What is done to the workers, each from outside, by the name of the case."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.soak.processes import Scene
from benchmarks.soak.worker import ASKING, FINISHED, FIRST_STEP
from offbeat.lab.launch.cluster import Cluster

_START_SECONDS = 30.0
_CHANGE_SECONDS = 20.0  # in which the others have gone on without one that is silent

Break = Callable[[Scene], float | None]
"""Breaks something, and returns when; None: it came too late."""


def _until(scene: Scene, rank: int, value: int, delay_seconds: float) -> bool:
    """Wait until a worker has come to ``value``, and the delay more; whether it lives."""
    process, progress = scene.processes[rank], scene.progress
    deadline = time.monotonic() + _START_SECONDS
    while progress.read(rank) < value:
        if process.poll() or time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    time.sleep(delay_seconds)
    return not process.poll() and progress.read(rank) < FINISHED


def _in_its_step(scene: Scene) -> bool:
    """Wait until the victim has come to where it happens; whether it lives."""
    case, value = scene.case, FIRST_STEP + scene.case.step
    if case.kind == "kill in load":
        value = FIRST_STEP - 1
    elif "in save" in case.kind:
        value = FIRST_STEP + 3 * (1 + case.step // 3)  # while it saves
    return _until(scene, case.victim, value, case.delay_seconds)


def _signals(*numbers: int, everyone: bool = False) -> Break:
    """Signals to the victim, some way into its step."""

    def send(scene: Scene) -> float | None:
        if not _in_its_step(scene):
            return None
        at = time.monotonic()
        victim = scene.processes[scene.case.victim]
        for process in scene.processes if everyone else [victim]:
            process.send(numbers[0])
        if len(numbers) > 1:
            time.sleep(1.0)
            victim.send(numbers[1])
        return at

    return send


def _silence(scene: Scene) -> float | None:
    """The victim is stopped, or its link ends without a word; perhaps it returns."""
    case = scene.case
    if not _in_its_step(scene):
        return None
    at = time.monotonic()
    if case.kind == "unplug":
        _link(scene, "down")
    else:
        scene.processes[case.victim].send(signal.SIGSTOP)
    _perhaps_return(scene)
    return at


def _perhaps_return(scene: Scene) -> None:
    """As soon as the others have gone on without the one that is silent."""
    case, deadline = scene.case, time.monotonic() + _CHANGE_SECONDS
    others = [p.rank for p in scene.processes if p.rank not in case.victims]
    while case.returns and time.monotonic() < deadline:
        if all(
            scene.reported(rank) or not scene.progress.sees(rank, case.silent) for rank in others
        ):
            time.sleep(case.second_delay_seconds)
            undo(scene)
            return
        time.sleep(0.002)


def _link(scene: Scene, state: str) -> None:
    assert scene.cluster is not None
    namespace = scene.cluster.command(scene.case.silent, [])[3]
    argv = ["ip", "-n", namespace, "link", "set", Cluster.interface, state]
    subprocess.run(argv, check=True, timeout=30)


def undo(scene: Scene) -> None:
    """Let one that was silent speak again, if it can."""
    if scene.case.kind != "unplug":
        scene.processes[scene.case.silent].send(signal.SIGCONT)
    elif scene.case.returns:
        _link(scene, "up")


def _before_attach(scene: Scene) -> float | None:
    """When the others have come to attach."""
    victim = scene.processes[scene.case.victim]
    deadline = time.monotonic() + _START_SECONDS
    while not victim.poll() and time.monotonic() < deadline:
        time.sleep(0.001)
    return time.monotonic()


def _two(scene: Scene) -> float | None:
    """Another one is killed, or stopped, soon after the victim was killed."""
    at = _signals(signal.SIGKILL)(scene)
    if at is not None:
        time.sleep(scene.case.second_delay_seconds)
        at = time.monotonic()
        stops = scene.case.silent >= 0
        scene.processes[scene.case.second].send(signal.SIGSTOP if stops else signal.SIGKILL)
        if stops:
            _perhaps_return(scene)
    return at


def _come(scene: Scene) -> float | None:
    """One more comes."""
    if not _in_its_step(scene):
        return None
    Path(scene.folder, "come").touch()
    return time.monotonic()


def _replace(scene: Scene) -> float | None:
    """The victim is killed, and one more comes."""
    at = _signals(signal.SIGKILL)(scene)
    if at is not None:
        time.sleep(scene.case.second_delay_seconds)
    Path(scene.folder, "come").touch()
    return at


def _kill_newcomer(scene: Scene) -> float | None:
    """One more comes, and is killed."""
    _come(scene)
    case = scene.case
    if not _until(scene, case.workers, ASKING, case.second_delay_seconds):
        return None
    at = time.monotonic()
    scene.processes[case.workers].send(signal.SIGKILL)
    return at


BREAKS: dict[str, Break] = {
    "kill": _signals(signal.SIGKILL),
    "terminate": _signals(signal.SIGTERM),
    "kill server": _signals(signal.SIGKILL),
    "kill at end": _signals(signal.SIGKILL),
    "below minimum": _signals(signal.SIGKILL),
    "kill two": _two,
    "kill in change": _two,
    "stop in change": _two,
    "kill in save": _signals(signal.SIGKILL),
    "kill all in save": _signals(signal.SIGKILL, everyone=True),
    "kill in load": _signals(signal.SIGKILL),
    "stop": _silence,
    "pause": _signals(signal.SIGSTOP, signal.SIGCONT),
    "interrupt": _signals(signal.SIGINT),
    "unplug": _silence,
    "kill before attach": _before_attach,
    "join": _come,
    "kill and join": _replace,
    "kill newcomer": _kill_newcomer,
}
