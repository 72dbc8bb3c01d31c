"""Deaths at regular times under ``offbeat run``, and what they cost.

Every 20 s for ten minutes one of four workers is killed, in turn. A step sleeps for 50 ms. Workers
that train for A seconds in sum could take A / d steps, of d seconds each. d is the mean of the
steps that begin later than 5 s after the last death. The figure is A / (d · batches) − 1: how much
later training ends than the availability allows, because of waiting and of batches that are used
again.
"""

import itertools
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Result
from benchmarks.launched.training import Process, Training, wait_until

WORKERS, EVERY_SECONDS, STEP_SECONDS = 4, 20.0, 0.05
_LIMIT_SECONDS = 60.0
_AFTER_SECONDS = 5.0  # time after a death in which steps may be longer


def train(epochs: int, strategy: str) -> dict[str, Any]:
    """Train while workers are killed. Return the figures of the training.

    ``back`` has the seconds from each death to the first step of the worker's next process.
    """
    deaths: list[float] = []
    with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as name:
        chosen = {
            **{"epochs": epochs, "samples": 1000, "batch": 1, "strategy": strategy},
            **{"step_seconds": STEP_SECONDS, "timeout_seconds": 60, "saves": False},
        }
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


def results(*, quick: bool = False) -> list[Result]:
    """Return all figures of this benchmark."""
    return [cost(1.5 if quick else 10.0, "streaming")]
