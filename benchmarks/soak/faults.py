"""Faults that are injected from outside of the worker, by the kind of the case."""

import signal
import subprocess
import time
from collections.abc import Callable

from benchmarks.soak.processes import Scene
from benchmarks.soak.records import FINISHED, FIRST_STEP
from offbeat_lab.launch.cluster import Cluster

_START_SECONDS = 30.0

Fault = Callable[[Scene], float | None]
"""Injects a fault and returns its time; None if the victim had ended before."""


def _wait_for(scene: Scene, rank: int, value: int, delay_seconds: float) -> bool:
    """Wait until a worker has reached ``value``, and the delay; return True if it still trains."""
    process, progress = scene.processes[rank], scene.progress
    deadline = time.monotonic() + _START_SECONDS
    while progress.read(rank) < value:
        if process.poll() or time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    time.sleep(delay_seconds)
    return not process.poll() and progress.read(rank) < FINISHED


def _wait_for_victim(scene: Scene) -> bool:
    """Wait until the victim has reached the step of the fault; return True if it still trains."""
    case, value = scene.case, FIRST_STEP + scene.case.step
    if case.kind == "kill in load":
        value = FIRST_STEP - 1
    elif "in save" in case.kind:
        value = FIRST_STEP + 3 * (1 + case.step // 3)  # a step that saves
    return _wait_for(scene, case.victim, value, case.delay_seconds)


def _signals(*numbers: int, all_workers: bool = False) -> Fault:
    """Send a signal to the victim in its step; a second one follows after a second."""

    def send(scene: Scene) -> float | None:
        if not _wait_for_victim(scene):
            return None
        at = time.monotonic()
        victim = scene.processes[scene.case.victim]
        for process in scene.processes if all_workers else [victim]:
            process.send(numbers[0])
        if len(numbers) > 1:
            time.sleep(1.0)
            victim.send(numbers[1])
        return at

    return send


def _stop_or_unplug(scene: Scene) -> float | None:
    """Stop the victim or cut its link."""
    case = scene.case
    if not _wait_for_victim(scene):
        return None
    at = time.monotonic()
    if case.kind == "unplug":
        _cut_link(scene)
    else:
        scene.processes[case.victim].send(signal.SIGSTOP)
    return at


def _cut_link(scene: Scene) -> None:
    assert scene.cluster is not None
    namespace = scene.cluster.command(scene.case.silent, [])[3]
    argv = ["ip", "-n", namespace, "link", "set", Cluster.interface, "down"]
    subprocess.run(argv, check=True, timeout=30)


def undo(scene: Scene) -> None:
    """Continue a stopped worker. A cut link stays cut."""
    if scene.case.kind != "unplug":
        scene.processes[scene.case.silent].send(signal.SIGCONT)


def _before_attach(scene: Scene) -> float | None:
    """Wait for the death of a victim that kills itself while the others attach."""
    victim = scene.processes[scene.case.victim]
    deadline = time.monotonic() + _START_SECONDS
    while not victim.poll() and time.monotonic() < deadline:
        time.sleep(0.001)
    return time.monotonic()


_KILL = _signals(signal.SIGKILL)
FAULTS: dict[str, Fault] = {
    **dict.fromkeys(("kill", "kill in save", "kill in load"), _KILL),
    **dict.fromkeys(("stop", "unplug"), _stop_or_unplug),
    "kill all in save": _signals(signal.SIGKILL, all_workers=True),
    "terminate": _signals(signal.SIGTERM),
    "pause": _signals(signal.SIGSTOP, signal.SIGCONT),
    "interrupt": _signals(signal.SIGINT),
    "kill before attach": _before_attach,
}
