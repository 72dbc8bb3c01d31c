"""Deaths at regular times under ``offbeat run``: what they cost, and what membership changes leak.

- *Availability*: every 20 s for ten minutes one of four workers is killed, in turn. A step sleeps
  for 50 ms. Workers that train for A seconds in sum could take A / d steps, of d seconds each. d is
  the mean of the steps that begin later than 5 s after the last death. The figure is
  A / (d · batches) − 1: how much later training ends than the availability allows, because of
  waiting and of batches that are used again.
- *Leaks*: a worker trains while others join and are killed. The figures are the threads, the
  descriptors and the memory that it has more at the end than after half of the membership changes.
  Until then the memory allocator still grows.
"""

import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Result
from benchmarks.launched.training import Process, Training, wait_until

WORKERS, EVERY_SECONDS, STEP_SECONDS = 4, 20.0, 0.05
_LIMIT_SECONDS = 60.0
_AFTER_SECONDS = 5.0  # time after a death in which steps may be longer


def settings(epochs: int, samples: int, strategy: str, step_seconds: float) -> dict[str, Any]:
    """Return the settings of the script for batches of one sample."""
    return {
        **{"epochs": epochs, "samples": samples, "batch": 1, "strategy": strategy},
        **{"step_seconds": step_seconds, "timeout_seconds": 60, "saves": False},
    }


def train(epochs: int, strategy: str) -> dict[str, Any]:
    """Train while workers are killed. Return the figures of the training.

    ``back`` has the seconds from each death to the first step of the worker's next process.
    """
    deaths: list[float] = []
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as name:
        chosen = settings(epochs, 1000, strategy, STEP_SECONDS)
        training = Training(Path(name, "training"), chosen, (WORKERS,))
        try:
            _require(wait_until(training.is_whole, _LIMIT_SECONDS), training)
            began, launcher = time.monotonic(), training.launchers[0]
            limit = began + 3 * epochs * 1000 * STEP_SECONDS / WORKERS + _LIMIT_SECONDS
            while launcher.poll() is None:
                _require(time.monotonic() < limit, training)
                due = began + EVERY_SECONDS * (len(deaths) + 1)
                if time.monotonic() > due and not training.has_ended():
                    for process in training.trains():
                        if process.slot == f"0:{len(deaths) % WORKERS}":
                            process.send(signal.SIGKILL)
                    deaths.append(time.monotonic())
                time.sleep(0.2)
            _require(launcher.returncode == 0, training)
            processes = [process for process in training.processes() if process.steps]
        finally:
            training.close()
    times = [[step["at"] for step in process.steps] for process in processes]
    intervals = [pair for one in times for pair in itertools.pairwise(one)]
    usual = [b - a for a, b in intervals if not any(a - _AFTER_SECONDS < d < b for d in deaths)]
    ends = [e for p in processes for e in p.events if e["event"] == "ended"]
    return {
        "batches": epochs * 1000,
        "taken": sum(len(one) for one in times),
        "counted_again": sum(process.steps[-1]["repeated"] for process in processes),
        "back": [b.steps[0]["at"] - a.steps[-1]["at"] for a, b in _successors(processes)],
        "seconds": max(end["at"] for end in ends) - min(one[0] for one in times),
        "trained_seconds": sum(one[-1] - one[0] for one in times),
        "step_seconds": statistics.mean(usual),
    }


def _require(met: bool, training: Training) -> None:
    if not met:
        raise RuntimeError(f"the training has failed: {training.output()[-5000:]}")


def _successors(processes: list[Process]) -> list[tuple[Process, Process]]:
    """Return the pairs of a killed process and the next one of the same worker."""
    trained = sorted(processes, key=lambda process: float(process.events[0]["at"]))
    slots = {p.slot: [q for q in trained if q.slot == p.slot] for p in trained}
    return [pair for own in slots.values() for pair in itertools.pairwise(own)]


def cost(minutes: float, strategy: str) -> Result:
    """Measure how far training is behind the time that the availability allows."""
    found = train(round(60 * minutes * WORKERS / (1000 * STEP_SECONDS * 1.1)), strategy)
    last_steps = (len(found["back"]) + WORKERS) * found["step_seconds"]
    trained = found["trained_seconds"] + last_steps
    details = {
        **found,
        "availability": trained / (WORKERS * found["seconds"]),
        "median_back_seconds": statistics.median(found["back"]),
        "longest_back_seconds": max(found["back"]),
    }
    what = f"{strategy}: {len(found['back'])} deaths: behind what availability allows"
    behind = trained / (found["step_seconds"] * found["batches"]) - 1
    config = {"workers": WORKERS, "every_seconds": EVERY_SECONDS, "strategy": strategy}
    return Result("availability", what, behind, 0.05, "", config, details)


def grown(changes: int, strategy: str = "local:period=4") -> dict[str, int]:
    """Let workers join and die. Return what a survivor holds more after ``changes`` of them.

    Threads, descriptors, and kilobytes of memory, each since half of them.
    """
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as name:
        chosen = settings(1000, 100, strategy, 0.005)
        training = Training(Path(name, "training"), chosen, (), store="process")
        path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        own = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OFFBEAT_KERNELS": "0"}
        own |= {"MACHINE": "0", "LOCAL_RANK": "0", "PYTHONPATH": path}
        own |= {"OFFBEAT_STORE": str(training.address), "OFFBEAT_WORKERS": "1"}
        script = [sys.executable, str(Path(__file__).with_name("script.py")), str(training.folder)]
        output = (training.folder / "output-joining").open("ab")

        def start() -> subprocess.Popen[bytes]:
            environment = {**os.environ, **own}
            return subprocess.Popen(script, env=environment, stdout=output, stderr=output)

        processes = []
        try:
            processes.append(start())
            _require(wait_until(lambda: bool(training.trains()), _LIMIT_SECONDS), training)
            survivor = training.trains()[0]
            for number in range(1, changes, 2):
                processes.append(start())
                _require(_reaches(training, survivor, number), training)
                processes[-1].kill()
                processes[-1].wait()
                _require(_reaches(training, survivor, number + 1), training)
            steps = survivor.steps
        finally:
            for process in processes:
                process.kill()
                process.wait()
            output.close()
            training.close()
    first = [step["resources"] for step in steps if step["generation"] == changes // 4 * 2][-1]
    last = steps[-1]["resources"]
    names = ("threads", "descriptors", "kilobytes")
    return {name: b - a for name, a, b in zip(names, first, last, strict=True)}


def _reaches(training: Training, process: Process, generation: int) -> bool:
    """Wait until a worker has trained in a generation, until threads of the last one have ended."""
    at = None

    def there() -> bool:
        nonlocal at
        training.processes()
        step = process.steps[-1]
        at = at or (time.monotonic() if step.get("generation", -1) >= generation else None)
        return at is not None and bool(step["at"] > at + 0.3)

    return wait_until(there, _LIMIT_SECONDS)


def leaks(changes: int) -> list[Result]:
    """Measure what the worker of ``grown`` holds more."""
    limits = {"threads": 1, "descriptors": 1, "kilobytes": 5000}
    config = {"changes": changes}
    return [
        Result(
            "availability",
            f"{changes} membership changes: more {name}",
            more,
            limits[name],
            "",
            config,
        )
        for name, more in grown(changes).items()
    ]


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    return [*leaks(12 if quick else 60), cost(1.5 if quick else 10.0, "streaming")]
